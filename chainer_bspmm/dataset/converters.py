"""Converters from a list of molecules to arrays and a `BatchedCSR` on a device."""

from typing import Any

import numpy

import chainer
from chainer import backend

from chainer_bspmm.dataset import dense_examples, selection
from chainer_bspmm.dataset.labels import are_of_atoms, labels_of, NAMES, padded
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.selection import Selection, SparseExample
from chainer_bspmm.sparse import check
from chainer_bspmm.sparse.batch import send
from chainer_bspmm.sparse.build import spread, to_host


class CSRConverter(chainer.dataset.Converter):
    """Turn examples ``(atoms, adj, label...)`` into one sparse batch.

    Replaces ``chainer_chemistry.dataset.converters.concat_mols`` in updaters, evaluators and
    ``predict``. Examples of a `SparseDataset` are only gathered; dense examples are searched for
    bonds in every batch. Packed and folded batches of a `DeviceDataset` for its GPU are gathered
    on that GPU. Instances can be pickled.

    Chainer Chemistry pads every molecule to the largest of its batch with phantom atoms (id 0, no
    bonds), which take part in its results.

    Args:
        layout (str): ``'folded'``: a row for every atom, and one row for all phantom atoms of a
            molecule, weighted by their number; results equal Chainer Chemistry's on a dense batch.
            ``'padded'``: the same results, with a row for each phantom atom. ``'packed'``: no
            phantom atoms, each molecule by itself.
        padded_to (int or None): number of atoms to which folded molecules are padded, so that
            results do not depend on the batch; larger molecules get no phantom atoms. None: the
            size of the largest molecule of the batch.
        n_node_columns (int or None): number of columns after the adjacency that have a row for each
            atom, such as the labels of the ``*_cwle`` and ``*_gwle`` methods. They are laid out as
            the atoms are, with 0 for phantom atoms. Later columns are labels of molecules, whatever
            their lengths. None: the leading columns whose arrays have as many rows as their
            molecules have atoms. If all molecules of a batch have one size (a batch of one, stored
            padding), labels of molecules may have that length by chance. In such a batch the last
            column is not counted. Another column is counted only if it consists of one-dimensional
            integer arrays, and if no earlier batch, of molecules that differed in size, has shown
            that labels of this shape belong to molecules.
        strip_padding (bool or None): whether trailing atoms of id 0 without bonds are padding of
            the data set. True: they are, and get no rows. False: they are atoms, as with the
            ``*_wle`` methods, whose ids begin at 0. None: they are padding, but packed batches
            raise ValueError where that is not certain, because molecules differ in size, another
            atom has id 0, or there is one molecule only, as in a last batch of one. Folded batches
            do not depend on this option, because such an atom equals a phantom atom, with two
            exceptions. If a molecule has more atoms than ``padded_to``, the rest would be dropped,
            so None raises ValueError as in packed batches. And only True drops the rows of node
            columns. Padded batches keep all rows.

    Raises:
        TypeError: the class itself was passed as a converter, so that ``layout`` is a batch; or a
            number is not an int.
        ValueError: an option has another value, or ``padded_to`` goes with another layout than
            ``'folded'``.
    """

    # Defaults for instances that were pickled before these attributes existed.
    padded_to = None
    n_node_columns = 0
    strip_padding = True

    def __init__(
        self,
        layout: str = 'folded',
        padded_to: int | None = None,
        n_node_columns: int | None = None,
        strip_padding: bool | None = None,
    ):
        if isinstance(layout, (list, tuple)):
            text = (
                'layout: expected a str, got a %s; pass an instance, CSRConverter(), as the '
                'converter, not the class'
            )
            raise TypeError(text % type(layout).__name__)
        check.layout(layout, padded_to)
        if n_node_columns is not None:
            check.count('n_node_columns', n_node_columns, 0)
        check.one_of('strip_padding', strip_padding, (None, True, False))
        self.layout = layout
        self.padded_to = padded_to
        self.n_node_columns = n_node_columns
        # NumPy's bool becomes Python's, because keeps_padding compares with `is`.
        self.strip_padding = None if strip_padding is None else bool(strip_padding)

    def __repr__(self):
        options = {name: value for name, value in vars(self).items() if value is not None}
        return 'CSRConverter(%s)' % ', '.join('%s=%r' % pair for pair in options.items())

    def __call__(self, batch: Any, device: Any = None, padding: int | None = None) -> tuple:
        """Convert a batch.

        Args:
            batch (sequence): a list, a SubDataset, a NumpyTupleDataset or a SparseDataset of
                examples, each a tuple of
                atoms: (n,) integer atom ids, or (n, channels) floating node features;
                adj: (n, n) or (R, n, n) dense array, SciPy sparse matrix, or list of R of them;
                any number of labels: numbers, arrays, or str on a host; the features of a super
                node are one of these. The arrays of a column have the same number of dimensions; if
                their shapes differ, they are padded with 0 to the largest of the batch, as by
                upstream's converter. Columns with a row for each atom come first.
            device (None, int, str or chainer.backend.Device): device of the result; None means the
                host.
            padding (int or None): an argument of upstream's converter; None and 0 are accepted.

        Returns:
            tuple: atoms, (n_rows,) int32, or (n_graphs, N) where padded, 0 for phantom atoms
            (features have one more dimension); BatchedCSR; then one array for each label,
            (n_graphs, ...), or (n_rows, ...) and (n_graphs, N, ...) for node columns.

        Raises:
            TypeError: the examples are not tuples of arrays, or have names and ``device`` is a GPU.
            ValueError: another padding, empty batch, tuples of different lengths, a negative atom
                id, atoms and adjacency of different sizes, padding that may be atoms, a second
                molecule, labels of atoms after labels of molecules; the message names the example.
        """
        if padding not in (None, 0):
            raise ValueError('padding: expected None or 0, got %r' % (padding,))
        device = None if device is None else chainer.get_device(device)
        if not isinstance(batch, (list, Selection)):
            dense_examples.check_sequence('batch', batch)
            batch = [batch[i] for i in range(len(batch))]  # a SubDataset has no iterator
        located = self.locate(batch)
        if located is None:
            examples = [tuple(e) if isinstance(e, SparseExample) else e for e in batch]
            atoms, adj, labels = self._from_dense(examples)
        else:
            molecules, index = located
            atoms, adj, labels = molecules.near(device).batch(
                index, self.layout, self.padded_to, self.keeps_padding(molecules)
            )
        if device is not None and device != backend.get_device_from_array(atoms):
            _refuse_names(labels, device)
            atoms, *labels = send([atoms] + labels, device)
            adj = adj.to_device(device)
        return (atoms, adj, *labels)

    def locate(self, batch):
        """Return the `Molecules` to gather from and their indices; None if the batch is dense.

        ValueError: molecules of a sparse data set do not go with ``n_node_columns``, or would lose
        atoms that need not be padding.
        """
        located = selection.locate(batch)
        if located is None:
            return None
        if self.n_node_columns:
            raise ValueError(
                'batch: expected dense examples with n_node_columns = %d, got a '
                'sparse data set, whose labels belong to molecules' % self.n_node_columns
            )
        molecules, index = located
        if self.may_lose_atoms(molecules):
            dense_examples.refuse_loss(
                molecules.sizes[index], molecules.full_sizes[index], self.padded_to or 0
            )
        on_host = self.layout == 'padded' or self.keeps_padding(molecules)
        return (molecules.near(None) if on_host else molecules), index

    @property
    def _loses(self):
        """Whether taking atoms for padding would change results."""
        return self.layout == 'packed' or self.padded_to is not None

    def may_lose_atoms(self, molecules):
        """Return whether the rows that batches of `Molecules` drop as padding may be atoms."""
        is_sure = self.strip_padding is not None or not self._loses
        return not is_sure and molecules.has_padding and not molecules.is_padding

    def keeps_padding(self, molecules):
        """Return whether padding of `Molecules` gets rows, so that only the host can gather it."""
        return self.strip_padding is False and self._loses and molecules.has_padding

    def _from_dense(self, examples):
        gathered = dense_examples.gather(examples)
        n_node_columns = self.n_node_columns
        strip = self.strip_padding
        most = n_node_columns  # leading columns that may belong to atoms
        # A folded batch that strips padding would lose a node column's values for these atoms. Even
        # the last column, which is not counted by default, may be a node column.
        may_lose = strip is None and self.layout == 'folded'
        if n_node_columns is None or (may_lose and not n_node_columns):
            most = dense_examples.count_node_columns(gathered, last_too=True)
        if n_node_columns is None:
            n_node_columns = most and dense_examples.count_node_columns(gathered)
        if strip is None:
            strip = not (may_lose and most)
        strip = strip and self.layout != 'padded'
        molecules = Molecules.from_examples(gathered, strip=strip)
        sizes, full_sizes = molecules.sizes, molecules.full_sizes
        if self.may_lose_atoms(molecules):
            dense_examples.refuse_loss(sizes, full_sizes, self.padded_to or 0)
        index = numpy.arange(sizes.size)
        atoms, adj, _ = molecules.batch(index, self.layout, self.padded_to)
        rows = [
            self._node_column(column, sizes, full_sizes, 2 + i)
            for i, column in enumerate(gathered.labels[:n_node_columns])
        ]
        adj.n_node_columns = len(rows)
        if self.layout != 'packed':
            rows = spread(rows, sizes, numpy.diff(adj.row_offsets))
        if self.layout == 'padded':
            rows = [array.reshape((sizes.size, adj.max_rows) + array.shape[1:]) for array in rows]
        columns = gathered.labels[n_node_columns:]
        if self.n_node_columns is None:
            _refuse_node_columns(columns, 2 + n_node_columns, full_sizes)
        labels = labels_of(columns, 'batch', 2 + n_node_columns, full_sizes)
        return atoms, adj, rows + list(map(padded, labels))

    def _node_column(self, column, sizes, full_sizes, position):
        """Concatenate a column's rows of all nodes that are not padding."""
        rows = []
        for i, (values, n, full) in enumerate(zip(column, sizes, full_sizes)):
            if numpy.shape(values)[:1] != (full,):
                text = 'batch[%d][%d]: expected a row for each of %d atoms, got shape %s'
                raise ValueError(text % (i, position, full, numpy.shape(values)))
            rows.append(to_host(values)[:n])
            if rows[-1].shape[1:] != rows[0].shape[1:]:
                text = 'batch[%d][%d]: expected shape (%s) for each atom as in batch[0], got (%s)'
                shapes = [', '.join(map(str, array.shape[1:])) for array in (rows[0], rows[-1])]
                raise ValueError(text % (i, position, *shapes))
        return numpy.concatenate(rows)


def _refuse_node_columns(columns, first, sizes):
    """Raise ValueError for a column of labels of molecules that seems to be a node column."""
    for position, column in enumerate(columns, first):
        if are_of_atoms(column, sizes):
            raise ValueError(
                'batch[...][%d]: expected labels of molecules, got a row for each atom; if these '
                'are labels of atoms, use CSRConverter(n_node_columns=%d), otherwise '
                'CSRConverter(n_node_columns=%d)' % (position, position - 1, first - 2)
            )


def _refuse_names(labels, device):
    """Raise TypeError for names, which a device other than the host cannot hold."""
    for position, label in enumerate(labels, 2):
        if label.dtype.kind in NAMES:
            raise TypeError(
                'batch[...][%d]: expected numbers for %s, got names (%s); leave the column out of '
                'the data set' % (position, device.name, label.dtype)
            )


concat_mols = CSRConverter()
