"""Converters: a list of molecules in, arrays and a `BatchedCSR` on a device out."""

import numpy

import chainer
from chainer import backend
from chainer_bspmm.dataset import dense_examples as dense
from chainer_bspmm.dataset.sparse_dataset import locate
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_dataset import SparseExample
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import validate
from chainer_bspmm.sparse.batch import send
from chainer_bspmm.sparse.batched_csr import LAYOUTS
from chainer_bspmm.sparse.build import to_host


class CSRConverter(chainer.dataset.Converter):
    """Turn examples ``(atoms, adj, label...)`` into one sparse batch.

    Takes the place of ``chainer_chemistry.dataset.converters.concat_mols``, wherever a converter
    goes: updaters, evaluators, ``predict``. Examples of a `SparseDataset` are only gathered; dense
    ones are searched for their entries every time. Those of a `DeviceDataset` are gathered on its
    GPU where the batch goes there, packed. Instances can be pickled.

    Args:
        layout (str): ``'packed'``: the nodes of all molecules one after the other, no padding;
            padding that the data set holds (trailing atoms of id 0 without any bond) is left out.
            ``'padded'``: every molecule has as many rows as the largest one of the batch, which
            reproduces Chainer Chemistry's dense batch, phantom atoms included.
        n_node_columns (int): so many columns after the adjacency hold a number, or a row of them,
            for each atom, as the labels of the ``*_cwle`` and ``*_gwle`` methods; they are
            concatenated or padded as the atoms are.
        strip_padding (bool): False keeps trailing atoms of id 0 without any bond: for data sets
            whose ids begin at 0, as the labels of the ``*_wle`` methods do.
    """

    def __init__(self, layout='packed', n_node_columns=0, strip_padding=True):
        validate.one_of('layout', layout, LAYOUTS)
        if n_node_columns < 0:
            raise ValueError('n_node_columns: expected at least 0, got %d' % n_node_columns)
        self.layout = layout
        self.n_node_columns = n_node_columns
        self.strip_padding = strip_padding

    def __call__(self, batch, device=None):
        """Convert.

        Args:
            batch (sequence): examples, each a tuple of
                atoms: (n,) integer atom ids, or (n, channels) floating node features;
                adj: (n, n) or (R, n, n) dense array, or SciPy sparse matrix;
                any number of labels: scalars or arrays of one shape a column; a super node's
                features are one of these.
                A list, a SubDataset, a NumpyTupleDataset or a SparseDataset.
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
        device = None if device is None else chainer.get_device(device)
        if not isinstance(batch, (list, SparseDataset)):
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
                'batch: expected dense examples to go with n_node_columns = %d, got a '
                'sparse data set, whose labels belong to molecules' % self.n_node_columns
            )
        else:
            molecules, index = found
            atoms, adj, labels = molecules.near(device).batch(index, self.layout)
        if device is not None and device != backend.get_device_from_array(atoms):
            atoms, *labels = send([atoms] + labels, device)
            adj = adj.to_device(device)
        return (atoms, adj) + tuple(labels)

    def _from_dense(self, examples):
        found = dense.gather(examples, self.layout == 'packed' and self.strip_padding)
        atoms, max_atom_id = found.atoms, None
        if atoms.ndim == 1:
            max_atom_id = int(atoms.max(initial=0))
        adj = BatchedCSR.from_matrices(found.matrices, self.layout, max_atom_id)
        if self.layout == 'padded':
            atoms = _pad(atoms, found.sizes, adj.max_rows)
        labels = [
            self._node_column(column, found, 2 + i)
            if i < self.n_node_columns
            else dense.stack(column, 'batch', 2 + i)
            for i, column in enumerate(found.labels)
        ]
        return atoms, adj, labels

    def _node_column(self, column, found, position):
        """Return one row for each node, padding cut off or put in as with the atoms."""
        rows = []
        for i, (values, size, full) in enumerate(zip(column, found.sizes, found.full_sizes)):
            if numpy.shape(values)[:1] != (full,):
                raise ValueError(
                    'batch[%d][%d]: expected a row for each of %d atoms, got shape %s'
                    % (i, position, full, numpy.shape(values))
                )
            rows.append(to_host(values)[:size])
        flat = numpy.concatenate(rows)
        return _pad(flat, found.sizes, max(found.sizes)) if self.layout == 'padded' else flat


def _pad(flat, sizes, n):
    padded = numpy.zeros((len(sizes), n) + flat.shape[1:], flat.dtype)
    padded[numpy.arange(n) < numpy.asarray(sizes)[:, None]] = flat
    return padded


concat_mols = CSRConverter()
