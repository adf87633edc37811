"""Converters: all kinds of data sets and device arguments, padding, refusals."""

import collections
import pickle
import re

import numpy
import pytest
import scipy.sparse

import chainer
from chainer.backends import cuda
from chainer.datasets import SubDataset
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols

from chainer_bspmm import concat_mols, CSRConverter
from chainer_bspmm.dataset import dense_examples, to_sparse
from tests.support.data_sets import assert_same_batch, molecules, tuple_data_set
from tests.support.parity import unfolded

packed = CSRConverter('packed')
UNPADDED = ('packed', 'folded')


def check(result, examples, layout='folded', padded_to=None):
    """Compare a batch with dense examples, in which only padding has id 0."""
    atoms, adj = result[:2]
    phantoms = int(layout == 'folded')
    expected = [numpy.pad(e[0][e[0] != 0], (0, phantoms)) for e in examples]
    numpy.testing.assert_array_equal(cuda.to_cpu(atoms), numpy.concatenate(expected))
    assert atoms.dtype == numpy.int32
    sizes = [(e[0] != 0).sum() for e in examples]
    assert adj.max_rows == max(sizes) + phantoms
    for example, n, dense in zip(examples, sizes, cuda.to_cpu(adj.to_dense())):
        numpy.testing.assert_array_equal(dense[..., :n, :n], example[1][..., :n, :n])
        assert numpy.count_nonzero(dense) == numpy.count_nonzero(dense[..., :n, :n])
    assert adj.n_rows == len(atoms) and (adj.layout, adj.padded_to) == (layout, padded_to)
    assert adj.max_atom_id == max(e[0].max() for e in examples)
    if layout == 'packed':
        assert adj.row_weights is None
    else:
        largest = max(len(e[0]) for e in examples) if padded_to is None else padded_to
        weights = [[1] * n + [max(largest - n, 0)] for n in sizes]
        numpy.testing.assert_array_equal(cuda.to_cpu(adj.row_weights), numpy.concatenate(weights))
        assert adj.row_weights.dtype == numpy.float32
    for i, labels in enumerate(result[2:], 2):
        numpy.testing.assert_array_equal(cuda.to_cpu(labels), [e[i] for e in examples])


@pytest.mark.parametrize('n_labels', [0, 1, 3])
@pytest.mark.parametrize('n_relations', [1, 4])
@pytest.mark.parametrize('out_size', [None, 7])
def test_batches_without_padding(n_labels, n_relations, out_size):
    examples = molecules((3, 1, 5), n_labels, out_size, n_relations)
    for data_set in (examples, to_sparse(examples)):
        for layout in UNPADDED:
            result = CSRConverter(layout)(data_set)
            assert isinstance(result, tuple) and len(result) == 2 + n_labels
            check(result, examples, layout)
            assert result[1].n_relations == n_relations
        check(concat_mols(data_set), examples)


@pytest.mark.parametrize('n_relations', [1, 4])
def test_molecules_that_agree_are_not_looked_at_one_by_one(monkeypatch, n_relations):
    monkeypatch.setattr(dense_examples, '_check_each', lambda *_: pytest.fail('one by one'))
    packed(molecules((3, 1, 5), n_relations=n_relations))


@pytest.mark.parametrize('padded_to', [2, 5, 9])
def test_folded_to_a_number_of_atoms(padded_to):
    """Larger molecules get no phantom atoms, and stored padding does not count as atoms."""
    for examples in (molecules((3, 1, 5)), molecules((3, 1, 5), out_size=7)):
        for data_set in (examples, to_sparse(examples)):
            for part, few in ((data_set, examples), (data_set[:1], examples[:1])):
                result = CSRConverter(padded_to=padded_to, strip_padding=True)(part)
                check(result, few, padded_to=padded_to)


@pytest.mark.parametrize('n_relations', [1, 4])
@pytest.mark.parametrize('out_size', [None, 7])
def test_padded_is_the_dense_batch(n_relations, out_size):
    examples = molecules((3, 1, 5), 1, out_size, n_relations)
    atoms, adj, labels = CSRConverter(layout='padded')(examples)
    expected = dense_concat_mols(examples)
    numpy.testing.assert_array_equal(atoms, expected[0])
    numpy.testing.assert_array_equal(adj.to_dense(), expected[1])
    numpy.testing.assert_array_equal(labels, expected[2])
    assert adj.layout == 'padded' and atoms.dtype == expected[0].dtype


