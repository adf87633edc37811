"""Checks that only arguments on two GPUs can fail."""

import types

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer import backend

from chainer_bspmm.sparse import check


class OnGPU(numpy.ndarray):
    """A NumPy array with the attributes that name a CuPy array's GPU."""

    device_id = 0

    @property
    def data(self):
        return types.SimpleNamespace(device_id=self.device_id)


def on_gpu(device_id):
    array = numpy.ones(3, 'f').view(OnGPU)
    array.device_id = device_id
    return array


def test_an_array_on_another_gpu_than_the_matrix(monkeypatch):
    def device_of(array):
        return '@cupy:%d' % array.device_id

    monkeypatch.setattr(backend, 'get_device_from_array', device_of)
    adj = types.SimpleNamespace(row_offsets=on_gpu(0))
    check.on_device('x', on_gpu(0), adj)
    with pytest.raises(
        ValueError, match='^x: expected an array on @cupy:0, like adj, got one on @cupy:1$'
    ):
        check.on_device('x', on_gpu(1), adj)
