"""Dense and sparse molecules of every kind, and comparisons of their batches."""

from chainer_chemistry.datasets import NumpyTupleDataset
import numpy

from chainer_bspmm.dataset.molecules import Molecules
from tests.support import random_matrix

# Molecule 0 is the largest, 2 and 6 have no atoms, 1 and 4 are single atoms.
SIZES = (37, 1, 0, 5, 1, 12, 0, 4)

LABELS = {
    'none': (),
    'row': (('f', (12,)),),
    'five': (('i', ()), ('f', (2,)), ('d', ()), ('?', (3,)), ('e', ())),
    'three bytes': (('b', (3,)),),
    'matrix': (('d', (2, 3)),),
    'halves': (('e', (5,)),),
    'empty rows': (('f', (0,)),),
    'int32': (('i', ()),),
    'float32': (('f', ()),),
    'float64': (('d', ()),),
    'bytes': (('?', ()),),
}
# Attributes that assert_same_batch compares.
ATTRIBUTES_OF_BATCH = (
    'n_graphs',
    'n_rows',
    'n_cols',
    'nnz',
    'n_relations',
    'max_rows',
    'max_cols',
    'max_nnz',
    'is_symmetric',
    'layout',
    'padded_to',
    'max_atom_id',
)


def molecules(sizes=(3, 1, 5), n_labels=1, out_size=None, n_relations=1, seed=0):
    """Return dense examples in the format of Chainer Chemistry's preprocessors."""
    rng = numpy.random.RandomState(seed)
    examples = []
    for n in sizes:
        atoms = rng.randint(1, 9, n).astype('i')
        adj = random_matrix(rng, n, n_relations).astype('f')
        adj[..., range(n), range(n)] = 1
        if out_size is not None:
            atoms = numpy.pad(atoms, (0, out_size - n))
            adj = numpy.pad(adj, ((0, 0),) * (adj.ndim - 2) + ((0, out_size - n),) * 2)
        labels = [rng.uniform(size=2).astype('f') for _ in range(n_labels)]
        examples.append(tuple([atoms, adj] + labels))
    return examples


def tuple_data_set(examples):
    """Return a NumpyTupleDataset of examples; columns of several shapes are arrays of objects."""
    columns = []
    for values in zip(*examples):
        if len({numpy.shape(value) for value in values}) == 1:
            columns.append(numpy.stack(values))
        else:
            columns.append(numpy.empty(len(values), object))
            columns[-1][:] = values
    return NumpyTupleDataset(*columns)


def molecule_set(sizes=SIZES, n_relations=1, data='f', atoms='ids', labels='float32', seed=0):
    """Return `Molecules` with random entries.

    Args:
        sizes (sequence of int): numbers of atoms; some molecules get no entries.
        data (str or None): letter of a dtype.
        atoms (str): 'ids', or the letter of the features' dtype.
        labels (str): one of LABELS.
    """
    rng = numpy.random.RandomState(seed)
    sizes = numpy.array(sizes)
    n_nodes = int(sizes.sum())
    # Molecules of three or four atoms have no entries.
    row_nnz = rng.randint(0, 4, n_nodes).astype('i')
    row_nnz[numpy.repeat((sizes == 3) | (sizes == 4), sizes)] = 0
    widths = numpy.repeat(numpy.repeat(sizes * n_relations, sizes), row_nnz)
    columns = (rng.uniform(size=widths.size) * widths).astype('i')
    values = None if data is None else rng.uniform(0.5, 2, columns.size).astype(data)
    if atoms == 'ids':
        nodes = rng.randint(1, 90, n_nodes).astype('i')
    else:
        nodes = rng.uniform(size=(n_nodes, 3)).astype(atoms)
    arrays = [rng.uniform(-99, 99, (sizes.size,) + shape).astype(d) for d, shape in LABELS[labels]]
    return Molecules(nodes, sizes, sizes + 1, row_nnz, columns, values, n_relations, arrays)


def assert_same_batch(actual, expected):
    """Check that two converters have equal results, including every array of the sparse batch."""
    (atoms, adj, *labels), (e_atoms, e_adj, *e_labels) = actual, expected
    for a, e in zip([atoms] + labels, [e_atoms] + e_labels, strict=True):
        numpy.testing.assert_array_equal(a, e)
        assert a.dtype == e.dtype
    for name in ('indptr', 'indices', 'row_offsets', 'col_offsets'):
        a, e = getattr(adj, name), getattr(e_adj, name)
        numpy.testing.assert_array_equal(a, e, name)
        assert a.dtype == e.dtype == numpy.int32
    numpy.testing.assert_array_equal(adj._host_values(), e_adj._host_values())
    assert (adj.row_weights is None) == (e_adj.row_weights is None)
    if adj.row_weights is not None:
        numpy.testing.assert_array_equal(adj.row_weights, e_adj.row_weights)
        assert adj.row_weights.dtype == e_adj.row_weights.dtype == numpy.float32
    for name in ATTRIBUTES_OF_BATCH:
        assert getattr(adj, name) == getattr(e_adj, name), name


def assert_same_molecules(actual, expected):
    """Check that two sparse data sets have equal arrays; return their labels in pairs."""
    fields = actual.molecules.fields()
    expected_fields = expected.molecules.fields()
    labels = zip(fields.pop('labels'), expected_fields.pop('labels'), strict=True)
    for name, array in fields.items():
        of_expected = expected_fields[name]
        numpy.testing.assert_array_equal(array, of_expected, name)
        assert getattr(array, 'dtype', None) == getattr(of_expected, 'dtype', None)
    return labels
