"""Labels of several shapes, and names: batches of all data sets have upstream's arrays."""

import pickle
import re
import types

from chainer.datasets import ConcatenatedDataset, SubDataset
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
import numpy
import pytest

import chainer

from chainer_bspmm import concat_mols, CSRConverter
from chainer_bspmm.dataset import dense_examples, from_smiles, SparseDataset, to_sparse
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.labels import VaryingLabels
from tests.support.data_sets import molecules, tuple_data_set

SIZES = (3, 7, 5, 2, 6, 4)
BATCHES = ([0, 1, 2, 3, 4, 5], [2, 4], [5, 0, 1], [3])


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    """Forget what earlier batches have shown about columns, and restore it after the test."""
    monkeypatch.setattr(dense_examples, '_of_molecules', set())


def shapes(*columns):
    """Return an array of random numbers for each shape."""
    rng = numpy.random.RandomState(0)
    return [rng.uniform(1, 9, shape) for shape in columns]


def of_dtypes(values, dtypes):
    return [value.astype(dtype) for value, dtype in zip(values, dtypes, strict=True)]


ONE = shapes(1, 2, 3, 1, 2, 3)
TWO = shapes((1, 2), (3, 1), (2, 2), (1, 1), (4, 3), (1, 5))

LABELS = {
    'one dimension': of_dtypes(ONE, 'ffffff'),
    'two dimensions': of_dtypes(TWO, 'dddddd'),
    'three dimensions': shapes((1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 1, 1), (1, 2, 1), (2, 2, 2)),
    'only the second differs': shapes((2, 1), (2, 3), (2, 2), (2, 2), (2, 4), (2, 1)),
    'integers': of_dtypes(ONE, 'iiiiii'),
    'bytes': of_dtypes(TWO, 'bbbbbb'),
    'bool': [value > 4 for value in ONE],
    'halves': of_dtypes(ONE, 'eeeeee'),
    'some are empty': shapes(0, 2, 0, 1, 0, 3),
    'empty, of two dimensions': shapes((0, 2), (2, 0), (0, 0), (0, 1), (0, 3), (1, 0)),
    'all are empty': shapes(0, 0, 0, 0, 0, 0),
    'one shape': shapes(2, 2, 2, 2, 2, 2),
    'missing values': [numpy.where(value > 4, value, numpy.nan) for value in ONE],
}


def examples_with(*columns):
    return [(*example[:2], *labels) for example, *labels in zip(molecules(SIZES), *columns)]


def assert_same(array, expected):
    """Check that two arrays have the same values, dtype and shape."""
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    numpy.testing.assert_array_equal(array, expected)


def assert_same_labels(batch, expected):
    """Check that all columns behind the adjacency equal upstream's."""
    for ours, theirs in zip(batch[2:], expected[2:], strict=True):
        assert_same(ours, theirs)


def unpickled(thing):
    return pickle.loads(pickle.dumps(thing))


def saved(examples, path):
    SparseDataset.save(path / 'set.npz', to_sparse(examples))
    return SparseDataset.load(path / 'set.npz')


DATA_SETS = {
    'a list': lambda examples, _: examples,
    'a NumpyTupleDataset': lambda examples, _: tuple_data_set(examples),
    'a SparseDataset': lambda examples, _: to_sparse(examples),
    'a part of one': lambda examples, _: to_sparse([*examples[:2], *examples])[2:],
    'a SubDataset of one': lambda examples, _: SubDataset(to_sparse(examples), 0, len(examples)),
    'two joined': lambda examples, _: ConcatenatedDataset(
        to_sparse(examples[:3]), to_sparse(examples[3:])
    ),
    'pickled': lambda examples, _: unpickled(to_sparse(examples)),
    'a pickled part': lambda examples, _: unpickled(to_sparse([*examples[:2], *examples])[2:]),
    'saved': saved,
    'tuples of sparse examples': lambda examples, _: [tuple(e) for e in to_sparse(examples)],
}


@pytest.mark.parametrize('name', LABELS)
@pytest.mark.parametrize('kind', DATA_SETS)
def test_labels_are_those_of_upstream(kind, name, tmp_path):
    """The labels stand between a column of numbers and a column of arrays of one shape."""
    numbers = numpy.arange(6, dtype='f')
    examples = examples_with(numbers, LABELS[name], shapes(*6 * [3]))
    dataset = DATA_SETS[kind](examples, tmp_path)
    for index in BATCHES:
        batch = [dataset[i] for i in index]
        expected = dense_concat_mols([examples[i] for i in index])
        for layout in ('folded', 'padded', 'packed'):
            assert_same_labels(CSRConverter(layout)(batch), expected)
        # other processes send examples one by one
        assert_same_labels(concat_mols(list(map(unpickled, batch))), expected)


