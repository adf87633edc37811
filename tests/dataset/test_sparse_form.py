"""Which dense data sets have a sparse form, and where the examples of their parts are.

What locks the arrays of a form, and what iterators do with it, is in training/test_iterators.py.
"""

import re

import chainer_bspmm  # noqa: F401  first
import numpy
import pytest
from chainer.datasets import SubDataset

from chainer_bspmm.dataset import sparse_form


def example(*labels, n=3, n_padding=0, atoms='i', adj='f'):
    """Return an example of n atoms in a chain."""
    ids = numpy.pad(numpy.arange(1, 1 + n), (0, n_padding)).astype(atoms)
    bonds = numpy.eye(n, k=1) + numpy.eye(n, k=-1)
    return (ids, numpy.pad(bonds, (0, n_padding)).astype(adj), *labels)


def features(dtype):
    return (numpy.ones((3, 2), dtype), *example()[1:])


WIDE = numpy.zeros(3, 'f')  # as many values as a molecule has atoms
LONGER = numpy.zeros(4, 'f')
ONE = numpy.float32(1)


@pytest.mark.parametrize(
    'examples',
    [
        [example()],
        [example(ONE), example(ONE)],
        [example(atoms='i'), example(atoms='q')],  # batches have ids of int32
        [features('f'), features('f')],
        [example(WIDE), example(WIDE)],  # the last column has labels of molecules
        [example(LONGER, ONE), example(LONGER, ONE)],
        [example(WIDE, ONE), example(WIDE, ONE, n=2)],  # sizes differ, so this cannot be of atoms
        [example(LONGER, n_padding=2), example(LONGER, n_padding=2)],
        [example(numpy.zeros((3, 1), 'f'), ONE)] * 2,
    ],
)
def test_data_sets_with_a_sparse_form(examples):
    assert len(sparse_form.converted(examples)) == len(examples)


NO_TUPLES = 'examples are not tuples of one length'
NO_ARRAY = 'a value of an example is not an array'
OTHERS = 'an example has no adjacency, or dtypes differ'
OF_ATOMS = 'labels of molecules might be taken for labels of atoms'


@pytest.mark.parametrize(
    'examples, reason',
    [
        ([list(example())], NO_TUPLES),
        ([example(), list(example())], NO_TUPLES),
        ([example(), example(ONE)], NO_TUPLES),
        ([example(1.0)], NO_ARRAY),
        ([example(ONE), example([1.0])], NO_ARRAY),
        ([(numpy.int32(6), numpy.zeros((1, 1), 'f'))], NO_ARRAY),
        ([(numpy.arange(3), ONE)], NO_ARRAY),
        ([(numpy.arange(3),)], OTHERS),
        ([example(adj='f'), example(adj='d')], OTHERS),
        ([example(ONE), example(numpy.float64(1))], OTHERS),
        ([features('f'), features('d')], OTHERS),
        ([example(), features('f')], OTHERS),
        ([example(WIDE, ONE), example(WIDE, ONE)], OF_ATOMS),
        ([example(ONE, WIDE, ONE)], OF_ATOMS),
        ([example(numpy.zeros(5, 'f'), n_padding=2)] * 2, OF_ATOMS),
    ],
)
def test_data_sets_without_a_sparse_form(examples, reason):
    with pytest.raises(sparse_form.CannotKeep, match='^%s$' % re.escape(reason)):
        sparse_form.converted(examples)


@pytest.mark.parametrize('order', [None, numpy.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])])
def test_examples_of_parts_are_found_in_the_whole(order):
    whole = list(range(10))
    part = SubDataset(SubDataset(whole, 2, 9, order), 1, 6)
    index = numpy.array([4, 0, 4])
    found = sparse_form.position_in_base(part, index)
    assert sparse_form.base_of(part) is whole
    assert [whole[i] for i in found] == [part[i] for i in index.tolist()]


def test_a_form_of_one_example_is_current():
    examples = [example(ONE)]
    form = sparse_form.open_form(examples)
    assert form.is_current(numpy.array([0]))
    examples[0] = example(ONE)
    assert not form.is_current(numpy.array([0]))
    form.close()


@pytest.mark.parametrize('wrong', [-1, 5, 7])
def test_an_index_out_of_a_part_is_not_found(wrong):
    part = SubDataset(list(range(10)), 2, 7)
    assert sparse_form.position_in_base(part, numpy.array([0, wrong])) is None


@pytest.mark.parametrize(
    'order', [[1, 0], numpy.array([[1], [0]]), (1, 0)], ids=['list', 'two dimensions', 'tuple']
)
def test_a_part_in_another_order_than_an_arrays_has_no_base(order):
    assert sparse_form.base_of(SubDataset([3, 4], 0, 1, order)) is None


def test_an_order_of_numbers_that_are_no_integers_finds_nothing():
    part = SubDataset([3, 4], 0, 2, numpy.array([1.0, 0.0]))
    assert sparse_form.position_in_base(part, numpy.array([0])) is None


def test_no_example_is_found_nowhere():
    assert sparse_form.position_in_base([1, 2], numpy.empty(0, int)).size == 0


def test_arrays_are_read_only_until_the_last_user_closes_the_form():
    examples = [example(LONGER.copy())]
    arrays = examples[0]
    form = sparse_form.open_form(examples)
    assert form is not None and sparse_form.open_form(examples) is form
    for are_writeable in (False, True):
        assert not any(array.flags.writeable for array in arrays)
        assert sparse_form.form_of(examples) is form
        form.close()
        assert all(array.flags.writeable for array in arrays) is are_writeable
    assert sparse_form.form_of(examples) is None