@pytest.mark.parametrize('sizes', [(3, 1, 5), (4, 4, 4)])  # equal sizes make one dense column
def test_kinds_of_data_set(sizes):
    examples = molecules(sizes)
    data_set = tuple_data_set(examples)
    parts = SubDataset(data_set, 0, 3), SubDataset(examples, 0, 3)
    for batch in (examples, data_set, data_set[:], *parts):
        check(concat_mols(batch), examples)
    check(concat_mols(SubDataset(data_set, 1, 3)), examples[1:])


@pytest.mark.parametrize('device', [None, -1, '@numpy', chainer.get_device('@numpy')])
def test_host_devices(device):
    check(concat_mols(molecules(), device), molecules())
    check(concat_mols(batch=molecules(), device=device), molecules())


def test_labels_that_are_not_arrays():
    examples = [
        (atoms, adj, numpy.float32(i), i, [i, -1])
        for i, (atoms, adj) in enumerate(molecules(n_labels=0))
    ]
    _, _, floats, ints, pairs = concat_mols(examples)
    assert floats.dtype == numpy.float32 and floats.tolist() == [0, 1, 2]
    assert ints.dtype.kind == 'i' and ints.tolist() == [0, 1, 2]
    assert pairs.tolist() == [[0, -1], [1, -1], [2, -1]]


def test_node_features_in_place_of_ids():
    rng = numpy.random.RandomState(0)
    examples = [(rng.uniform(size=(n, 4)).astype('f'), numpy.eye(n, dtype='f')) for n in (2, 0, 3)]
    for data_set in (examples, to_sparse(examples)):
        h, adj = packed(data_set)
        numpy.testing.assert_array_equal(h, numpy.concatenate([e[0] for e in examples]))
        assert adj.max_atom_id is None
        h, adj = concat_mols(data_set)
        assert adj.max_atom_id is None
        numpy.testing.assert_array_equal(adj.row_weights, [1, 1, 1, 3, 1, 1, 1, 0])
        expected = CSRConverter('padded')(data_set)[0]
        assert expected.shape == (3, 3, 4)
        numpy.testing.assert_array_equal(unfolded(h, adj).reshape(expected.shape), expected)


def test_scipy_adjacency():
    examples = molecules()
    result = concat_mols([(a, scipy.sparse.csr_matrix(m), t) for a, m, t in examples])
    check(result, examples)


def test_dummy_atoms_with_bonds_are_kept():
    # RDKit's dummy atoms have atomic number 0: '*C*' has ids 0, 6, 0 and bonds to both ends.
    adj = numpy.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]], 'f')
    examples = [(numpy.array([0, 6, 0, 0], 'i'), adj)]
    atoms, batch = CSRConverter('packed', strip_padding=True)(examples)
    assert atoms.tolist() == [0, 6, 0]
    numpy.testing.assert_array_equal(batch.to_dense()[0], adj[:3, :3])
    atoms, batch = concat_mols(examples)
    assert atoms.tolist() == [0, 6, 0, 0] and batch.row_weights.tolist() == [1, 1, 1, 1]
    numpy.testing.assert_array_equal(batch.to_dense()[0], adj)


@pytest.mark.parametrize('n_relations', [1, 2])
@pytest.mark.parametrize('entry', [(0, 2), (2, 0)])
def test_dummy_atoms_with_bonds_of_one_direction_are_kept(entry, n_relations):
    """An entry in either the atom's row or its column is enough."""
    adj = numpy.zeros((n_relations, 4, 4), 'f')
    adj[(-1, *entry)] = 1
    adj = adj if n_relations > 1 else adj[0]
    examples = [(numpy.array([6, 7, 0, 0], 'i'), adj)]
    for data_set in (examples, to_sparse(examples)):
        atoms, batch = CSRConverter('packed', strip_padding=True)(data_set)
        assert atoms.tolist() == [6, 7, 0]
        numpy.testing.assert_array_equal(batch.to_dense()[0], adj[..., :3, :3])