@pytest.mark.parametrize('name', LABELS)
def test_labels_of_a_whole_data_set(name):
    examples = examples_with(LABELS[name])
    expected = dense_concat_mols(examples)
    assert_same_labels(concat_mols(tuple_data_set(examples)), expected)
    assert_same_labels(concat_mols(to_sparse(examples)), expected)


def test_labels_of_several_floating_dtypes_have_the_first_ones():
    examples = examples_with(of_dtypes(ONE, 'fdefdd'))
    assert_same_labels(concat_mols(examples), dense_concat_mols(examples))


def test_digits_of_labels_are_kept_behind_an_integer():
    """Unlike upstream's, our converter cuts no digits off, even if labels have one shape."""
    *_, labels = concat_mols(examples_with(of_dtypes(ONE, 'iffddf')))
    assert labels.dtype == numpy.float64
    numpy.testing.assert_array_equal(labels[1, :2], ONE[1].astype('f'))


def test_an_example_has_its_own_label():
    dataset = to_sparse(examples_with(LABELS['two dimensions']))
    for example, label in zip(dataset, LABELS['two dimensions'], strict=True):
        assert_same(example[2], label)
    features = dataset.features[1:3, -1]
    for ours, label in zip(features, LABELS['two dimensions'][1:3], strict=True):
        assert_same(ours, label)
    assert isinstance(features, numpy.ndarray) and features.dtype == object


def test_labels_are_copied():
    labels = [label.copy() for label in LABELS['one dimension']]
    dataset = to_sparse(examples_with(labels))
    labels[0][...] = -1
    numpy.testing.assert_array_equal(dataset[0][2], LABELS['one dimension'][0])


def test_an_empty_part_of_a_data_set(tmp_path):
    dataset = unpickled(to_sparse(examples_with(LABELS['two dimensions']))[:0])
    assert dataset.molecules.labels[0].shape == (0, 0, 0)
    SparseDataset.save(tmp_path / 'set.npz', dataset)
    assert len(SparseDataset.load(tmp_path / 'set.npz')) == 0


NO_SHAPES = 'expected shapes of at least 0, (M, n) integers, got %s'


@pytest.mark.parametrize(
    'shapes, text',
    [
        (numpy.array([[1], [5]]), 'expected 3 items, the length of sizes, got 2'),
        (numpy.array([[1], [2], [-1]]), NO_SHAPES % 'int64 of shape (3, 1)'),
        (numpy.array([1, 2, 3]), NO_SHAPES % 'int64 of shape (3,)'),
        (numpy.array([[1.0], [2.0], [3.0]]), NO_SHAPES % 'float64 of shape (3, 1)'),
        (
            numpy.array([[1], [2], [4]]),
            'expected 7 values, as many as the shapes have, got shape (6,)',
        ),
        (
            numpy.array([[1], [2], [2]]),
            'expected 5 values, as many as the shapes have, got shape (6,)',
        ),
        (
            numpy.array([[2**40, 2**40]]),
            'expected %d values, as many as the shapes have, got shape (6,)' % 2**80,
        ),
    ],
)
def test_a_file_with_wrong_shapes(shapes, text, tmp_path):
    dataset = to_sparse([(*e[:2], numpy.arange(1.0 + i)) for i, e in enumerate(molecules())])
    arrays = dataset.molecules.arrays()
    path = tmp_path / 'set.npz'
    numpy.savez(path, **dict(arrays, shapes_0=shapes))
    with pytest.raises(
        ValueError, match='^%s: label_0: %s$' % (re.escape(str(path)), re.escape(text))
    ):
        SparseDataset.load(path)


NAME_COLUMNS = {
    'str': ['id7', 'id10', 'a', 'water', 'x', ''],
    'bytes': [b'id7', b'id10', b'a', b'water', b'x', b'y'],
    'strings of NumPy': list(numpy.array(['id7', 'id10', 'a', 'water', 'x', ''])),
    'arrays': [numpy.array(['a', 'long one']), *5 * [numpy.array(['b', 'c'])]],
}


