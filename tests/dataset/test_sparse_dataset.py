"""`to_sparse` and `SparseDataset` equal the dense data set in all of its uses."""

import collections
import contextlib
import functools
import io
import pickle
import re
import zipfile

import numpy
import pytest
import scipy.sparse

from chainer.backends import cuda
from chainer.dataset import concat_examples
from chainer.datasets import ConcatenatedDataset, SubDataset, TransformDataset
from chainer.iterators import MultiprocessIterator, SerialIterator
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.dataset.splitters import RandomSplitter, StratifiedSplitter
from chainer_chemistry.datasets import NumpyTupleDataset

from chainer_bspmm import concat_mols, CSRConverter
from chainer_bspmm.dataset import sparse_dataset, SparseDataset, to_sparse
from tests.support import random_matrix
from tests.support.data_sets import assert_same_batch, molecules, tuple_data_set
from tests.support.processes import python

SIZES = (3, 1, 5, 0, 2, 5, 4)
LAYOUTS = ('packed', 'folded', 'padded')


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('n_labels', [0, 2])
@pytest.mark.parametrize('n_relations', [1, 4])
@pytest.mark.parametrize('out_size', [None, 7])
def test_batches_are_those_of_the_dense_data_set(layout, n_labels, n_relations, out_size):
    examples = molecules(SIZES, n_labels, out_size, n_relations)
    sparse = to_sparse(examples)
    converter = CSRConverter(layout, strip_padding=True)
    for index in ([0, 1, 2, 3, 4, 5, 6], [5], [3], [6, 0, 3, 0, 2]):
        expected = converter([examples[i] for i in index])
        assert_same_batch(converter([sparse[i] for i in index]), expected)
        assert_same_batch(converter(sparse[index]), expected)
        assert_same_batch(converter(sparse[numpy.array(index)]), expected)


@pytest.mark.parametrize(
    'atoms, largest',
    [([[6, 8], [7]], 8), ([[], []], 0), ([[[6.5, 8]], [[1, 2], [3, 4]]], None)],
    ids=['ids', 'no atoms', 'features'],
)
def test_a_batch_knows_its_largest_atom_id(atoms, largest):
    """So a model need not look for it among the ids; features are no ids."""
    kind = 'i' if largest is not None else 'f'
    examples = [(numpy.array(each, kind), numpy.zeros((len(each),) * 2, 'f')) for each in atoms]
    _, adj = concat_mols(to_sparse(examples))
    assert adj.max_atom_id == largest


@pytest.mark.parametrize(
    'atoms, is_padding',
    [
        ([[6, 8, 0], [6, 0, 0]], True),
        ([[6, 8, 1], [6, 8, 1]], True),
        ([[6, 8, 0]], False),  # of a single molecule nothing tells
        ([[6, 0], [6, 8, 1]], False),
        ([[6, 8, 1], [6, 0]], False),
        ([[6, 0, 8], [6, 0, 0]], False),  # another atom has id 0
    ],
)
def test_trailing_ids_0_are_padding_if_all_molecules_are_padded_to_one_size(atoms, is_padding):
    examples = [(numpy.array(ids, 'i'), numpy.zeros((len(ids),) * 2, 'f')) for ids in atoms]
    assert to_sparse(examples).molecules.is_padding is is_padding


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def carbons(n_atoms, size):
    """Return an example of n carbons without bonds, padded to a size."""
    atoms = numpy.zeros(size, 'i')
    atoms[:n_atoms] = 6
    return atoms, numpy.zeros((size, size), 'f')


def test_a_molecule_of_another_process_has_padding_as_in_its_data_set():
    """A last batch of one is all that another process sends, and alone it would tell nothing."""
    sparse = to_sparse(molecules(SIZES, out_size=7))
    packed = CSRConverter('packed')
    for received in (pickled(sparse[2:3]), [pickled(sparse[2])]):
        assert_same_batch(packed(received), packed(sparse[2:3]))


@pytest.mark.parametrize('is_pickled', [False, True])
def test_molecules_that_tell_nothing_alone_do_so_together(is_pickled):
    examples = [to_sparse([carbons(n, 7)])[0] for n in (3, 5)]
    if is_pickled:
        examples = list(map(pickled, examples))
    atoms, _ = CSRConverter('packed')(examples)
    assert atoms.size == 3 + 5


