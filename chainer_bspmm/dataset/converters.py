"""Converters: a list of molecules in, arrays and a `BatchedCSR` on a device out."""
import numpy

import chainer
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import validate
from chainer_bspmm.sparse.batched_csr import LAYOUTS
from chainer_bspmm.sparse.build import to_host


class CSRConverter(chainer.dataset.Converter):
    """Turn examples ``(atoms, adj, label...)`` into one sparse batch.

    Takes the place of ``chainer_chemistry.dataset.converters.concat_mols``, wherever a converter
    goes: updaters, evaluators, ``predict``. Instances can be pickled.

    Args:
        layout (str): ``'packed'``: the nodes of all molecules one after the other, no padding;
            padding that the data set holds (trailing atoms of id 0 without any bond) is left out.
            ``'padded'``: every molecule has as many rows as the largest one of the batch, which
            reproduces Chainer Chemistry's dense batch, phantom atoms included.
    """

    def __init__(self, layout='packed'):
        validate.one_of('layout', layout, LAYOUTS)
        self.layout = layout

    def __call__(self, batch, device=None):
        """Convert.

        Args:
            batch (sequence): examples, each a tuple of
                atoms: (n,) integer atom ids, or (n, channels) floating node features;
                adj: (n, n) or (R, n, n) dense array, or SciPy sparse matrix;
                any number of labels: scalars or arrays of one shape a column.
                A list, a SubDataset or a NumpyTupleDataset.
            device (None, int, str or chainer.backend.Device): where the result goes; None means
                the host.

        Returns:
            tuple: atoms, (n_nodes,) int32, or (n_graphs, N) padded with 0 (features have one more
            dimension); BatchedCSR; then one array (n_graphs, ...) for each label.

        Raises:
            TypeError: the batch does not hold tuples of arrays.
            ValueError: empty batch, tuples of different lengths, a negative atom id, atoms and
                adjacency of different sizes; the message names the example.
        """
        examples = [batch[i] for i in range(len(batch))]
        columns = _columns(examples)
        sizes, atoms, matrices = _molecules(columns[0], columns[1], self.layout == 'packed')
        max_atom_id = None
        flat = numpy.concatenate(atoms)
        if flat.dtype.kind in 'iu':
            max_atom_id = int(flat.max(initial=0))
            validate.fits_int32('atom ids', max_atom_id)
            if flat.min(initial=0) < 0:
                graph = int(numpy.searchsorted(numpy.cumsum(sizes), flat.argmin(), side='right'))
                raise ValueError('batch[%d][0]: expected atom ids of at least 0, got %d'
                                 % (graph, flat.min()))
            flat = flat.astype(numpy.int32, copy=False)
        adj = BatchedCSR.from_matrices(matrices, self.layout, max_atom_id)
        if self.layout == 'padded':
            flat = _pad(flat, sizes, adj.max_rows)
        labels = [_stack(i, column) for i, column in enumerate(columns) if i > 1]
        if device is not None:
            device = chainer.get_device(device)
            flat, *labels = [device.send(array) for array in [flat] + labels]
            adj = adj.to_device(device)
        return (flat, adj) + tuple(labels)


def _columns(examples):
    if not examples:
        raise ValueError('batch: expected at least one example, got none')
    for i, example in enumerate(examples):
        if not isinstance(example, tuple):
            raise TypeError('batch[%d]: expected a tuple (atoms, adj, label...), got %s'
                            % (i, type(example).__name__))
    n_columns = max(len(examples[0]), 2)
    if set(map(len, examples)) != {n_columns}:
        i, example = next((i, e) for i, e in enumerate(examples) if len(e) != n_columns)
        raise ValueError('batch[%d]: expected a tuple (atoms, adj, label...) of %d elements, '
                         'got %d' % (i, n_columns, len(example)))
    return list(zip(*examples))


def _molecules(atoms, matrices, strip):
    """Check that atoms and adjacency agree, cut padding off, return sizes, atoms, matrices."""
    for i, (ids, matrix) in enumerate(zip(atoms, matrices)):
        if not hasattr(ids, 'dtype') or not hasattr(matrix, 'shape'):
            raise TypeError('batch[%d]: expected arrays of atoms and adjacency, got %s and %s'
                            % (i, type(ids).__name__, type(matrix).__name__))
        if matrix.shape[-2:] != ids.shape[:1] * 2:
            raise ValueError('batch[%d]: expected a row and a column of the adjacency for each '
                             'atom, got atoms of shape %s and adjacency of shape %s'
                             % (i, ids.shape, matrix.shape))
    kinds = {('id' if ids.dtype.kind in 'iu' else ids.dtype.kind, ids.ndim) for ids in atoms}
    if kinds != {('id', 1)} and kinds != {('f', 2)}:
        raise ValueError('batch: expected (n,) integer atom ids, or (n, channels) floating '
                         'features, throughout, got %s' % ', '.join(sorted(
                             {'%s of %d dimensions' % (a.dtype, a.ndim) for a in atoms})))
    atoms, matrices = [to_host(ids) for ids in atoms], list(matrices)
    if strip and atoms[0].ndim == 1:
        for i, ids in enumerate(atoms):
            if ids.size and not ids[-1]:
                matrices[i] = to_host(matrices[i])
                n = _used(ids, matrices[i])
                atoms[i], matrices[i] = ids[:n], matrices[i][..., :n, :n]
    return list(map(len, atoms)), atoms, matrices


def _used(ids, matrix):
    """Return the number of nodes without trailing padding: id 0, no entry in row or column.

    Id 0 alone does not make padding: it is also RDKit's atomic number of a dummy atom.
    """
    if not isinstance(matrix, numpy.ndarray):
        return len(ids)
    bonds = (matrix != 0).reshape(-1, len(ids), len(ids)).any(axis=0)
    used = numpy.flatnonzero((ids != 0) | bonds.any(axis=0) | bonds.any(axis=1))
    return int(used[-1]) + 1 if used.size else 0


def _pad(flat, sizes, n):
    padded = numpy.zeros((len(sizes), n) + flat.shape[1:], flat.dtype)
    padded[numpy.arange(n) < numpy.asarray(sizes)[:, None]] = flat
    return padded


def _stack(i, column):
    try:
        stacked = numpy.array([to_host(label) for label in column])
    except ValueError:
        stacked = None
    if stacked is None or stacked.dtype.kind not in 'biuf':
        raise ValueError('batch[...][%d]: expected labels of one shape, got %s' % (
            i, ', '.join(sorted({'%s %s' % (getattr(label, 'dtype', type(label).__name__),
                                            numpy.shape(to_host(label))) for label in column}))))
    return stacked


concat_mols = CSRConverter()