@pytest.mark.parametrize('names', NAME_COLUMNS.values(), ids=NAME_COLUMNS)
@pytest.mark.parametrize('kind', DATA_SETS)
def test_names_pass_through(kind, names, tmp_path):
    """Upstream's batch has the names, too, but cut to the length of the first one."""
    examples = examples_with(names, numpy.arange(6, dtype='f'))
    dataset = DATA_SETS[kind](examples, tmp_path)
    for index in BATCHES:
        _, _, ours, label = concat_mols([dataset[i] for i in index])
        assert ours.tolist() == numpy.array([names[i] for i in index]).tolist()
        numpy.testing.assert_array_equal(label, index)
        *_, theirs, _ = dense_concat_mols([examples[i] for i in index])
        numpy.testing.assert_array_equal(ours.astype(theirs.dtype), theirs)


@pytest.mark.parametrize('kind', ['a list', 'a SparseDataset'])
def test_names_are_refused_on_a_gpu(kind, monkeypatch, tmp_path):
    examples = examples_with(numpy.arange(6, dtype='f'), NAME_COLUMNS['str'])
    dataset = DATA_SETS[kind](examples, tmp_path)
    gpu = types.SimpleNamespace(name='@cupy:0')  # nothing may be sent there
    monkeypatch.setattr(chainer, 'get_device', lambda device: device)
    message = (
        'batch[...][3]: expected numbers for @cupy:0, got names (<U5); leave the column out of the '
        'data set'
    )
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        concat_mols(dataset, gpu)


@pytest.mark.parametrize(
    'labels, message',
    [
        (
            LABELS['two dimensions'],
            'dataset[...][2]: expected labels of one shape, got some of up to (4, 5); keep using '
            'the SparseDataset, whose batches are padded with 0',
        ),
        (
            NAME_COLUMNS['str'],
            'dataset[...][2]: expected numbers, got names (<U5); leave the column out',
        ),
    ],
)
def test_columns_that_a_data_set_on_a_gpu_cannot_have(labels, message):
    dataset = to_sparse(examples_with(labels))
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        DeviceMolecules(dataset.molecules, chainer.get_device('@numpy'))


@pytest.mark.parametrize(
    'labels, kinds',
    [
        ([numpy.ones(2), numpy.ones((2, 1))], 'float64 (2, 1), float64 (2,)'),
        ([numpy.ones(2), 1.0], 'float (), float64 (2,)'),
        ([numpy.ones(2), [1.0]], 'float64 (2,), list (1,)'),
        ([numpy.ones(1), numpy.array(['a', 'b'])], '<U1 (2,), float64 (1,)'),
    ],
)
def test_labels_that_have_no_common_shape(labels, kinds):
    """Upstream cannot make batches of these labels either."""
    expected = 'labels of one shape, or NumPy arrays with the same number of dimensions'
    message = 'batch[...][2]: expected %s, got %s' % (expected, kinds)
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        concat_mols(examples_with(labels))


@pytest.mark.parametrize('labels', [['a', 1.0], [1.0, 'n.d.'], ['a', None], [None, None]], ids=str)
def test_names_are_not_mixed_with_others(labels):
    kinds = ', '.join(sorted({'%s ()' % type(label).__name__ for label in labels}))
    message = 'batch[...][2]: expected numbers, or NumPy arrays of them, got ' + kinds
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        concat_mols(examples_with(labels))


def pairs(ids='i', matrix=lambda adj: adj):
    second = molecules((2, 5, 4, 3, 3, 1))
    label = numpy.float32(1)
    return [
        (*example[:2], atoms.astype(ids), matrix(adj), label)
        for example, (atoms, adj, _) in zip(molecules(SIZES), second)
    ]


def two_features(pairs):
    """Replace the atoms of the second molecule of each pair by features."""
    return [(*e[:2], numpy.ones((len(e[2]), 2), 'f'), *e[3:]) for e in pairs]


@pytest.mark.parametrize(
    'examples',
    [
        pairs(),
        pairs('l'),
        two_features(pairs()),
        pairs(matrix=lambda adj: numpy.stack([adj, adj])),
        [example[:4] for example in pairs()],
        [(*e[:2], numpy.float32(1), *e[2:]) for e in pairs()],
    ],
    ids=['', 'of int64', 'of features', 'of relations', 'without labels', 'behind a label'],
)
@pytest.mark.parametrize('convert, name', [(concat_mols, 'batch'), (to_sparse, 'dataset')])
def test_a_second_molecule_needs_another_converter(convert, name, examples):
    position = next(i for i, value in enumerate(examples[0]) if i > 1 and value.ndim)
    message = (
        '%s[...][%d]: expected labels, got the atoms of a second molecule, whose adjacency is in '
        'the next column; two molecules need another converter (docs/migration.md)'
    ) % (name, position)
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        convert(examples)


