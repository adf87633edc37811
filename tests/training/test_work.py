"""Tolerance for the difference that spare rows may make."""

import types

import numpy
import pytest

import chainer
from chainer import links

from chainer_bspmm.cuda import gemm
from chainer_bspmm.training.work import spare_tolerance


@pytest.mark.parametrize(
    'dtype, xp, is_tf32, expected',
    [
        ('f', 'cupy', False, 1e-3),
        ('f', 'cupy', True, 3e-2),
        ('f', numpy, True, 1e-3),
        ('d', 'cupy', True, 1e-6),
        ('e', 'cupy', False, 3e-2),
    ],
)
def test_tf32_is_as_coarse_as_float16_on_a_gpu(monkeypatch, dtype, xp, is_tf32, expected):
    monkeypatch.setattr(gemm, 'is_tf32', lambda dtype: is_tf32)
    with chainer.using_config('dtype', numpy.dtype(dtype)):
        layer = links.Linear(2, 2)
    model = types.SimpleNamespace(device=types.SimpleNamespace(xp=xp), params=layer.params)
    assert spare_tolerance(numpy.dtype(dtype), model) == expected
