"""The converters: every kind of data set and device argument, padding, and what they refuse."""

import pickle

import numpy
import pytest
import scipy.sparse

import chainer
from chainer.backends import cuda
from chainer.datasets import SubDataset
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.datasets import NumpyTupleDataset

from chainer_bspmm import concat_mols
from chainer_bspmm import CSRConverter
from chainer_bspmm.dataset import to_sparse
from tests.support.data_sets import molecules


def check_packed(result, examples):
    atoms, adj = result[:2]
    numpy.testing.assert_array_equal(
        cuda.to_cpu(atoms), numpy.concatenate([e[0][e[0] != 0] for e in examples])
    )
    assert atoms.dtype == numpy.int32
    for example, dense in zip(examples, cuda.to_cpu(adj.to_dense())):
        n = (example[0] != 0).sum()
        numpy.testing.assert_array_equal(dense[..., :n, :n], example[1][..., :n, :n])
        assert numpy.count_nonzero(dense) == numpy.count_nonzero(dense[..., :n, :n])
    assert adj.n_rows == len(atoms) and adj.layout == 'packed'
    assert adj.max_atom_id == max(e[0].max() for e in examples)
    for i, labels in enumerate(result[2:]):
        numpy.testing.assert_array_equal(
            cuda.to_cpu(labels), numpy.stack([e[2 + i] for e in examples])
        )


@pytest.mark.parametrize('n_labels', [0, 1, 3])
@pytest.mark.parametrize('n_relations', [1, 4])
@pytest.mark.parametrize('out_size', [None, 7])
def test_packed(n_labels, n_relations, out_size):
    examples = molecules((3, 1, 5), n_labels, out_size, n_relations)
    result = concat_mols(examples)
    assert isinstance(result, tuple) and len(result) == 2 + n_labels
    check_packed(result, examples)
    assert result[1].n_relations == n_relations


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


@pytest.mark.parametrize('sizes', [(3, 1, 5), (4, 4, 4)])  # the latter makes one dense column
def test_kinds_of_data_set(sizes):
    examples = molecules(sizes)
    columns = list(zip(*examples))
    arrays = []
    for column in columns:
        if len({value.shape for value in column}) == 1:
            arrays.append(numpy.stack(column))
        else:
            arrays.append(numpy.empty(len(column), object))
            arrays[-1][:] = column
    data_set = NumpyTupleDataset(*arrays)
    for batch in (
        examples,
        data_set,
        data_set[:],
        SubDataset(data_set, 0, 3),
        SubDataset(examples, 0, 3),
    ):
        check_packed(concat_mols(batch), examples)
    check_packed(concat_mols(SubDataset(data_set, 1, 3)), examples[1:])


@pytest.mark.parametrize('device', [None, -1, '@numpy', chainer.get_device('@numpy')])
def test_host_devices(device):
    check_packed(concat_mols(molecules(), device), molecules())
    check_packed(concat_mols(batch=molecules(), device=device), molecules())


@pytest.mark.gpu
@pytest.mark.parametrize('device', [0, '@cupy:0'])
def test_gpu(device):
    result = concat_mols(molecules(), device)
    assert all(
        array.xp is cuda.cupy if i == 1 else isinstance(array, cuda.ndarray)
        for i, array in enumerate(result)
    )
    check_packed(result, molecules())


def test_scalar_and_integer_labels():
    examples = [
        (a, m, numpy.float32(i), i, [i, -1]) for i, (a, m) in enumerate(molecules(n_labels=0))
    ]
    _, _, floats, ints, pairs = concat_mols(examples)
    assert floats.dtype == numpy.float32 and floats.tolist() == [0, 1, 2]
    assert ints.dtype.kind == 'i' and ints.tolist() == [0, 1, 2]
    assert pairs.shape == (3, 2)