def test_a_row_for_each_atom_is_not_mistaken():
    """A column of atoms is recognised behind the adjacency, and must be declared behind numbers."""
    charges = shapes(*SIZES)
    numbers = numpy.arange(6, dtype='f')
    atoms, adj, of_atoms, _ = concat_mols(examples_with(charges, numbers))
    assert adj.n_node_columns == 1 and len(of_atoms) == len(atoms)

    behind = examples_with(numbers, charges)
    message = (
        'batch[...][3]: expected labels of molecules, got a row for each atom; if these are '
        'labels of atoms, use CSRConverter(n_node_columns=2), otherwise '
        'CSRConverter(n_node_columns=0)'
    )
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        concat_mols(behind)
    for examples in (behind, examples_with(charges, numbers), examples_with(charges)):
        converter = CSRConverter(n_node_columns=0)
        assert_same_labels(converter(examples), dense_concat_mols(examples))

    message = (
        'dataset[...][3]: expected labels of molecules, got a row for each atom; labels of atoms '
        'need the dense data set'
    )
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        to_sparse(behind)


def test_an_earlier_batch_tells_of_labels_of_several_shapes():
    """One molecule may have as many labels as atoms by chance, so earlier batches decide."""
    examples = examples_with(LABELS['integers'], numpy.arange(6, dtype='f'))
    lone = (*molecules((3,))[0][:2], LABELS['integers'][2], numpy.float32(1))
    assert concat_mols([lone])[1].n_node_columns == 1  # a wrong guess
    assert concat_mols(examples)[1].n_node_columns == 0
    assert concat_mols([lone])[1].n_node_columns == 0


def test_labels_given_with_smiles():
    labels = shapes(1, 3, 2)
    dataset = from_smiles(['C', 'CC', 'CCO'], 'relgcn', labels=labels, n_processes=1).dataset
    assert type(dataset.molecules.labels[0]) is VaryingLabels
    *_, batch = concat_mols(dataset)
    expected = chainer.dataset.concat_examples(labels, padding=0)
    assert_same(batch, expected)
    message = 'labels[...][0]: expected numbers, or NumPy arrays of them, got str ()'
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        from_smiles(['C', 'CC'], 'relgcn', labels=['0.5', '0.7'], n_processes=1)


@pytest.mark.parametrize('of', [list, to_sparse], ids=['a list', 'a SparseDataset'])
@pytest.mark.parametrize(
    'values',
    [
        [numpy.float16(1), 70000],
        [numpy.float32(1), 16777217],
        [numpy.float32(1), 1e39],
        [numpy.float32(1), numpy.float32(2)],
        [1, 0.5],
    ],
    ids=str,
)
def test_numbers_have_the_dtype_that_holds_all(values, of):
    """Numbers follow upstream's rule; arrays have the dtype of the first one."""
    examples = [(*example[:2], value) for example, value in zip(molecules((3, 5)), values)]
    assert_same_labels(concat_mols(of(examples)[:]), dense_concat_mols(examples))


def test_a_half_does_not_decide_for_larger_numbers():
    columns = [numpy.array(1, 'e'), numpy.array(1e6, 'f')], [numpy.ones(1, 'e'), numpy.full(2, 1e6)]
    for labels in columns:
        examples = [(*example[:2], label) for example, label in zip(molecules((3, 5)), labels)]
        # The numbers are compared in Python, because NumPy would convert 1e6 to float16, which is
        # infinity.
        assert concat_mols(to_sparse(examples)[:])[2].max().item() == 1e6


@pytest.mark.parametrize('shape', [(), (1,)], ids=str)
@pytest.mark.parametrize('dtypes', ['fd', 'df', 'if', 'ef'])
def test_labels_of_joined_data_sets_have_the_dtype_of_dense_ones(dtypes, shape):
    labels = of_dtypes(numpy.arange(6.0).reshape(6, *shape), 3 * dtypes[0] + 3 * dtypes[1])
    dense = [(*molecule, label) for molecule, label in zip(molecules(SIZES, n_labels=0), labels)]
    both = ConcatenatedDataset(to_sparse(dense[:3]), to_sparse(dense[3:]))
    for index in ([0, 4], [4, 0]):
        found, expected = (concat_mols([data[i] for i in index])[2] for data in (both, dense))
        assert found.dtype == expected.dtype
        numpy.testing.assert_array_equal(found, expected)