def test_molecules_that_are_padded_to_several_sizes_may_have_atoms_of_id_0():
    parts = [to_sparse([carbons(n, size) for n in (3, 5)]) for size in (7, 9)]
    assert all(part.molecules.is_padding for part in parts)
    with pytest.raises(ValueError, match='^strip_padding: expected True or False'):
        CSRConverter('packed')([part[0] for part in parts])


@pytest.mark.parametrize('part', [1, 2, 4, 100])
@pytest.mark.parametrize('chunk', [1, 2, 100])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_symmetry_is_known_for_every_batch(layout, chunk, part, monkeypatch):
    """Symmetry of chunks is known at once if they have one molecule, or are symmetric as a whole.

    Some chunks contain only ones, which are not stored.
    """
    monkeypatch.setattr('chainer_bspmm.dataset.molecules.SYMMETRY_PART', part)
    monkeypatch.setattr(sparse_dataset, 'CHUNK', chunk)
    rng = numpy.random.RandomState(0)
    examples = [
        (numpy.ones(n, 'i'), random_matrix(rng, n, symmetric=symmetric, ones=n < 6).astype('f'), n)
        for n, symmetric in ((5, True), (6, False), (1, True), (4, True), (7, False))
    ]
    # only the pattern is symmetric, not the values
    examples.append((numpy.ones(2, 'i'), numpy.array([[0, 1], [2, 0]], 'f'), 2))
    sparse, converter = to_sparse(examples), CSRConverter(layout)
    assert sparse.molecules.symmetric.tolist() == [True, False, True, True, False, False]
    for index in ([0, 2, 3], [0, 1], [3, 4], [0, 5], [2]):
        assert_same_batch(converter(sparse[index]), converter([examples[i] for i in index]))


@pytest.mark.parametrize('out_size', [None, 7])
def test_examples_are_those_of_the_dense_data_set(out_size):
    dense = molecules(SIZES, 2, out_size, 4)
    sparse = to_sparse(dense)
    assert len(sparse) == len(dense) and sparse.n_relations == 4
    for example, (e_atoms, e_adj, *e_labels) in zip(sparse, dense):
        atoms, adj, *labels = example
        assert len(example) == 4
        numpy.testing.assert_array_equal(atoms, e_atoms)
        numpy.testing.assert_array_equal(adj.to_dense()[0], e_adj)
        numpy.testing.assert_array_equal(labels, e_labels)
        numpy.testing.assert_array_equal(example[-1], e_labels[-1])
        assert len(example[1:3]) == 2
        with pytest.raises(IndexError):
            example[4]


def test_indexing():
    dense = molecules(SIZES)
    sparse = to_sparse(dense)
    numbers = numpy.arange(len(dense))
    numpy.testing.assert_array_equal(sparse[-1][0], dense[-1][0])
    numpy.testing.assert_array_equal(sparse[numpy.int64(2)][0], dense[2][0])
    for index in (
        slice(None),
        slice(1, 4),
        slice(None, None, -2),
        slice(5, 2),
        [True, False] * 3 + [True],
        numbers > 3,
        [4, 0, 4],
        numpy.array([6, 1]),
    ):
        part = sparse[index]
        chosen = numbers[index]
        assert isinstance(part, SparseDataset) and len(part) == len(chosen)
        assert part.molecules is sparse.molecules  # nothing is copied
        for example, i in zip(part, chosen):
            numpy.testing.assert_array_equal(example[2], dense[i][2])
    assert len(sparse[[]]) == 0
    assert len(sparse[numpy.array([])]) == 0  # floats, as splitters give for an empty part


def test_a_part_of_a_part():
    dense = molecules(SIZES)
    part = to_sparse(dense)[2:6][[3, 0]]
    assert_same_batch(concat_mols(part), concat_mols([dense[5], dense[2]]))


def test_a_sparse_data_set_is_not_converted_again():
    sparse = to_sparse(molecules(SIZES))
    assert to_sparse(sparse) is sparse


def as_list(part):
    return [part[i] for i in range(len(part))]


def in_two(part):
    return ConcatenatedDataset(part[:2], part[2:])


@pytest.mark.parametrize('kind', [as_list, in_two, lambda part: SubDataset(part, 0, len(part))])
@pytest.mark.parametrize('chunk', [2, 256])
def test_parts_of_a_sparse_data_set_are_sparse_data_sets(kind, chunk, monkeypatch):
    monkeypatch.setattr(sparse_dataset, 'CHUNK', chunk)
    part = to_sparse(molecules(SIZES, n_labels=2))[[4, 1, 6]]
    assert_same_batch(concat_mols(to_sparse(kind(part))), concat_mols(part))