def test_node_features_in_place_of_ids():
    rng = numpy.random.RandomState(0)
    examples = [(rng.uniform(size=(n, 4)).astype('f'), numpy.eye(n, dtype='f')) for n in (2, 3)]
    h, adj = concat_mols(examples)
    numpy.testing.assert_array_equal(h, numpy.concatenate([e[0] for e in examples]))
    assert adj.max_atom_id is None
    h, _ = CSRConverter('padded')(examples)
    assert h.shape == (2, 3, 4) and (h[0, 2] == 0).all()


def test_scipy_adjacency():
    examples = molecules()
    result = concat_mols([(a, scipy.sparse.csr_matrix(m), t) for a, m, t in examples])
    check_packed(result, examples)


def test_dummy_atoms_with_bonds_are_kept():
    # Atomic number 0 is RDKit's dummy atom: '*C*' has ids 0, 6, 0 and bonds to both ends.
    adj = numpy.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]], 'f')
    atoms, batch = concat_mols([(numpy.array([0, 6, 0, 0], 'i'), adj)])
    assert atoms.tolist() == [0, 6, 0]
    numpy.testing.assert_array_equal(batch.to_dense()[0], adj[:3, :3])


@pytest.mark.parametrize('n_relations', [1, 2])
@pytest.mark.parametrize('entry', [(0, 2), (2, 0)])
def test_dummy_atoms_with_bonds_of_one_direction_are_kept(entry, n_relations):
    """An entry in the atom's row or column alone is enough."""
    adj = numpy.zeros((n_relations, 4, 4), 'f')
    adj[(-1, *entry)] = 1
    adj = adj if n_relations > 1 else adj[0]
    examples = [(numpy.array([6, 7, 0, 0], 'i'), adj)]
    for data_set in (examples, to_sparse(examples)):
        atoms, batch = concat_mols(data_set)
        assert atoms.tolist() == [6, 7, 0]
        numpy.testing.assert_array_equal(batch.to_dense()[0], adj[..., :3, :3])


def test_molecule_without_atoms():
    atoms, adj = concat_mols(
        [
            (numpy.zeros(0, 'i'), numpy.zeros((0, 0), 'f')),
            (numpy.zeros(2, 'i'), numpy.zeros((2, 2), 'f')),
        ]
    )
    assert atoms.shape == (0,) and adj.n_graphs == 2 and adj.n_rows == 0


def test_pickle_and_type():
    converter = pickle.loads(pickle.dumps(CSRConverter('padded')))
    assert converter.layout == 'padded' and isinstance(converter, chainer.dataset.Converter)
    check_packed(pickle.loads(pickle.dumps(concat_mols))(molecules()), molecules())


ATOMS, ADJ = numpy.array([6, 8], 'i'), numpy.eye(2, dtype='f')


@pytest.mark.parametrize(
    'batch, error, message',
    [
        ([], ValueError, 'batch: expected at least one example, got none'),
        ([ATOMS], TypeError, r'batch\[0\]: expected a tuple .* got ndarray'),
        ([{'atoms': ATOMS}], TypeError, r'batch\[0\]: expected a tuple .* got dict'),
        ([(ATOMS,)], ValueError, r'batch\[0\]: expected a tuple .* of 2 elements, got 1'),
        ([(ATOMS, ADJ), (ATOMS, ADJ, 1.0)], ValueError, r'batch\[1\]: .* of 2 elements, got 3'),
        (
            [(ATOMS, ADJ), (ATOMS, numpy.eye(3))],
            ValueError,
            r'batch\[1\]: expected a row and a column .* atoms of shape \(2,\) .* \(3, 3\)',
        ),
        (
            [(ATOMS, numpy.ones((3, 2), 'f'))],
            ValueError,
            r'batch\[0\]: .* adjacency of shape \(3, 2\)',
        ),
        (
            [(ATOMS, ADJ), (ATOMS[:, None].astype('f'), ADJ)],
            ValueError,
            'batch: expected .* throughout, got float32 of 2 dimensions, int32 of 1 dimensions',
        ),
        ([(ATOMS != 6, ADJ)], ValueError, 'batch: expected .* got bool of 1 dimensions'),
        ([(numpy.array([6, 2**31]), ADJ)], ValueError, r'atom ids: expected at most 2\*\*31 - 1'),
        ([(ATOMS, ADJ, None)], ValueError, r'expected labels of one shape, got NoneType \(\)'),
        ([(ATOMS, ADJ, 'toxic')], ValueError, r'expected labels of one shape, got str \(\)'),
        (
            [(ATOMS, ADJ), (numpy.array([6, -1]), ADJ)],
            ValueError,
            r'batch\[1\]\[0\]: expected atom ids of at least 0, got -1',
        ),
        ([('CO', ADJ)], TypeError, r'batch\[0\]: expected arrays of atoms .* got str'),
        (
            [(ATOMS, ADJ, [1.0]), (ATOMS, ADJ, [1.0, 2.0])],
            ValueError,
            r'batch\[...\]\[2\]: expected labels of one shape, got list \(1,\), list \(2,\)',
        ),
        ([(ATOMS, ADJ), (ATOMS, numpy.ones((4, 2, 2)))], ValueError, r'got \(4, 2, 2\)'),
    ],
)
def test_bad_batch(batch, error, message):
    with pytest.raises(error, match=message):
        concat_mols(batch)


