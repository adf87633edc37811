"""Where a captured step's batch comes from: the host, or a data set on the same GPU."""

import numpy

from chainer.dataset import convert
from chainer.datasets import SubDataset

from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_example import locate
from chainer_bspmm.dataset.sparse_example import SparseExample
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.batched_csr import fill_buffers
from chainer_bspmm.training import buffers as layouts
from chainer_bspmm.training.buffers import Capacities
from chainer_bspmm.training.buffers import needs


class HostBatch:
    """Atoms, matrix and labels that a converter made, which are sent to the device."""

    def __init__(self, atoms, adj, labels):
        self._arrays = atoms, adj, labels
        self.form = layouts.Form.of(
            adj.n_graphs, adj.n_relations, adj.is_symmetric, atoms, adj.data, labels
        )
        self.need = needs(
            numpy.diff(adj.row_offsets), numpy.diff(adj.indptr[adj.row_offsets]), adj.max_atom_id
        )

    def arrays_on(self, device):
        """Return the batch as an ordinary one (tuple) on a device."""
        atoms, adj, labels = self._arrays
        return (device.send(atoms), adj.to_device(device), *map(device.send, labels))

    def staged(self, capacity):
        """Return name -> (shape, dtype) of what is sent."""
        return layouts.batch_arrays(self.form, capacity)

    def write(self, views):
        """Fill host arrays of :meth:`staged`, spare rows and entries included."""
        fill_buffers(layouts.buffers_of(views), *self._arrays)

    source = gather = None


class DeviceBatch:
    """Molecules of a `DeviceDataset`; only their numbers are sent."""

    def __init__(self, molecules, index):
        self.source = self._molecules = molecules
        self._index = index
        self.form = layouts.Form.of(
            index.size,
            molecules.n_relations,
            molecules.is_symmetric(index),
            molecules.atoms,
            molecules.data,
            molecules.labels,
        )
        self.need = needs(molecules.sizes[index], molecules.nnz[index], molecules.max_atom_id)

    def arrays_on(self, device):
        atoms, adj, labels = self._molecules.batch(self._index, 'packed')
        return (atoms, adj, *labels)

    def staged(self, capacity):
        return {'index': (self._index.shape, 'i4')}

    def write(self, views):
        views['index'][...] = self._index

    def gather(self, index, buffers):
        """Launch the kernels that gather the molecules of a device array of numbers."""
        self._molecules.gather(index, buffers)


class NoSparseBatch(TypeError):
    """The converter makes batches that cannot be captured."""


def batch_of(examples, converter, device):
    """Return the `DeviceBatch` or `HostBatch` of what an iterator gave.

    Raises:
        NoSparseBatch: the converter makes something other than a packed sparse batch.
    """
    if (
        type(converter) is CSRConverter
        and converter.layout == 'packed'
        and not converter.n_node_columns
    ):
        found = locate(examples) if isinstance(examples, (list, SparseDataset)) else None
        if (
            found is not None
            and isinstance(found[0], DeviceMolecules)
            and found[0].device == device
        ):
            return DeviceBatch(*found)
    arrays = convert._call_converter(converter, examples, None)
    if not isinstance(arrays, tuple) or len(arrays) < 2 or not isinstance(arrays[1], BatchedCSR):
        raise NoSparseBatch(
            'converter: expected a tuple (atoms, BatchedCSR, label...), as '
            'chainer_bspmm.concat_mols makes it, got %s' % _described(arrays)
        )
    atoms, adj, *labels = arrays
    if adj.layout != 'packed':
        raise NoSparseBatch("converter: expected layout='packed', got %r" % adj.layout)
    for array in (atoms, *labels):
        if not isinstance(array, numpy.ndarray):
            raise NoSparseBatch(
                'converter: expected arrays on the host where device is None, got '
                '%s' % type(array).__name__
            )
    for i, label in enumerate(labels):
        if label.shape[:1] != (adj.n_graphs,):
            raise NoSparseBatch(
                'converter: expected a row for each of %d molecules in output %d, '
                'got shape %s' % (adj.n_graphs, 2 + i, label.shape)
            )
    return HostBatch(atoms, adj, labels)


def _described(arrays):
    if isinstance(arrays, tuple):
        return '(%s)' % ', '.join(type(array).__name__ for array in arrays)
    return type(arrays).__name__


def capacities(dataset, n_graphs):
    """Return `Capacities` for batches of a data set (any object), from its sizes if known."""
    found = None
    if isinstance(dataset, SparseDataset):
        found = locate(dataset)
    elif isinstance(dataset, SubDataset) and len(dataset) and isinstance(dataset[0], SparseExample):
        found = locate(dataset[:])  # as made by Chainer's functions that split data sets
    if found is None:
        return Capacities(n_graphs)
    molecules, order = found
    return Capacities(n_graphs, molecules.sizes[order], molecules.nnz[order], molecules.max_atom_id)