def test_a_sub_data_set_shares_the_arrays():
    whole = to_sparse(molecules(SIZES))
    assert to_sparse(SubDataset(whole, 1, 5)).molecules is whole.molecules


def test_sparse_examples_with_other_relations():
    examples = [to_sparse(molecules(n_relations=n))[0] for n in (1, 4)]
    message = '^dataset: expected the same relations, features and labels throughout, got '
    with pytest.raises(ValueError, match=message):
        to_sparse(examples)


@pytest.mark.parametrize('chunk', [1, 2, 256])
def test_dense_and_sparse_examples_become_one_data_set(chunk, monkeypatch):
    monkeypatch.setattr(sparse_dataset, 'CHUNK', chunk)
    dense = molecules(SIZES, n_relations=4)
    mixed = [dense[0], *as_list(to_sparse(dense)[1:3]), dense[3]]
    assert_same_batch(concat_mols(to_sparse(mixed)), concat_mols(dense[:4]))


@pytest.mark.parametrize('index', [7, -8, [7], numpy.zeros((1, 2), int), numpy.array(0)], ids=str)
def test_an_index_of_no_molecule(index):
    with pytest.raises(IndexError):
        to_sparse(molecules(SIZES))[index]


def test_sub_data_sets():
    dense = molecules(SIZES)
    order = [3, 2, 6, 1, 0, 5, 4]
    part, expected = (SubDataset(whole, 1, 5, order) for whole in (to_sparse(dense), dense))
    assert_same_batch(concat_mols(part), concat_mols(expected))
    assert_same_batch(concat_mols(part[1:]), concat_mols(expected[1:]))


def test_iterators():
    dense = molecules(SIZES)
    iterator, expected = (
        SerialIterator(whole, 3, shuffle=False) for whole in (to_sparse(dense), dense)
    )
    for _ in range(4):
        assert_same_batch(concat_mols(iterator.next()), concat_mols(expected.next()))


@pytest.mark.parametrize('index', [[0, 4, 1, 5, 9], [5, 5, 2]], ids=str)
def test_examples_of_several_data_sets_in_any_order(index):
    dense = molecules(SIZES)
    sparse = to_sparse(dense)
    both = ConcatenatedDataset(sparse[:3], to_sparse(dense[3:]), sparse)
    actual = concat_mols([both[i] for i in index])
    assert_same_batch(actual, concat_mols([dense[i % 7] for i in index]))


@pytest.mark.gpu
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('n_relations', [1, 4])
def test_gpu(layout, n_relations):
    # float64, bytes and int32 are all sent in one buffer
    dense = [
        (*example, numpy.float64(i), numpy.bool_(i % 2))
        for i, example in enumerate(molecules(SIZES, n_relations=n_relations))
    ]
    converter = CSRConverter(layout)
    atoms, adj, *labels = converter(to_sparse(dense), 0)
    assert adj.xp is cuda.cupy
    assert all(isinstance(array, cuda.ndarray) for array in [atoms, *labels])
    atoms, *labels = map(cuda.to_cpu, [atoms, *labels])
    assert_same_batch((atoms, adj.to_device(-1), *labels), converter(dense))


def test_iterator_in_other_processes():
    dense = molecules(SIZES)
    iterator = MultiprocessIterator(to_sparse(dense), 4, shuffle=False, n_processes=2)
    try:
        assert_same_batch(concat_mols(iterator.next()), concat_mols(dense[:4]))
    finally:
        iterator.finalize()


def test_examples_changed_on_the_way():
    dense = molecules(SIZES, n_relations=4)
    double = TransformDataset(to_sparse(dense), lambda example: (*example[:2], 2 * example[2]))
    expected = [(atoms, adj, 2 * label) for atoms, adj, label in dense]
    assert_same_batch(concat_mols(double), concat_mols(expected))


def test_a_batch_of_dense_and_sparse_examples():
    dense = molecules(SIZES, n_relations=4)
    mixed = [dense[0], to_sparse(dense)[1], dense[2]]
    assert_same_batch(concat_mols(mixed), concat_mols(dense[:3]))


