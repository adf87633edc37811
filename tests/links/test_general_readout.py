"""The readout link alone: values by hand, modes, activation."""

import numpy
import pytest

import chainer

from chainer_bspmm.links import GeneralReadout
from chainer_bspmm.sparse import BatchedCSR

ADJ = BatchedCSR.from_matrices([numpy.eye(2), numpy.eye(1)])
H = numpy.array([[1.0, -4.0], [2.0, -3.0], [-5.0, 6.0]], 'f')


@pytest.mark.parametrize(
    'mode, expected',
    [
        ('sum', [[3, -7], [-5, 6]]),
        ('max', [[2, -3], [-5, 6]]),
        ('summax', [[3, -7, 2, -3], [-5, 6, -5, 6]]),
    ],
)
def test_modes(mode, expected):
    numpy.testing.assert_array_equal(GeneralReadout(mode)(H, ADJ).array, expected)


def test_activation_comes_first():
    y = GeneralReadout('sum', activation=chainer.functions.relu)(H, ADJ)
    numpy.testing.assert_array_equal(y.array, [[3, 0], [0, 6]])


def test_unknown_mode():
    message = "mode: expected one of 'sum', 'max', 'summax', got 'mean'"
    with pytest.raises(ValueError, match=message):
        GeneralReadout('mean')