def test_molecule_without_atoms():
    examples = [(numpy.zeros(n, 'i'), numpy.zeros((n, n), 'f')) for n in (0, 2)]
    for data_set in (examples, to_sparse(examples)):
        atoms, adj = CSRConverter('packed', strip_padding=True)(data_set)
        assert atoms.shape == (0,) and adj.n_graphs == 2 and adj.n_rows == 0
        atoms, adj = concat_mols(data_set)
        assert atoms.tolist() == adj.to_dense().ravel().tolist() == [0, 0]
        assert adj.n_graphs == adj.n_rows == 2 and adj.row_weights.tolist() == [2, 2]
        assert concat_mols(data_set[:1])[1].row_weights.tolist() == [0]


def test_a_converter_is_one_of_chainers():
    assert isinstance(CSRConverter(), chainer.dataset.Converter)


def test_pickle_keeps_the_options():
    options = dict(layout='folded', padded_to=9, n_node_columns=1, strip_padding=False)
    assert vars(pickle.loads(pickle.dumps(CSRConverter(**options)))) == options
    check(pickle.loads(pickle.dumps(concat_mols))(molecules()), molecules())


def test_instances_pickled_before_there_was_a_folded_layout():
    for state in ({}, {'n_node_columns': 0, 'strip_padding': True}):
        converter = CSRConverter.__new__(CSRConverter)
        converter.__dict__ = {'layout': 'packed', **state}
        converter = pickle.loads(pickle.dumps(converter))
        check(converter(molecules(out_size=7)), molecules(out_size=7), 'packed')
        # older converters dropped such atoms without an error
        assert converter(LONE_IONS)[1].n_rows == 5


ATOMS = numpy.array([6, 8], 'i')
ADJ = numpy.eye(2, dtype='f')


A_TUPLE = 'expected a tuple (atoms, adj, label...)'
ATOM_KINDS = 'expected (n,) integer atom ids, or (n, channels) floating features, throughout'
A_ROW_AND_A_COLUMN = 'expected a row and a column of the adjacency for each atom'
A_COMMON_SHAPE = 'expected labels of one shape, or NumPy arrays with the same number of dimensions'