def test_splitters():
    examples = [
        (atoms, adj, numpy.int32(i % 2))
        for i, (atoms, adj) in enumerate(molecules((3, 4, 2, 5) * 10, n_labels=0))
    ]
    dense, sparse = tuple_data_set(examples), to_sparse(examples)
    for splitter in (RandomSplitter(), StratifiedSplitter()):
        split = functools.partial(splitter.train_valid_test_split, return_index=False, seed=3)
        for parts in zip(split(sparse), split(dense)):
            assert isinstance(parts[0], SparseDataset)
            assert_same_batch(*map(concat_mols, parts))


def test_columns():
    examples = molecules(SIZES)
    dense = tuple_data_set(examples)
    sparse = to_sparse(tuple_data_set(examples))
    assert isinstance(sparse, NumpyTupleDataset) and sparse.converter is concat_mols
    part = sparse[[2, 4]]
    numpy.testing.assert_array_equal(sparse.features[:, -1], dense.features[:, -1])
    numpy.testing.assert_array_equal(part.features[:, 2], dense.features[[2, 4], 2])
    numpy.testing.assert_array_equal(part.get_datasets()[-1], dense.get_datasets()[-1][[2, 4]])
    for i, atoms in enumerate(sparse.features[:, 0]):
        numpy.testing.assert_array_equal(atoms, examples[i][0])
    atoms, adj, _ = part.get_datasets()
    numpy.testing.assert_array_equal(atoms[-1], examples[4][0])
    numpy.testing.assert_array_equal(adj[0].to_dense()[0], examples[2][1])
    assert len(atoms) == 2 and adj[:].shape == (2,)
    assert sparse.features.shape == dense.features.shape == (7, 3)


def test_duplicate_entries_of_scipys_matrices_are_added():
    twice = scipy.sparse.coo_matrix(([1.0, 2.0, 4.0], ([0, 0, 1], [1, 1, 0])), (2, 2))
    examples = [(numpy.array([6, 8], 'i'), twice), (numpy.array([6], 'i'), scipy.sparse.eye(1))]
    batch = concat_mols(to_sparse(examples))
    assert_same_batch(batch, concat_mols(examples))
    assert batch[1].to_dense()[0, :2, :2].tolist() == [[0, 3], [4, 0]]
    assert batch[1].nnz == 3


@pytest.mark.parametrize('n_relations', [1, 2])
@pytest.mark.parametrize('values', [[-1, 0, 1], [0, 1], [numpy.nan, 0, 2], [True, False]], ids=str)
def test_entries_of_scipys_matrices_are_those_of_the_dense_ones(n_relations, values):
    """A layer such as RelGAT takes each entry for a bond, so zeros must not be entries."""
    rng = numpy.random.RandomState(0)
    dtypes = ['?', 'f'] if values[0] is True else ['f']
    examples = [[], []]
    for n in (3, 1, 6, 2):
        parts = []
        for _ in range(n_relations):
            place = rng.randint(0, n, (2, 3 * n))
            drawn = rng.choice(values, 3 * n).astype(rng.choice(dtypes))
            parts.append(scipy.sparse.coo_matrix((drawn, place), (n, n)))
        dense = numpy.array([part.toarray() for part in parts])
        ids = numpy.arange(1, n + 1)
        examples[0].append((ids, parts))
        examples[1].append((ids, dense))
    expected, found = (CSRConverter('packed')(e)[1] for e in (examples[1], examples[0]))
    for name in ('indptr', 'indices', 'data'):
        numpy.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize('places', [([0, 1], [1, 0]), ([0, 0, 1], [1, 1, 0])], ids=['1', '2'])
def test_entries_of_one_are_not_stored(places):
    """Zeros are left out, and entries that are added up have the dtype of the others."""
    ones = numpy.ones(len(places[0]), 'f')
    zero = numpy.append(ones, ones[:1] * 0), tuple(numpy.append(place, 1) for place in places)
    examples = [(numpy.array([6, 8]), scipy.sparse.coo_matrix(zero, (2, 2)))]
    adj = concat_mols(examples)[1]
    assert adj.nnz == 2 and adj.dtype == (None if len(ones) == 2 else numpy.float32)


def test_tuples_of_another_class_with_scipys_matrices():
    Pair = collections.namedtuple('Pair', 'atoms adj')
    matrix = scipy.sparse.coo_matrix(([1.0, 2.0, 0.0], ([0, 0, 1], [1, 1, 0])), (2, 2))
    examples = [Pair(numpy.array([6, 8], 'i'), matrix)]
    assert to_sparse(examples)[0][1].nnz == concat_mols(examples)[1].nnz == 1


