import types

import numpy
import pytest

import chainer

from chainer_bspmm.cuda import partial_sums, step
from chainer_bspmm.cuda.partial_sums import shared, sum_partials
from chainer_bspmm.ops import node
from tests.emulation.kernel_cases import DTYPES, integers


def partials(device, dtype, n_rows, n_columns, seed=0):
    """Return an array of integers, whose sums are exact."""
    array = device.put(integers((n_rows, n_columns), 'd' if dtype == 'd' else 'f', seed=seed))
    device.reachable.append(array)
    return array


def check(found, source, parts):
    for array, (first, shape, dtype) in zip(found, parts, strict=True):
        width = int(numpy.prod(shape))
        expected = source[:, first : first + width].sum(axis=0).reshape(shape).astype(dtype)
        assert array.dtype == dtype and array.shape == shape
        numpy.testing.assert_array_equal(array, expected)


def check_rows(device, dtype, n_rows):
    source = partials(device, dtype, n_rows, 77)
    parts = [(0, (3, 11), dtype), (40, (1,), dtype), (41, (36,), dtype)]
    check(sum_partials(source, parts), source, parts)
    assert device.names == {'sum_partials'} and len(device.launched) == 1


@pytest.mark.parametrize('n_rows', [1, 7, 8, 9, 64, 65, 150])
@pytest.mark.parametrize('dtype', DTYPES)
def test_rows(device, dtype, n_rows):
    check_rows(device, dtype, n_rows)


@pytest.mark.parametrize('n_rows', [1, 9, 65, 150])
@pytest.mark.parametrize('dtype', DTYPES)
def test_rows_of_many_columns(device, monkeypatch, dtype, n_rows):
    """A thread has several columns."""
    monkeypatch.setattr(partial_sums, 'MANY', 1)
    check_rows(device, dtype, n_rows)


def test_more_results_than_a_launch_has_places_for(device):
    source = partials(device, 'f', 5, 200)
    parts = [(i, (1,), 'f') for i in range(200)]
    check(sum_partials(source, parts), source, parts)
    assert len(device.launched) == 3


def test_nothing_to_sum(device):
    source = partials(device, 'f', 5, 3)
    (found,) = sum_partials(source, [(3, (0, 4), 'f')])
    assert found.shape == (0, 4) and not device.launched


@pytest.fixture
def pending(monkeypatch):
    """`PendingSums` of a step that is under way."""
    found = partial_sums.PendingSums()
    monkeypatch.setattr(step, 'current', lambda: types.SimpleNamespace(sums=found))
    return found


def test_sums_of_a_step_are_one_launch_at_its_end(device, pending):
    sources = [partials(device, 'f', n, 70, seed=n) for n in (3, 20, 9)]
    parts = [(2, (33,), 'f'), (40, (4, 5), 'f')]
    found = [sum_partials(source, parts) for source in sources]
    assert not device.launched and numpy.isnan(found[0][0]).all()
    assert not pending.others_than([array for arrays in found for array in arrays])
    assert pending.others_than(found[0])
    pending.launch()
    assert len(device.launched) == 1
    for arrays, source in zip(found, sources):
        check(arrays, source, parts)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('n_rows', [0, 4])
def test_blocks_of_a_product(device, pending, dtype, n_rows):
    """Gradients are the blocks themselves as long as nothing is added to them."""
    product = device.put(integers((n_rows, 35), dtype))
    found = shared(product, 2)
    expected = product[: n_rows // 2], product[n_rows // 2 :]
    for block, of_product in zip(found, expected, strict=True):
        numpy.testing.assert_array_equal(block, of_product)
        assert block.dtype == dtype
    pending.launch()
    assert not device.launched


@pytest.mark.parametrize('dtype', 'fd')
def test_gradients_are_added_to_blocks_of_a_product(device, pending, dtype):
    product = device.put(integers((4, 35), dtype))
    source = partials(device, dtype, 9, 140)
    expected = product + source.sum(axis=0).reshape(4, 35)
    blocks = shared(product, 2)
    device.reachable += blocks
    others = sum_partials(source, [(0, (2, 35), dtype), (70, (2, 35), dtype)])
    for block, other in zip(blocks, others):
        assert pending.chain(block, other)
    pending.launch()
    numpy.testing.assert_array_equal(numpy.concatenate(blocks), expected)
    assert len(device.launched) == 1


def test_a_product_is_added_to_other_gradients(device, pending):
    product = device.put(integers((2, 35), 'f'))
    source = partials(device, 'f', 9, 70)
    device.reachable.append(product)
    (total,) = sum_partials(source, [(0, (2, 35), 'f')])
    (block,) = shared(product)
    assert pending.chain(total, block)
    pending.launch()
    numpy.testing.assert_array_equal(total, product + source.sum(axis=0).reshape(2, 35))


def test_a_product_that_others_might_read_shows_it(device, monkeypatch):
    """The trial of a step looks for NaN that other gradients have read from a deferred one."""
    sums = partial_sums.PendingSums(shows_reads=True)
    monkeypatch.setattr(step, 'current', lambda: types.SimpleNamespace(sums=sums))
    (block,) = shared(device.put(integers((2, 35), 'f')))
    assert numpy.isnan(block).all() and sums.are_read_by([block * 2])


def test_columns_of_a_product_are_copied(device, pending):
    """Kernels add only to contiguous arrays."""
    product = device.put(integers((35, 4), 'f')).T
    (block,) = shared(product)
    numpy.testing.assert_array_equal(block, product)
    assert block.flags.c_contiguous


def test_tied_parameters_are_summed_together(device, pending):
    sources = [partials(device, 'f', n, 70, seed=n) for n in (3, 20, 9)]
    total, *others = [sum_partials(source, [(1, (50,), 'f')])[0] for source in sources]
    for other in others:
        assert pending.chain(total, other)
    assert not pending.chain(total, others[0]), 'others[0] must no longer be pending'
    assert not pending.chain(total, total)
    (half,) = sum_partials(sources[0], [(1, (50,), 'e')])
    assert not pending.chain(total, half)
    pending.launch()
    check([total], numpy.concatenate(sources), [(1, (50,), 'f')])


def test_a_sum_that_is_needed_at_once(device, pending):
    source = partials(device, 'f', 9, 70)
    first, second = sum_partials(source, [(0, (33,), 'f'), (40, (20,), 'f')])
    pending.settle(first)
    check([first], source, [(0, (33,), 'f')])
    assert numpy.isnan(second).all() and not pending.chain(first, second)
    pending.settle(first)
    pending.launch()
    check([second], source, [(40, (20,), 'f')])
    assert len(device.launched) == 2


def test_a_chain_ends_where_a_launch_has_no_more_places(device, pending):
    source = partials(device, 'f', 2, 4)
    total, *others = [sum_partials(source, [(0, (4,), 'f')])[0] for _ in range(81)]
    assert [pending.chain(total, other) for other in others] == [True] * 79 + [False]


def test_gradients_of_one_variable(device, pending):
    """Sums are deferred if all gradients are pending, and added at once otherwise."""
    source = partials(device, 'f', 9, 70)
    first, second, third = (
        chainer.Variable(array) for array in sum_partials(source, [(0, (33,), 'f')] * 3)
    )
    total = node._accumulated(first, second)
    assert total is first and not device.launched
    ready = chainer.Variable(numpy.ones(33, 'f'))
    expected = source[:, :33].sum(axis=0)
    for old, new, n in ((total, ready, 2), (ready, third, 1)):
        numpy.testing.assert_array_equal(node._accumulated(old, new).array, n * expected + 1)
    pending.launch()
    assert len(device.launched) == 2