def test_bad_layout():
    with pytest.raises(ValueError, match="layout: expected one of 'packed', 'padded', got 'dense'"):
        CSRConverter(layout='dense')


# --- columns of a value for each atom ---


@pytest.mark.parametrize('channels', [(), (3,)])
@pytest.mark.parametrize('out_size', [None, 7])
def test_node_columns(device, channels, out_size):
    """They follow the atoms; padding in the data set is dropped together with its atoms."""
    rng = numpy.random.RandomState(0)
    examples = [
        (atoms, adj, rng.randint(1, 9, (len(atoms),) + channels).astype('i'), label)
        for atoms, adj, label in molecules((3, 1, 5), 1, out_size)
    ]
    atoms, adj, column, labels = CSRConverter(n_node_columns=1)(examples, device)
    expected = numpy.concatenate([e[2][: (e[0] != 0).sum()] for e in examples])
    numpy.testing.assert_array_equal(cuda.to_cpu(column), expected)
    assert column.dtype == numpy.int32 and len(column) == adj.n_rows == 9
    padded = CSRConverter('padded', 1)(examples, device)
    for ours, theirs in zip(
        (padded[0], padded[2], padded[3]), [dense_concat_mols(examples)[i] for i in (0, 2, 3)]
    ):
        numpy.testing.assert_array_equal(cuda.to_cpu(ours), theirs)
    again = pickle.loads(pickle.dumps(CSRConverter('padded', 1)))
    assert (again.layout, again.n_node_columns) == ('padded', 1)


def test_node_columns_that_do_not_fit():
    examples = [(atoms, adj, numpy.zeros(len(atoms)), label) for atoms, adj, label in molecules()]
    with pytest.raises(
        ValueError,
        match=r'labels of one shape.*one row per atom use CSRConverter\(n_node_columns=1\)',
    ):
        concat_mols(examples)
    examples[1] = examples[1][:2] + (numpy.zeros(2),) + examples[1][3:]
    with pytest.raises(
        ValueError,
        match=r'batch\[1\]\[2\]: expected a row for each of 1 atoms, '
        r'got shape \(2,\)',
    ):
        CSRConverter(n_node_columns=1)(examples)
    with pytest.raises(ValueError, match='n_node_columns: expected at least 0, got -1'):
        CSRConverter(n_node_columns=-1)
    with pytest.raises(ValueError, match='batch: expected dense examples .* n_node_columns = 1'):
        CSRConverter(n_node_columns=1)(to_sparse(molecules()))


def test_ids_that_begin_at_0():
    """An isolated atom of id 0 is a molecule, unless it is padding."""
    examples = molecules((3, 2)) + [(numpy.zeros(1, 'i'), numpy.zeros((1, 1), 'f'), numpy.ones(2))]
    atoms, adj, _ = CSRConverter(strip_padding=False)(examples)
    assert len(atoms) == adj.n_rows == 6 and adj.n_graphs == 3
    assert concat_mols(examples)[1].n_rows == 5