def test_a_part_keeps_its_padding_in_a_file(tmp_path):
    """A last batch of one would tell nothing alone."""
    path = str(tmp_path / 'set.npz')
    part = to_sparse(molecules(SIZES, out_size=7))[2:3]
    SparseDataset.save(path, part)
    packed = CSRConverter('packed')
    assert_same_batch(packed(SparseDataset.load(path)), packed(part))


def test_the_padding_of_a_whole_data_set_is_not_written(tmp_path):
    """Its arrays tell of it, and version 1.0 can read the file."""
    path = str(tmp_path / 'set.npz')
    whole = to_sparse(molecules(SIZES, out_size=7))
    assert whole.molecules.is_padding
    SparseDataset.save(path, whole)
    with numpy.load(path) as file:
        assert 'is_padding' not in file.files


def test_pickle_takes_only_its_own_part():
    sparse = to_sparse(molecules((4, 2, 3) * 100))
    part = sparse[[5, 1, 7]]
    for data_set in (sparse, part):
        again = pickle.loads(pickle.dumps(data_set))
        assert isinstance(again, SparseDataset)
        assert_same_batch(concat_mols(again), concat_mols(data_set))
    for small in (part, sparse[0]):
        assert len(pickle.dumps(small)) < len(pickle.dumps(sparse)) / 20
    again = [pickle.loads(pickle.dumps(sparse[i])) for i in (3, 0)]
    assert_same_batch(concat_mols(again), concat_mols(sparse[[3, 0]]))


@pytest.mark.parametrize('n_labels', [0, 2])
@pytest.mark.parametrize('ones', [True, False])
def test_load_gives_what_was_saved(tmp_path, n_labels, ones):
    examples = [
        (atoms, (adj != 0).astype('f') if ones else adj, *labels)
        for atoms, adj, *labels in molecules(SIZES, n_labels, 7, 4)
    ]
    sparse = to_sparse(examples)
    path = str(tmp_path / 'set.npz')
    for data_set in (sparse, sparse[[4, 2, 0]]):
        SparseDataset.save(path, data_set)
        again = SparseDataset.load(path)
        for layout in LAYOUTS:
            converter = CSRConverter(layout)
            assert_same_batch(converter(again), converter(data_set))


def test_files_hold_numbers_without_pickles(tmp_path):
    path = str(tmp_path / 'set.npz')
    SparseDataset.save(path, to_sparse(molecules(SIZES, 2, 7, 4)))
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            assert numpy.load(file.open(name), allow_pickle=False).dtype.kind in 'if'


def test_save_refuses_other_data_sets(tmp_path):
    message = '^dataset: expected a SparseDataset, got NumpyTupleDataset$'
    with pytest.raises(TypeError, match=message):
        SparseDataset.save(str(tmp_path / 'set.npz'), tuple_data_set(molecules()))


def test_upstreams_save_refuses_a_sparse_data_set(tmp_path):
    message = '^expected SparseDataset.save for a SparseDataset, got NumpyTupleDataset.save$'
    with pytest.raises(TypeError, match=message):
        NumpyTupleDataset.save(str(tmp_path / 'set.npz'), to_sparse(molecules()))


