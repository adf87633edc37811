"""Outcomes of a loss: their errors, by hand-worked cases, and what rounding explains."""

import chainer_bspmm  # noqa: F401  first
import chainer
import numpy
import pytest
from chainer import links

from chainer_bspmm.training.outcome import beyond_rounding, dtype_of, errors, gradient_of
from chainer_bspmm.training.outcome import in_short, LOSS

A, B = gradient_of('/a'), gradient_of('/b')
INFINITY = numpy.inf


def arrays(**values):
    """Return an outcome: the loss, and gradients of /a and /b."""
    names = {'loss': LOSS, 'a': A, 'b': B}
    return {names[name]: numpy.array(value, 'd') for name, value in values.items()}


@pytest.mark.parametrize(
    'actual, expected, found',
    [
        (3.0, 4.0, 0.25),
        ([3.0, 4.0], [3.0, 9.0], 5 / 90**0.5),  # norms
        (0.001, 0.003, 0.2),  # a small value counts as 0.01
        (1.0, numpy.nan, INFINITY),
        (INFINITY, 1.0, INFINITY),
        (numpy.nan, INFINITY, None),
        ([1.0, 2.0], 1.0, None),
    ],
)
def test_an_error_is_relative(actual, expected, found):
    result = errors(arrays(loss=actual), arrays(loss=expected), 'float32')
    assert result == ({} if found is None else {LOSS: pytest.approx(found)})


def test_a_value_that_is_missing_has_no_error():
    assert errors({}, arrays(loss=1), 'float32') == {}


@pytest.mark.parametrize(
    'dtype, found', [('float16', 0.1), ('float32', 0.1), ('float64', pytest.approx(0.5))]
)
def test_values_are_small_by_the_dtype_of_the_parameters(dtype, found):
    assert errors(arrays(loss=0.003), arrays(loss=0.002), dtype) == {LOSS: pytest.approx(found)}


@pytest.mark.parametrize('largest, found', [(1e3, 0.5), (1e6, 1e-3), (INFINITY, 0.5)])
def test_a_gradient_is_small_beside_the_largest_that_is_finite(largest, found):
    expected, actual = arrays(a=largest, b=2), arrays(a=largest, b=3)
    assert errors(actual, expected, 'float32')[B] == pytest.approx(found)


def test_a_gradient_is_not_small_beside_a_loss():
    found = errors(arrays(loss=1e9, a=3), arrays(loss=1e9, a=2), 'float32')
    assert found == {LOSS: 0, A: 0.5}


@pytest.mark.parametrize('error, is_more', [(0.9, False), (1.1, True)])
def test_rounding_explains_errors_up_to_ten_times_its_own(error, is_more):
    """The largest effect counts, of three changes of the parameters by a few roundings."""
    rounding = float(numpy.finfo('f').eps)
    effects = {1 + 8 * rounding: 0.02, 1 + 24 * rounding: 0.1, 1 + 56 * rounding: 0.03}
    found = {LOSS: error}
    more = beyond_rounding(
        found, arrays(loss=1), lambda factor: arrays(loss=1 + effects.pop(factor)), 'float32'
    )
    assert more == (found if is_more else {}) and not effects


def test_rounding_explains_no_error_of_a_value_that_other_runs_lack():
    found = {A: 0.1}
    assert beyond_rounding(found, arrays(loss=1), lambda factor: {}, 'float32') == found


def test_without_errors_nothing_runs_again():
    assert beyond_rounding({}, arrays(loss=1), pytest.fail, 'float32') == {}


def test_the_least_precise_dtype_of_a_link_counts():
    link = chainer.Chain()
    assert dtype_of(link) == 'float32'
    for dtype, least in (('d', 'float64'), ('f', 'float32'), ('e', 'float16')):
        with link.init_scope(), chainer.using_config('dtype', numpy.dtype(dtype)):
            setattr(link, dtype, links.Linear(2, 2))
        assert dtype_of(link) == least


def test_mixed_precision_is_as_precise_as_float16():
    with chainer.using_config('dtype', chainer.mixed16):
        assert dtype_of(links.Linear(2, 2)) == 'float16'


@pytest.mark.parametrize('value, number', [([[7.0]], 7), (-2.0, -2), ([3.0, -4.0], 5)])
def test_a_number_for_an_array(value, number):
    assert in_short(numpy.array(value)) == number
