"""Converters: from a list of molecules to arrays and a `BatchedCSR` on a device."""

from typing import Any

import numpy

import chainer
from chainer import backend

from chainer_bspmm.dataset import dense_examples
from chainer_bspmm.dataset.molecules import fold
from chainer_bspmm.dataset.sparse_example import locate
from chainer_bspmm.dataset.sparse_example import Selection
from chainer_bspmm.dataset.sparse_example import SparseExample
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import validate
from chainer_bspmm.sparse.batch import send
from chainer_bspmm.sparse.build import row_weights
from chainer_bspmm.sparse.build import to_host


class CSRConverter(chainer.dataset.Converter):
    """Turn examples ``(atoms, adj, label...)`` into one sparse batch.

    Replaces ``chainer_chemistry.dataset.converters.concat_mols`` in updaters, evaluators and
    ``predict``. Examples of a `SparseDataset` are only gathered; dense ones are searched for their
    entries every time. Packed batches of a `DeviceDataset` for its GPU are gathered there.
    Instances can be pickled.

    Args:
        layout (str): ``'packed'``: the nodes of all molecules one after the other; padding in the
            data set (trailing atoms of id 0 without bonds) is dropped. ``'padded'``: every
            molecule has as many rows as the largest one of the batch, which reproduces Chainer
            Chemistry's dense batch, phantom atoms included. ``'folded'``: the same numbers, with
            one row for all phantom atoms of a molecule.
        padded_to (int or None): to how many atoms folded molecules are padded, so that results do
            not depend on the batch; larger molecules get no phantom atoms. None: as many as the
            largest molecule of the batch has.
        n_node_columns (int): number of columns after the adjacency that have a row for each atom,
            such as the labels of the ``*_cwle`` and ``*_gwle`` methods; they are concatenated or
            padded as the atoms are.
        strip_padding (bool): False keeps trailing atoms of id 0 without bonds: for data sets whose
            ids begin at 0, such as the labels of the ``*_wle`` methods.
    """

    def __init__(
        self,
        layout: str = 'packed',
        n_node_columns: int = 0,
        strip_padding: bool = True,
        padded_to: int | None = None,
    ):
        validate.layout(layout, padded_to)
        if n_node_columns < 0:
            raise ValueError('n_node_columns: expected at least 0, got %d' % n_node_columns)
        self.layout = layout
        self.padded_to = padded_to
        self.n_node_columns = n_node_columns
        self.strip_padding = strip_padding

    def __call__(self, batch: Any, device: Any = None) -> tuple:
        """Convert a batch.

        Args:
            batch (sequence): examples, each a tuple of
                atoms: (n,) integer atom ids, or (n, channels) floating node features;
                adj: (n, n) or (R, n, n) dense array, or SciPy sparse matrix;
                any number of labels: scalars or arrays, of one shape in each column; the features
                of a super node are one of these.
                A list, a SubDataset, a NumpyTupleDataset or a SparseDataset.
            device (None, int, str or chainer.backend.Device): of the result; None means the host.

        Returns:
            tuple: atoms, (n_nodes,) int32, or (n_graphs, N) padded with 0 (features have one more
            dimension); BatchedCSR; then one array (n_graphs, ...) for each label.

        Raises:
            TypeError: the examples are not tuples of arrays.
            ValueError: empty batch, tuples of different lengths, a negative atom id, atoms and
                adjacency of different sizes; the message names the example.
        """
        device = None if device is None else chainer.get_device(device)
        if not isinstance(batch, (list, Selection)):
            batch = [batch[i] for i in range(len(batch))]  # a SubDataset has no iterator
        found = locate(batch)
        if found is None:
            examples = [
                tuple(example) if isinstance(example, SparseExample) else example
                for example in batch
            ]
            atoms, adj, labels = self._from_dense(examples)
        elif self.n_node_columns:
            raise ValueError(
                'batch: expected dense examples with n_node_columns = %d, got a '
                'sparse data set, whose labels belong to molecules' % self.n_node_columns
            )
        else:
            molecules, index = found
            atoms, adj, labels = molecules.near(device).batch(index, self.layout, self.padded_to)
        if device is not None and device != backend.get_device_from_array(atoms):
            atoms, *labels = send([atoms] + labels, device)
            adj = adj.to_device(device)
        return (atoms, adj) + tuple(labels)

    def _from_dense(self, examples):
        found = dense_examples.gather(examples, self.layout != 'padded' and self.strip_padding)
        atoms, max_atom_id = found.atoms, None
        if atoms.ndim == 1:
            max_atom_id = int(atoms.max(initial=0))
        adj = BatchedCSR.from_matrices(found.matrices, self.layout, max_atom_id, self.padded_to)
        if self.layout == 'folded':
            atoms = fold(atoms, found.sizes)
            if self.padded_to is None:
                adj.row_weights = row_weights(numpy.array(found.sizes), max(found.full_sizes))
        elif self.layout == 'padded':
            atoms = _pad(atoms, found.sizes, adj.max_rows)
        labels = [
            self._node_column(column, found, 2 + i)
            if i < self.n_node_columns
            else dense_examples.stack(column, 'batch', 2 + i, found.full_sizes)
            for i, column in enumerate(found.labels)
        ]
        return atoms, adj, labels

    def _node_column(self, column, found, position):
        """Return one row for each node, padding removed or added as for the atoms."""
        rows = []
        for i, (values, size, full) in enumerate(zip(column, found.sizes, found.full_sizes)):
            if numpy.shape(values)[:1] != (full,):
                raise ValueError(
                    'batch[%d][%d]: expected a row for each of %d atoms, got shape %s'
                    % (i, position, full, numpy.shape(values))
                )
            rows.append(to_host(values)[:size])
        flat = numpy.concatenate(rows)
        if self.layout == 'folded':
            return fold(flat, found.sizes)
        return _pad(flat, found.sizes, max(found.sizes)) if self.layout == 'padded' else flat


def _pad(flat, sizes, n):
    padded = numpy.zeros((len(sizes), n) + flat.shape[1:], flat.dtype)
    padded[numpy.arange(n) < numpy.asarray(sizes)[:, None]] = flat
    return padded


concat_mols = CSRConverter()