@pytest.mark.parametrize(
    'change, message',
    [
        (
            {'sizes': None},
            'expected the arrays of a SparseDataset, '
            'got atoms, columns, full_sizes, label_0, n_relations, row_nnz',
        ),
        (
            {'other': numpy.zeros(3)},
            'expected the arrays of a SparseDataset, '
            'got atoms, columns, full_sizes, label_0, n_relations, other, row_nnz, sizes',
        ),
        (
            {'atoms': numpy.array([[[1]]])},
            'atoms: expected floats of 1 or 2 dimensions, got int64 of shape (1, 1, 1)',
        ),
        (
            {'atoms': numpy.array([6.0, 8, 1])},
            'atoms: expected integers of 1 or 2 dimensions, got float64 of shape (3,)',
        ),
        (
            {'atoms': numpy.array([6, 2**31, 1])},
            'atoms: expected at most 2**31 - 1 = 2147483647 in one batch, got 2147483648',
        ),
        (
            {'columns': numpy.array([0.0, 1, 0, 1])},
            'columns: expected integers of 1 dimensions, got float64 of shape (4,)',
        ),
        ({'n_relations': -1}, 'n_relations: expected at least 1, got -1'),
        ({'n_relations': 0}, 'n_relations: expected at least 1, got 0'),
        ({'atoms': numpy.array([6])}, 'atoms: expected 3 items, the sum of sizes, got 1'),
        ({'row_nnz': numpy.array([1])}, 'row_nnz: expected 3 items, the sum of sizes, got 1'),
        (
            {'full_sizes': numpy.array([9])},
            'full_sizes: expected 2 items, the length of sizes, got 1',
        ),
        ({'columns': numpy.array([0])}, 'columns: expected 4 items, the sum of row_nnz, got 1'),
        ({'data': numpy.array([1.0])}, 'data: expected 4 items, the length of columns, got 1'),
        ({'label_0': numpy.array([1.0])}, 'label_0: expected 2 items, the length of sizes, got 1'),
        ({'sizes': numpy.array([4, -1])}, 'sizes: expected at least 0 at position 1, got -1'),
        (
            {'full_sizes': numpy.array([2, 0])},
            'full_sizes: expected at least 1 at position 1, got 0',
        ),
        (
            {'row_nnz': numpy.array([5, -1, 0])},
            'row_nnz: expected at least 0 at position 1, got -1',
        ),
        (
            {'columns': numpy.array([0, -2, 0, 0])},
            'columns: expected at least 0 at position 1, got -2',
        ),
        ({'atoms': numpy.array([6, -6, 1])}, 'atoms: expected at least 0 at position 1, got -6'),
        ({'label_0': numpy.array(1.0)}, 'label_0: expected an array, got a single value'),
        (
            {'is_padding': numpy.zeros(2, bool)},
            'is_padding: expected one bool, got bool of shape (2,)',
        ),
        ({'n_relations': numpy.array([1, 1])}, 'n_relations: expected one number, got shape (2,)'),
        (
            {'columns': numpy.array([0, 1, 5, 0])},
            'columns: expected less than 2, relations times the nodes of the molecule, '
            'at position 2, got 5',
        ),
        (
            {'columns': numpy.array([0, 1, 1, 1])},
            'columns: expected less than 1, relations times the nodes of the molecule, '
            'at position 3, got 1',
        ),
    ],
)
def test_load_checks_the_file(tmp_path, change, message):
    arrays = {
        'atoms': numpy.array([6, 8, 1]),
        'sizes': numpy.array([2, 1]),
        'full_sizes': numpy.array([2, 1]),
        'row_nnz': numpy.array([2, 1, 1]),
        'columns': numpy.array([0, 1, 0, 0]),
        'n_relations': 1,
        'label_0': numpy.array([0.0, 1.0]),
    }
    path = str(tmp_path / 'set.npz')
    numpy.savez(path, **arrays)
    atoms, adj, _ = concat_mols(SparseDataset.load(path))
    assert adj.nnz == 4 and adj.indices.dtype == atoms.dtype == numpy.int32
    arrays.update(change)
    numpy.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match='^%s$' % re.escape('%s: %s' % (path, message))):
        SparseDataset.load(path)


def test_load_of_other_files(tmp_path):
    path = str(tmp_path / 'set.npz')
    NumpyTupleDataset.save(path, tuple_data_set(molecules()))
    message = '%s: expected the arrays of a SparseDataset, got arr_0, arr_1, arr_2' % path
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        SparseDataset.load(path)