@pytest.mark.parametrize(
    'batch, error, message',
    [
        ([], ValueError, 'batch: expected at least one example, got none'),
        ([ATOMS], TypeError, 'batch[0]: %s, got ndarray' % A_TUPLE),
        ([{'atoms': ATOMS}], TypeError, 'batch[0]: %s, got dict' % A_TUPLE),
        ([(ATOMS,)], ValueError, 'batch[0]: %s of 2 elements, got 1' % A_TUPLE),
        (
            [(ATOMS, ADJ), (ATOMS, ADJ, 1.0)],
            ValueError,
            'batch[1]: %s of 2 elements, got 3' % A_TUPLE,
        ),
        (
            [(ATOMS, ADJ), (ATOMS, numpy.eye(3))],
            ValueError,
            'batch[1]: %s, got atoms of shape (2,) and adjacency of shape (3, 3)'
            % A_ROW_AND_A_COLUMN,
        ),
        (
            [(ATOMS, numpy.ones((3, 2), 'f'))],
            ValueError,
            'batch[0]: %s, got atoms of shape (2,) and adjacency of shape (3, 2)'
            % A_ROW_AND_A_COLUMN,
        ),
        (
            [(ATOMS, ADJ), (ATOMS[:, None].astype('f'), ADJ)],
            ValueError,
            'batch: %s, got float32 of 2 dimensions, int32 of 1 dimensions' % ATOM_KINDS,
        ),
        ([(ATOMS != 6, ADJ)], ValueError, 'batch: %s, got bool of 1 dimensions' % ATOM_KINDS),
        (
            [(numpy.array([6, 2**31]), ADJ)],
            ValueError,
            'atom ids: expected at most 2**31 - 1 = 2147483647 in one batch, got 2147483648',
        ),
        (
            [(ATOMS, ADJ, None)],
            ValueError,
            'batch[...][2]: expected numbers, or NumPy arrays of them, got NoneType ()',
        ),
        (
            [(ATOMS, ADJ), (numpy.array([6, -1]), ADJ)],
            ValueError,
            'batch[1][0]: expected atom ids of at least 0, got -1',
        ),
        (
            [(ATOMS, ADJ), (numpy.array([-6, 8]), ADJ)],
            ValueError,
            'batch[1][0]: expected atom ids of at least 0, got -6',
        ),
        (
            [('CO', ADJ)],
            TypeError,
            'batch[0]: expected arrays of atoms and adjacency, got str and ndarray',
        ),
        (
            [(ATOMS, ADJ, [1.0]), (ATOMS, ADJ, [1.0, 2.0])],
            ValueError,
            'batch[...][2]: %s, got list (1,), list (2,)' % A_COMMON_SHAPE,
        ),
        (
            [(ATOMS, ADJ, n * [1.0]) for n in range(3, 12)],
            ValueError,
            'batch[...][2]: %s, got list (10,), list (11,), list (3,), list (4,), 5 others'
            % A_COMMON_SHAPE,
        ),
        (
            [(ATOMS, ADJ), (ATOMS, numpy.ones((4, 2, 2)))],
            ValueError,
            'batch[1][1]: expected shape (n, n) as in batch[0][1], got (4, 2, 2)',
        ),
        (
            [(numpy.ones((2, 3), 'f'), ADJ), (numpy.ones((2, 4), 'f'), ADJ)],
            ValueError,
            'batch[1][0]: expected 3 channels as in batch[0], got 4',
        ),
        # the error names the first wrong example, with its original shape
        ([(ATOMS, ADJ), 'CO', [ATOMS, ADJ], 'N'], TypeError, 'batch[1]: %s, got str' % A_TUPLE),
        (
            [(ATOMS, ADJ), (ATOMS, numpy.eye(3)), (ATOMS[:1], ADJ), (ATOMS, numpy.eye(3))],
            ValueError,
            'batch[1]: %s, got atoms of shape (2,) and adjacency of shape (3, 3)'
            % A_ROW_AND_A_COLUMN,
        ),
        (
            [(ATOMS, ADJ)] + 2 * [(numpy.array([6, 0]), numpy.diag([1.0, 0])[None])],
            ValueError,
            'batch[1][1]: expected shape (n, n) as in batch[0][1], got (1, 2, 2)',
        ),
    ],
)
def test_bad_batch(batch, error, message):
    with pytest.raises(error, match='^%s$' % re.escape(message)):
        concat_mols(batch)


@pytest.mark.parametrize('dtypes, expected', [('fd', 'f'), ('df', 'd'), ('if', 'd')])
def test_dtype_of_labels(dtypes, expected):
    examples = [(ATOMS, ADJ, numpy.ones(1, dtype)) for dtype in dtypes]
    assert concat_mols(examples)[2].dtype == expected
    assert to_sparse(examples).molecules.labels[0].dtype == expected


@pytest.mark.parametrize('convert', [concat_mols, to_sparse])
def test_tuples_of_a_class_of_their_own_are_examples(convert):
    example = collections.namedtuple('example', 'atoms adj label')
    actual = convert([example(ATOMS, ADJ, 1.0)])
    actual = concat_mols(actual) if convert is to_sparse else actual
    assert_same_batch(actual, concat_mols([(ATOMS, ADJ, 1.0)]))


