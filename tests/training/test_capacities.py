"""Sizes of buffers: what they hold, how few there are, and what is always to spare."""

import numpy
import pytest

from chainer_bspmm.training.capacities import Capacities
from chainer_bspmm.training.capacities import Capacity
from chainer_bspmm.training.capacities import needs
from chainer_bspmm.training.capacities import STEP


def holds(capacity, need):
    return all(has >= asked for has, asked in zip(capacity, need))


@pytest.fixture
def sizes():
    return numpy.random.RandomState(0).randint(1, 40, 2000)


def test_needs():
    assert needs(numpy.array([3, 1]), numpy.array([4, 0]), 9) == Capacity(4, 4, 3, 4, 9)
    assert needs(numpy.zeros(1, int), numpy.zeros(1, int), None) == Capacity(0, 0, 0, 0, -1)


def test_two_sizes_hold_the_batches_of_a_data_set(sizes):
    capacities = Capacities(64, sizes, 2 * sizes, 30)
    rng, taken = numpy.random.RandomState(1), []
    for _ in range(1000):
        batch = rng.choice(sizes, 64, replace=False)
        need = needs(batch, 2 * batch, 30)
        taken.append(capacities.of(need))
        assert holds(taken[-1], need)
        assert taken[-1].rows > need.rows and taken[-1].entries > need.entries
    small, large = sorted(set(taken))
    # Rounding up to a multiple makes the share of the smaller one larger than 0.84.
    assert 0.8 < taken.count(small) / 1000 < 0.97
    assert large.rows < 1.3 * 64 * sizes.mean()
    assert small.max_rows == large.max_rows == sizes.max()


def test_no_size_is_larger_than_the_largest_batch():
    sizes = numpy.array([1] * 99 + [STEP])
    capacities = Capacities(2, sizes, sizes, None)
    assert capacities.of(Capacity(STEP + 1, STEP + 1, STEP, STEP, -1)).rows == 2 * STEP


@pytest.mark.parametrize('known', [False, True])
def test_larger_batches_add_sizes(sizes, known):
    capacities = Capacities(8, *(sizes, sizes, 5) if known else ())
    first = Capacity(5000, 100, 300, 20, 7)
    added = capacities.of(first)
    assert holds(added, first) and added.rows % STEP == added.entries % STEP == 0
    assert capacities.of(first._replace(rows=5400)) is added  # a tenth more than it was made for
    larger = capacities.of(first._replace(entries=90000))
    assert holds(larger, added) and larger is not added
    assert capacities.of(first) is added


def test_an_empty_data_set():
    empty = numpy.zeros(0, int)
    assert Capacities(8, empty, empty, 0).of(Capacity(0, 0, 0, 0, 0)).rows == STEP