@pytest.mark.parametrize('kind', ['text', 'empty', 'cut', 'an array'])
def test_load_of_a_file_that_is_no_archive(tmp_path, kind):
    path = tmp_path / 'set.npz'
    SparseDataset.save(str(path), to_sparse(molecules()))
    array = io.BytesIO()
    numpy.save(array, numpy.arange(3))
    whole = path.read_bytes()
    contents = {
        'text': b'smiles,y\nCCO,1\n',
        'empty': b'',
        'cut': whole[: len(whole) // 2],
        'an array': array.getvalue(),
    }
    path.write_bytes(contents[kind])
    message = '^%s: expected the .npz file of a SparseDataset$' % re.escape(str(path))
    with pytest.raises(ValueError, match=message):
        SparseDataset.load(str(path))


def test_load_of_a_damaged_file(tmp_path):
    path = tmp_path / 'set.npz'
    SparseDataset.save(str(path), to_sparse(molecules()))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        member = file.getinfo('columns.npy').header_offset
    content[content.find(b'\x93NUMPY', member) + 130] ^= 1  # the header has 128 bytes
    path.write_bytes(content)
    with pytest.raises(ValueError, match='^%s: Bad CRC-32 for file' % re.escape(str(path))):
        SparseDataset.load(str(path))


def test_load_of_a_compressed_file_that_is_damaged(tmp_path):
    path = tmp_path / 'set.npz'
    numpy.savez_compressed(path, **to_sparse(molecules((5, 4) * 300)).molecules.arrays())
    content = bytearray(path.read_bytes())
    content[28] ^= 1  # the length of what precedes the first part
    path.write_bytes(content)
    with pytest.raises(ValueError, match='^%s: ' % re.escape(str(path))):
        SparseDataset.load(str(path))


def test_load_of_an_archive_with_another_file(tmp_path):
    path = tmp_path / 'set.npz'
    SparseDataset.save(str(path), to_sparse(molecules()))
    with zipfile.ZipFile(path, 'a') as file:
        file.writestr('data', b'1 2')
    message = '%s: data: expected an array, got a file of another kind' % path
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        SparseDataset.load(str(path))


def test_load_of_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        SparseDataset.load(str(tmp_path / 'none.npz'))


@pytest.mark.parametrize('convert', [dense_concat_mols, concat_examples])
def test_dense_converters_say_which_one_to_use(convert):
    sparse = to_sparse(molecules())
    message = (
        '^%s: expected chainer_bspmm.concat_mols or CSRConverter as the converter; '
        'the adjacency is sparse and cannot become one dense array$'
    )
    for name, batch in (('SparseDataset', sparse), ('SparseExample', [sparse[0], sparse[1]])):
        with pytest.raises(TypeError, match=message % name):
            convert(batch)


GOOD = molecules((3, 2, 4))
ATOMS, ADJ, LABEL = GOOD[0]


@pytest.mark.parametrize('n_dimensions', [0, 1, 2])
def test_parts_whose_labels_have_other_dimensions_are_not_joined(n_dimensions):
    one, other = (numpy.ones((2, 3, 2)[:n], 'f') for n in (n_dimensions, n_dimensions + 1))
    parts = [to_sparse([(ATOMS, ADJ, label)]).molecules for label in (one, other)]
    message = (
        'expected the same relations, features and labels throughout, '
        'got 1 relations, integer atoms of shape (n), labels of [%d] dimensions '
        'and 1 relations, integer atoms of shape (n), labels of [%d] dimensions'
        % (n_dimensions, n_dimensions + 1)
    )
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        type(parts[0]).concatenate(parts)


@pytest.mark.parametrize(
    'examples, message',
    [
        ([], 'dataset: expected at least one example, got none'),
        (
            [*GOOD, (ATOMS, ADJ[:2], LABEL)],
            'dataset[3]: expected a row and a column of the adjacency for each atom, '
            'got atoms of shape (3,) and adjacency of shape (2, 3)',
        ),
        (
            [*GOOD, (ATOMS - ATOMS.max() - 1, ADJ, LABEL)],
            'dataset[3][0]: expected atom ids of at least 0, got %d'
            % (ATOMS.min() - ATOMS.max() - 1),
        ),
        (
            [*GOOD[:2], (ATOMS, ADJ)],
            'dataset: expected the same number of columns in all examples, got 2 and 3',
        ),
        (
            [*GOOD[:2], *molecules((3, 2), n_relations=4)],
            'dataset: expected the same relations, features and labels throughout, '
            'got 1 relations, integer atoms of shape (n), labels of [] dimensions '
            'and 4 relations, integer atoms of shape (n), labels of [] dimensions',
        ),
        (
            [*GOOD[:2], (ATOMS, ADJ, LABEL[0])],
            'dataset[...][2]: expected labels of one shape, or NumPy arrays with the same number '
            'of dimensions, got float32 (), float32 (2,)',
        ),
        (
            [*GOOD, (ATOMS, ADJ[None], LABEL)],
            'dataset[3][1]: expected shape (n, n) as in dataset[2][1], got (1, 3, 3)',
        ),
    ],
)
def test_errors_name_the_example(examples, message, monkeypatch):
    monkeypatch.setattr(sparse_dataset, 'CHUNK', 2)
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        to_sparse(examples)


def test_a_generator_is_no_data_set():
    with pytest.raises(TypeError, match='^dataset: expected a sequence, got generator$'):
        to_sparse(example for example in GOOD)


def test_examples_are_not_molecules():
    message = '^molecules: expected Molecules, got list; to_sparse converts a data set$'
    with pytest.raises(TypeError, match=message):
        SparseDataset(GOOD)


def test_one_relation_with_a_dimension_of_its_own(monkeypatch):
    """Matrices of three dimensions may follow matrices of two dimensions in another chunk."""
    monkeypatch.setattr(sparse_dataset, 'CHUNK', 2)
    assert len(to_sparse([*GOOD[:2], (ATOMS, ADJ[None], LABEL), (ATOMS, ADJ[None], LABEL)])) == 4


def test_progress_counts_every_example(monkeypatch):
    totals = []
    counts = []

    @contextlib.contextmanager
    def progress(total, title):
        totals.append(total)
        yield counts.append

    monkeypatch.setattr(sparse_dataset, 'progress', progress)
    monkeypatch.setattr(sparse_dataset, 'CHUNK', 3)
    to_sparse(molecules(SIZES))
    assert totals == [len(SIZES)] and sum(counts) == len(SIZES)


def test_without_rdkit(tmp_path):
    path = str(tmp_path / 'set.npz')
    SparseDataset.save(path, to_sparse(molecules()))
    code = """if True:
        import sys
        sys.modules['rdkit'] = None
        from chainer_bspmm import concat_mols, dataset
        data_set = dataset.SparseDataset.load(sys.argv[1])
        print(concat_mols(data_set)[1].n_rows, data_set.features[:, -1].shape)
        try:
            dataset.from_smiles(['C'], 'nfp')
        except ImportError as error:
            print(error)
    """
    sizes, message = python('-W', 'ignore', '-c', code, path).stdout.splitlines()
    assert sizes == '12 (3, 2)'
    assert message.startswith('preprocessor: SMILES need RDKit: pip install rdkit (')


def test_a_batch_of_no_example():
    with pytest.raises(ValueError, match='^batch: expected at least one example, got none$'):
        concat_mols(to_sparse(molecules())[:0])


def test_a_batch_of_too_many_columns():
    sparse = to_sparse(molecules((3,)))
    sparse.molecules.n_relations = 2**30
    message = (
        'nodes times relations: expected at most 2**31 - 1 = 2147483647 in one batch, '
        'got 4294967296'
    )
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        concat_mols(sparse)


@pytest.mark.parametrize('n_relations', [1, 2])
@pytest.mark.parametrize('place', [(slice(None), 5), (5, slice(None))], ids=['column', 'row'])
def test_longest_rows_and_columns(n_relations, place):
    """They are counted if one has more than 128 entries. Each relation has separate columns."""
    examples = molecules((3, 140, 5), n_relations=n_relations)
    for atoms, adj, *_ in examples:
        if len(atoms) == 140:
            adj[(-1, *place)[-adj.ndim :]] = 1
    adjacencies = [adj.reshape(-1, *adj.shape[-2:]) != 0 for _, adj, *_ in examples]
    expected = [max(adj.sum((0, 2)).max(), adj.sum(1).max()) for adj in adjacencies]
    assert to_sparse(examples).molecules.longest.tolist() == expected


def test_repr():
    sparse = to_sparse(molecules(SIZES))
    assert repr(sparse[1:]) == '<SparseDataset: 6 molecules, 1 relation, 3 columns>'
    assert repr(sparse[0]).startswith('SparseExample(array(')


def test_a_molecule_alone_may_end_with_an_atom_of_id_0():
    """In a single molecule an atom of id 0 looks like padding, so a packed batch is an error."""
    example = numpy.array([6, 8, 0], 'i'), numpy.diag(numpy.ones(3, 'f'))[None]
    example[1][0, 2, 2] = 0
    message = (
        'strip_padding: expected True or False for this data set, got None: batch[0] would lose '
        'the last 1 of its 3 atoms, which have id 0 and no bond. They may be atoms, not padding: '
        'the batch is one molecule, or molecules differ in size, or other atoms have id 0, too. '
        'strip_padding=True drops such atoms, strip_padding=False keeps them'
    )
    for batch in ([example], to_sparse([example])[:]):
        with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
            CSRConverter('packed')(batch)