@pytest.mark.parametrize(
    'options, error, message',
    [
        (
            {'layout': [(ATOMS, ADJ)]},
            TypeError,
            'layout: expected a str, got a list; pass an instance, CSRConverter(), as the '
            'converter, not the class',
        ),
        (
            {'layout': 'dense'},
            ValueError,
            "layout: expected one of 'packed', 'folded', 'padded', got 'dense'",
        ),
        (
            {'layout': 'packed', 'padded_to': 9},
            ValueError,
            "padded_to: expected None with layout='packed', got 9; it goes with 'folded'",
        ),
        ({'padded_to': 0}, ValueError, 'padded_to: expected at least 1, got 0'),
        ({'padded_to': 9.5}, TypeError, 'padded_to: expected an int, got 9.5'),
        ({'n_node_columns': -1}, ValueError, 'n_node_columns: expected at least 0, got -1'),
        (
            {'strip_padding': 'yes'},
            ValueError,
            "strip_padding: expected one of None, True, False, got 'yes'",
        ),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match='^%s$' % re.escape(message)):
        CSRConverter(**options)


# --- columns with a value for each atom ---


def with_column(sizes=(3, 1, 5), out_size=None, shape=(), dtype='i', n_labels=1):
    rng = numpy.random.RandomState(0)
    return [
        (atoms, adj, rng.randint(1, 9, (len(atoms),) + shape).astype(dtype), *labels)
        for atoms, adj, *labels in molecules(sizes, n_labels, out_size)
    ]


@pytest.mark.parametrize('channels', [(), (3,)])
@pytest.mark.parametrize('out_size', [None, 7])
def test_node_columns(device, channels, out_size):
    """Columns have the rows of the atoms, so packed batches drop stored padding from them, too."""
    examples = with_column(out_size=out_size, shape=channels)
    atoms, adj, column, labels = CSRConverter('packed', n_node_columns=1)(examples, device)
    expected = numpy.concatenate([e[2][: (e[0] != 0).sum()] for e in examples])
    numpy.testing.assert_array_equal(cuda.to_cpu(column), expected)
    assert column.dtype == numpy.int32 and len(column) == adj.n_rows == 9
    padded = CSRConverter('padded', n_node_columns=1)(examples, device)
    expected = dense_concat_mols(examples)
    for i in (0, 2, 3):
        numpy.testing.assert_array_equal(cuda.to_cpu(padded[i]), expected[i])
    # A folded batch has the rows of the dense batch, but only one row of zeros for each molecule.
    atoms, adj, column, labels = map(on_host, CSRConverter(n_node_columns=1)(examples, device))
    for ours, theirs in ((atoms, expected[0]), (column, expected[2])):
        numpy.testing.assert_array_equal(unfolded(ours, adj).reshape(theirs.shape), theirs)
    numpy.testing.assert_array_equal(labels, expected[3])
    assert adj.n_rows == (24 if out_size else 12)


@pytest.fixture
def nothing_told(monkeypatch):
    """Forget what earlier batches have shown about columns."""
    monkeypatch.setattr(dense_examples, '_of_molecules', set())


def test_an_earlier_batch_tells_of_molecules_of_one_size(nothing_told):
    """Weights of four tasks are no labels of atoms, even if all molecules have four atoms."""
    tasks = numpy.arange(4, dtype='i'), numpy.ones(4, 'f')
    both = [[(*e[:2], *tasks) for e in molecules(sizes)] for sizes in ((4, 4), (3, 1, 7))]
    assert concat_mols(both[0])[1].n_node_columns == 1  # a wrong guess
    assert concat_mols(both[1])[1].n_node_columns == 0
    *_, labels, weights = concat_mols(both[0])
    assert labels.shape == weights.shape == (2, 4)
    for sizes in ((3, 1, 7), (3, 3), (5,)):
        assert concat_mols(with_column(sizes))[1].n_node_columns == 1


def test_a_batch_of_another_data_set_tells_of_atoms(nothing_told):
    tasks = [(*e[:2], numpy.arange(4, dtype='i'), e[2]) for e in molecules((3, 1, 7))]
    of_atoms = with_column((3, 1, 7))
    of_one_size = with_column((4, 4))
    for batch, n_columns in ((tasks, 0), (of_one_size, 0), (of_atoms, 1), (of_one_size, 1)):
        assert concat_mols(batch)[1].n_node_columns == n_columns


def test_padding_of_upstreams_converter():
    examples = molecules()
    assert_same_batch(concat_mols(examples, padding=0), concat_mols(examples))
    with pytest.raises(ValueError, match='padding: expected None or 0, got -1'):
        concat_mols(examples, None, padding=-1)


def test_two_molecules_in_an_example():
    """Pairs of molecules need a user's converter; the error and docs/migration.md say so."""
    pairs = [(*a[:2], *b) for a, b in zip(molecules((3, 1, 7)), molecules((2, 5, 4)))]
    message = (
        'batch[...][2]: expected labels, got the atoms of a second molecule, whose adjacency is in '
        'the next column; two molecules need another converter (docs/migration.md)'
    )
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        CSRConverter(n_node_columns=0)(pairs)


def on_host(array):
    return array.to_device(-1) if hasattr(array, 'indptr') else cuda.to_cpu(array)


@pytest.mark.parametrize(
    'options, n_node_columns',
    [
        ({}, 1),
        ({'shape': (3,), 'dtype': 'f'}, 1),
        ({'n_labels': 0}, 1),
        # If molecules have one size, only one-dimensional integers before another column count.
        ({'out_size': 7}, 1),
        ({'sizes': (4,)}, 1),
        ({'sizes': (4, 4)}, 1),
        ({'sizes': (4, 4), 'dtype': 'f'}, 0),
        ({'sizes': (4, 4), 'shape': (3,)}, 0),
        ({'sizes': (4, 4), 'n_labels': 0}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize('layout', ['packed', 'folded', 'padded'])
def test_node_columns_are_recognised(layout, options, n_node_columns, nothing_told):
    examples = with_column(**options)
    converter = CSRConverter(layout)
    atoms, adj, *labels = converter(examples)
    assert adj.n_node_columns == n_node_columns
    explicit = CSRConverter(layout, n_node_columns=n_node_columns)(examples)
    for ours, theirs in zip([atoms, *labels], [explicit[0], *explicit[2:]], strict=True):
        numpy.testing.assert_array_equal(ours, theirs)
    if n_node_columns:
        assert labels[0].shape[: atoms.ndim] == atoms.shape
        # a second such column is found as well, unless it may be a label
        twice = [(*e[:3], *e[2:]) for e in examples]
        assert converter(twice)[1].n_node_columns == 2
    # a column behind a label is a label
    behind = [(*e[:2], numpy.float32(1), e[2]) for e in examples]
    if len({len(e[0]) for e in examples}) == 1:
        assert converter(behind)[1].n_node_columns == 0
    else:
        message = (
            'batch[...][3]: expected labels of molecules, got a row for each atom; if these are '
            'labels of atoms, use CSRConverter(n_node_columns=2), otherwise '
            'CSRConverter(n_node_columns=0)'
        )
        with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
            converter(behind)


def test_last_column_of_molecules_of_one_size():
    """The model may take the column for one of atoms, so a folded batch drops no atoms."""
    examples = with_column(out_size=7, n_labels=0)
    atoms, adj, column = concat_mols(examples)
    assert adj.n_rows == len(atoms) == 24 and column.shape == (3, 7)
    assert concat_mols([example[:2] for example in examples])[1].n_rows == 12


@pytest.mark.parametrize('layout', UNPADDED)
@pytest.mark.parametrize(
    'label', [numpy.zeros(4, 'f'), [1, 2, 3, 4]], ids=['a super node', 'a list']
)
def test_labels_that_are_as_long_as_the_molecules(layout, label):
    """Neither a super node nor a list is a column of atoms."""
    examples = [(atoms, adj, label, last) for atoms, adj, last in molecules((4, 4))]
    atoms, adj, *labels = CSRConverter(layout)(examples)
    assert not adj.n_node_columns
    assert [label.shape for label in labels] == [(2, 4), (2, 2)]


def test_a_node_column_that_is_said_to_be_none():
    """The column is then padded with 0, like upstream's."""
    examples = [(atoms, adj, numpy.ones(len(atoms)), label) for atoms, adj, label in molecules()]
    _, adj, column, _ = CSRConverter(n_node_columns=0)(examples)
    assert not adj.n_node_columns
    numpy.testing.assert_array_equal(column, [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


def test_a_node_column_without_a_row_for_each_atom():
    examples = [(atoms, adj, numpy.zeros(len(atoms)), label) for atoms, adj, label in molecules()]
    examples[1] = (*examples[1][:2], numpy.zeros(2), *examples[1][3:])
    message = 'batch[1][2]: expected a row for each of 1 atoms, got shape (2,)'
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        CSRConverter(n_node_columns=1)(examples)


def test_node_columns_of_different_widths():
    examples = [(atoms, adj, adj) for atoms, adj, _ in molecules((2, 3))]
    message = 'batch[1][2]: expected shape (2) for each atom as in batch[0], got (3)'
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        CSRConverter(n_node_columns=1)(examples)


def test_a_converter_of_node_columns_takes_examples_without_labels():
    """As in a prediction of what a training has labels for."""
    examples = [example[:2] for example in with_column()]
    batch = CSRConverter('padded', n_node_columns=1)(examples)
    assert len(batch) == 2 and not batch[1].n_node_columns


def test_an_adjacency_that_is_a_numpy_matrix():
    examples = [(atoms, scipy.sparse.coo_matrix(adj).todense()) for atoms, adj, _ in molecules()]
    dense = [(atoms, numpy.asarray(matrix)) for atoms, matrix in examples]
    assert_same_batch(concat_mols(examples), concat_mols(dense))


def test_labels_of_a_file_in_memory_may_differ_in_length(tmp_path):
    path = tmp_path / 'labels.npy'
    numpy.save(path, numpy.arange(10, dtype='f'))
    labels = numpy.load(path, mmap_mode='r')
    examples = [
        (numpy.arange(1, n + 1), numpy.eye(n, dtype='f'), labels[of])
        for n, of in ((3, slice(2)), (2, slice(2, 7)))
    ]
    numpy.testing.assert_array_equal(concat_mols(examples)[2], dense_concat_mols(examples)[2])


def test_labels_that_are_numpy_matrices():
    examples = [
        (numpy.arange(1, n + 1), numpy.eye(n, dtype='f'), scipy.sparse.eye(n, dtype='f').todense())
        for n in (3, 2)
    ]
    batch = CSRConverter(n_node_columns=0)(examples)
    numpy.testing.assert_array_equal(batch[2], dense_concat_mols(examples)[2])


def test_a_sparse_data_set_has_no_node_columns():
    message = (
        'batch: expected dense examples with n_node_columns = 1, got a sparse data set, '
        'whose labels belong to molecules'
    )
    with pytest.raises(ValueError, match='^%s$' % message):
        CSRConverter(n_node_columns=1)(to_sparse(molecules()))


# --- padding, or atoms of id 0 ---


def may_be_atoms(i, n_lost, n_atoms):
    """Return a pattern that matches the whole error about atoms that may be padding."""
    message = (
        'strip_padding: expected True or False for this data set, got None: batch[%d] would lose '
        'the last %d of its %d atoms, which have id 0 and no bond. They may be atoms, not padding: '
        'the batch is one molecule, or molecules differ in size, or other atoms have id 0, too. '
        'strip_padding=True drops such atoms, strip_padding=False keeps them' % (i, n_lost, n_atoms)
    )
    return '^%s$' % re.escape(message)


ION = numpy.zeros(1, 'i'), numpy.zeros((1, 1), 'f'), numpy.ones(2, 'f')
LONE_IONS = [*molecules((3, 2)), ION]


def test_ids_that_begin_at_0():
    """An isolated atom of id 0 is a molecule, unless it is stripped as padding."""
    for data_set in (LONE_IONS, to_sparse(LONE_IONS)):
        for strip, n_rows in ((True, 5), (False, 6), (numpy.bool_(False), 6)):
            atoms, adj, _ = CSRConverter('packed', strip_padding=strip)(data_set)
            assert len(atoms) == adj.n_rows == n_rows and adj.n_graphs == 3
        with pytest.raises(ValueError, match=may_be_atoms(2, 1, 1)):
            packed(data_set)
        packed(data_set[:2])  # these have no such atom


@pytest.mark.parametrize(
    'ids, bond, lost',
    [
        ([0, 7, 0], (0, 1), 1),  # another atom with id 0 has a bond
        ([0, 7, 0], None, 1),  # another atom with id 0 has no bond
        ([7, 0, 0], (0, 1), 1),
        ([7, 0, 0], None, None),  # padding
        ([7, 8, 0], (0, 1), None),
    ],
)
@pytest.mark.parametrize('n_relations', [1, 2])
def test_padding_that_may_be_atoms(ids, bond, lost, n_relations):
    """Trailing ids of 0 in molecules of one size are padding, unless 0 is the id of an atom."""
    adj = numpy.zeros((n_relations, 3, 3), 'f')
    if bond is not None:
        adj[(-1, *bond)] = 1
    adj = adj if n_relations > 1 else adj[0]
    good = (numpy.array([6, 7, 8], 'i'), numpy.ones_like(adj))
    examples = [good, (numpy.array(ids, 'i'), adj)]
    for data_set in (examples, to_sparse(examples)):
        for converter in (packed, CSRConverter(padded_to=2)):
            if lost is None:
                assert converter(data_set)[1].n_graphs == 2
            else:
                n = 1 if converter is packed else max(3 - max(3 - lost, 2), 0)
                with pytest.raises(ValueError, match=may_be_atoms(1, n, 3)):
                    converter(data_set)
        for strip in (None, True, False):
            for options in ({}, {'padded_to': 3}):  # no atom is lost
                CSRConverter(**options, strip_padding=strip)(data_set)
            dense = CSRConverter('padded', strip_padding=strip)(data_set)
            numpy.testing.assert_array_equal(dense[0], [good[0], ids])


def test_molecules_of_different_sizes_without_lone_atoms_of_id_0():
    adj = numpy.array([[0, 1], [1, 0]], 'f')
    examples = [(numpy.array([6, 0], 'i'), adj), (numpy.array([6], 'i'), adj[:1, :1])]
    for data_set in (examples, to_sparse(examples)):
        assert packed(data_set)[0].tolist() == [6, 0, 6]


# --- folded batches, compared with padded ones ---


@pytest.mark.parametrize('strip', [None, True, False])
@pytest.mark.parametrize('kind', ['dense', 'sparse'])
@pytest.mark.parametrize(
    'examples',
    [
        molecules((3, 1, 5, 0, 2)),
        molecules((3, 1, 5, 0, 2), out_size=7),
        molecules((3, 1, 5), n_relations=4),
        molecules((4, 4, 4)),
        molecules((4,)),
        LONE_IONS,
        [(a, scipy.sparse.csr_matrix(m), t) for a, m, t in molecules((3, 1, 5))],
        [(a, m, numpy.full(2, numpy.nan, 'f')) for a, m, _ in molecules((3, 1, 5))],
    ],
    ids=['sizes', 'stored padding', 'relations', 'one size', 'one', 'id 0', 'scipy', 'NaN'],
)
def test_folded_rows_are_those_of_the_padded_batch(examples, kind, strip):
    data_set = to_sparse(examples) if kind == 'sparse' else examples
    atoms, adj, labels = CSRConverter(strip_padding=strip)(data_set)
    e_atoms, e_adj, e_labels = CSRConverter('padded')(data_set)
    numpy.testing.assert_array_equal(labels, e_labels)
    numpy.testing.assert_array_equal(unfolded(atoms, adj).reshape(e_atoms.shape), e_atoms)
    actual, expected = adj.to_dense(), e_adj.to_dense()
    n = min(actual.shape[-1], expected.shape[-1])
    numpy.testing.assert_array_equal(actual[..., :n, :n], expected[..., :n, :n])
    assert adj.nnz == e_adj.nnz


def test_kept_atoms_of_id_0_are_no_part_of_the_weight():
    """Kept atoms have rows of their own, although data sets store only their number."""
    for data_set in (LONE_IONS, to_sparse(LONE_IONS)):
        converter = CSRConverter(padded_to=2, strip_padding=False)
        atoms, adj, _ = converter(data_set)
        assert numpy.diff(adj.row_offsets).tolist() == [4, 3, 2]
        assert adj.row_weights.tolist() == [1, 1, 1, 0, 1, 1, 0, 1, 1]
        assert atoms.shape == (adj.n_rows,) and adj.to_dense().shape == (3, 4, 4)


def test_repr():
    converter = CSRConverter(padded_to=9, strip_padding=False)
    assert repr(converter) == "CSRConverter(layout='folded', padded_to=9, strip_padding=False)"
