"""Methods of all containers, from `Batch`: changed copies, derived data, transfers."""

import types

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.sparse.batch import send


def test_arrays_are_sent_together_each_aligned_for_the_widest_load():
    arrays = [
        numpy.arange(n, dtype=dtype)
        for n, dtype in ((1, 'i'), (3, 'd'), (0, 'f'), (5, 'e'), (7, 'i'), (9, 'd'))
    ]
    arrays.append(numpy.arange(12.0).reshape(4, 3)[:, ::2])  # not contiguous
    sent = []
    device = types.SimpleNamespace(xp=None, send=lambda buffer: sent.append(buffer) or buffer)
    received = send(arrays, device)
    (buffer,) = sent
    for array, copy in zip(arrays, received, strict=True):
        assert (copy.ctypes.data - buffer.ctypes.data) % 16 == 0
        assert copy.dtype == array.dtype
        numpy.testing.assert_array_equal(copy, array)


@pytest.mark.parametrize('n_bytes, expected', [(0, 0), (1, 16), (16, 16), (17, 32), (240, 240)])
def test_an_array_that_is_sent_has_fewer_than_16_bytes_behind_it(n_bytes, expected):
    sent = []
    device = types.SimpleNamespace(xp=None, send=lambda buffer: sent.append(buffer) or buffer)
    send([numpy.zeros(n_bytes, 'u1')], device)
    assert sent[0].nbytes == expected


def test_replace_derives_anew():
    adj = BatchedCSR.from_matrices([numpy.array([[0.0, 2.0], [0.0, 0.0]])])
    adj.T  # NOQA: B018
    adj.cached('kept', lambda: 1)
    other = adj.replace(data=numpy.array([5.0]))
    assert other.T.data == [5] and adj.T.data == [2]
    assert other.indices is adj.indices and type(other) is BatchedCSR
    assert other.cached('kept', lambda: 2) == 2


def test_what_is_derived_is_made_once():
    adj = BatchedCSR.from_matrices([numpy.ones((2, 2))])
    assert adj.cached('kept', list) is adj.cached('kept', lambda: pytest.fail('made again'))
