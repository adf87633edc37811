"""Sizes of buffers: two for a data set, more for larger batches, always with room to spare."""

import numpy
import pytest

from chainer_bspmm.dataset.batch_form import Capacity, needs
from chainer_bspmm.training.sizes import Capacities, round_up, STEP


def holds(capacity, need):
    return all(has >= asked for has, asked in zip(capacity, need))


@pytest.fixture
def sizes():
    return numpy.random.RandomState(0).randint(1, 40, 2000)


def test_needs():
    assert needs(numpy.array([3, 1]), numpy.array([4, 0]), 9) == Capacity(4, 4, 3, 4, 9)
    assert needs(numpy.zeros(1, int), numpy.zeros(1, int), None) == Capacity(0, 0, 0, 0, -1)


def test_two_sizes_hold_the_batches_of_a_data_set(sizes):
    capacities = Capacities(64, sizes, 2 * sizes, needs(sizes, 2 * sizes, 30))
    rng = numpy.random.RandomState(1)
    taken = []
    for _ in range(1000):
        batch = rng.choice(sizes, 64, replace=False)
        need = needs(batch, 2 * batch, 30)
        taken.append(capacities.of(need))
        assert holds(taken[-1], need)
        assert taken[-1].rows > need.rows and taken[-1].entries > need.entries
    small, large = sorted(set(taken))
    # The smaller size is meant for 84 % of the batches, for more if it is rounded up.
    assert 0.8 < taken.count(small) / 1000 < 0.97
    assert large.rows < 1.3 * 64 * sizes.mean()
    assert small.max_rows == large.max_rows == sizes.max()


def test_sizes_at_the_edges():
    """All batches of a data set fit with a spare row, and no size exceeds that of the largest."""
    sizes = numpy.array([1] * 99 + [STEP])
    capacities = Capacities(2, sizes, sizes, needs(sizes, sizes, None))
    assert capacities.of(Capacity(STEP + 1, STEP + 1, STEP, STEP, -1)).rows == 2 * STEP

    sizes = numpy.array([STEP // 2, 3 * STEP // 2])
    capacities = Capacities(2, sizes, sizes, needs(sizes, sizes, None))
    known = {capacities.of(needs(sizes[:1], sizes[:1], None)) for _ in range(2)}
    assert {capacities.of(needs(sizes, sizes, None))} == known
    assert known.pop().rows == 3 * STEP
    empty = numpy.zeros(0, int)
    capacities = Capacities(8, empty, empty, needs(empty, empty, 0))
    assert capacities.of(Capacity(0, 0, 0, 0, 0)).rows == STEP


@pytest.mark.parametrize(
    'number, rounded', [(-1, 64), (0, 64), (1, 64), (64, 64), (64.2, 128), (65, 128), (129, 192)]
)
def test_sizes_are_rounded_up(number, rounded):
    assert round_up(number) == rounded


def test_a_size_for_a_batch_has_a_tenth_to_spare():
    need = Capacity(rows=5002, entries=115, max_rows=305, max_entries=25, max_atom_id=7)
    expected = Capacity(rows=5504, entries=128, max_rows=336, max_entries=28, max_atom_id=7)
    assert Capacities(8).of(need) == expected


@pytest.mark.parametrize('known', [False, True])
def test_larger_batches_add_sizes(sizes, known):
    capacities = Capacities(8, *(sizes, sizes, needs(sizes, sizes, 5)) if known else ())
    first = Capacity(5000, 100, 300, 20, 7)
    added = capacities.of(first)
    assert holds(added, first) and added.rows % STEP == added.entries % STEP == 0
    assert added.rows <= 1.2 * first.rows + STEP
    assert capacities.of(first._replace(rows=5400)) is added  # sizes have a tenth to spare
    larger = capacities.of(first._replace(entries=90000))
    assert holds(larger, added) and larger is not added
    assert capacities.of(first) is added


def test_a_size_that_is_full_has_no_spare_row(sizes):
    capacities = Capacities(64, sizes, 2 * sizes, needs(sizes, 2 * sizes, 30))
    batch = sizes[:64]
    need = needs(batch, 2 * batch, 30)
    small = capacities.of(need)
    for name in ('rows', 'entries'):
        full = need._replace(**{name: getattr(small, name)})
        assert getattr(capacities.of(full), name) > getattr(small, name)
