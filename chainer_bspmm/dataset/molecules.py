"""`Molecules`: the graphs of a whole data set in a few arrays, from which batches are gathered."""

import re
import zipfile
import zlib

import numpy

from chainer_bspmm.cuda.plans import LONG_ROW
from chainer_bspmm.dataset import dense_examples
from chainer_bspmm.dataset.batch_form import Form, kinds_of
from chainer_bspmm.dataset.labels import joined, padded, VaryingLabels
from chainer_bspmm.sparse import BatchedCSR, build, check

SYMMETRY_PART = 8192  # molecules whose symmetry is tested at once
INTEGERS = 'sizes', 'full_sizes', 'row_nnz', 'columns'
# Errors of a damaged archive; RuntimeError: a part seems to be encrypted.
DAMAGES = ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error
FIELDS = 'atoms', *INTEGERS, 'data', 'n_relations', 'labels'


class Molecules:
    """Atoms, adjacency and labels of M molecules; only :meth:`from_arrays` checks them.

    Args:
        atoms (array): (n_nodes,) int32 ids, or (n_nodes, channels) floating features.
        sizes (array): (M,) int64, number of nodes of every molecule.
        full_sizes (array): (M,) int64, the same with the data set's padding, which is not stored.
        row_nnz (array): (n_nodes,) int32, entries of every row of the adjacency.
        columns (array): (nnz,) int32, ``j * R + r`` of every entry, j counted in its molecule;
            entries of a row sorted by (r, j).
        data (array or None): (nnz,) floating values; None means all ones.
        n_relations (int): R.
        labels (list): for each column (M, ...), an array or `VaryingLabels`.
    """

    def __init__(self, atoms, sizes, full_sizes, row_nnz, columns, data, n_relations, labels):
        self.atoms = atoms
        self.sizes = sizes
        self.full_sizes = full_sizes
        self.row_nnz = row_nnz
        self.columns = columns
        self.data = data
        self.n_relations = n_relations
        self.labels = labels
        self.max_atom_id = int(atoms.max(initial=0)) if atoms.ndim == 1 else None
        # Tables for gathering, (M,) int64 each: sums over a data set may exceed 2**31.
        starts = build.starts_of(sizes)
        entry_starts = build.starts_of(row_nnz)[starts]
        self.starts = starts[:-1]
        self.entry_starts = entry_starts[:-1]
        self.nnz = numpy.diff(entry_starts)
        # These are computed when they are first read.
        self._symmetric = self._has_padding = self._is_padding = self._longest = None

    def __len__(self):
        return self.sizes.size

    def __reduce__(self):
        return Molecules, tuple(self.fields().values()), {'_is_padding': self._is_padding}

    def fields(self):
        """Return the arguments of the constructor by name."""
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def adjacency_nbytes(self):
        """Bytes of the adjacency of all molecules (int), tables for gathering included."""
        names = *INTEGERS, 'data', 'starts', 'entry_starts', 'nnz', 'symmetric'
        arrays = [getattr(self, name) for name in names]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def symmetric(self):
        """(M,) bool: whether the matrix of every relation equals its transpose."""
        if self._symmetric is None:
            self._symmetric = numpy.zeros(len(self), bool)
            # Part by part, because the test's tables are several times as large as the matrices.
            for first in range(0, len(self), SYMMETRY_PART):
                part = slice(first, first + SYMMETRY_PART)
                self._symmetric[part] = self._find_symmetry(part)
        return self._symmetric

    def _find_symmetry(self, part):
        sizes, nnz = self.sizes[part], self.nnz[part]
        starts, entry_starts = build.starts_of(sizes), build.starts_of(nnz)
        row_nnz = self.row_nnz[self.starts[part.start] :][: starts[-1]]
        entries = slice(
            self.entry_starts[part.start], self.entry_starts[part.start] + entry_starts[-1]
        )
        rows = numpy.repeat(numpy.arange(row_nnz.size), row_nnz)
        columns = self.columns[entries] + numpy.repeat(starts[:-1] * self.n_relations, nnz)
        data = None if self.data is None else self.data[entries]
        if self.n_relations > 1:
            differs = build.asymmetric(rows, columns, data, self.n_relations)
        else:
            _, _, order = build.transpose(numpy, build.starts_of(row_nnz), columns, row_nnz.size)
            differs = (rows[order] != columns) | (columns[order] != rows)
            if data is not None:
                differs |= data[order] != data
        until = build.starts_of(differs)
        return until[entry_starts[1:]] == until[entry_starts[:-1]]

    def is_symmetric(self, index):
        """Return whether all of these molecules, (n_graphs,) integers, are :attr:`symmetric`."""
        return bool(self.symmetric[index].all())

    @property
    def longest(self):
        """(M,) integers: upper bounds of the number of entries in a row or column of a molecule."""
        if self._longest is None:
            self._longest = self.nnz
            if self.nnz.max(initial=0) > LONG_ROW:
                self._longest = largest(self.row_nnz, self.starts, self.sizes)
                if not self.symmetric.all():
                    starts = self.starts * self.n_relations
                    columns = self.columns + numpy.repeat(starts, self.nnz)
                    counts = numpy.bincount(columns, minlength=self.row_nnz.size * self.n_relations)
                    of_column = largest(counts, starts, self.sizes)
                    self._longest = numpy.maximum(self._longest, of_column)
        return self._longest

    def near(self, device):
        """Return the molecules to gather from for batches on a device: these, for any device."""
        return self

    def item(self, i, column):
        """Return a column of example i: atoms with padding (0), the `BatchedCSR` (1) or a label."""
        if column > 1:
            return self.labels[column - 2][i]
        atoms, adj, _ = self.batch(numpy.array([i]), 'packed', keep_padding=True)
        return adj if column else atoms

    @property
    def has_padding(self):
        """Whether any molecule has padding."""
        if self._has_padding is None:
            self._has_padding = not numpy.array_equal(self.sizes, self.full_sizes)
        return self._has_padding

    @property
    def is_padding(self):
        """Whether trailing ids 0 must be padding.

        They must be if several molecules are all padded to one size, and no atom has id 0. The
        same holds for any molecules that were taken from such a data set.
        """
        if self._is_padding is None:
            self._is_padding = self._seem_padded()
        return self._is_padding

    def _seem_padded(self):
        sizes = self.full_sizes
        are_equal = len(self) != 1 and bool((sizes == sizes[:1]).all())
        return are_equal and bool(self.atoms.ndim != 1 or self.atoms.all())

    def padded_size(self, index, padded_to):
        """Return the size (int) to which a batch is padded: `padded_to`, or its largest size."""
        return int(self.full_sizes[index].max()) if padded_to is None else padded_to

    def form(self, n_graphs, is_symmetric, longest, layout, padded_to):
        """Return the `Form` of a batch."""
        atoms, data, labels = kinds_of(self.atoms, self.data, self.labels)
        return Form(
            n_graphs=n_graphs,
            n_relations=self.n_relations,
            is_symmetric=is_symmetric,
            atoms=atoms,
            data=data,
            labels=labels,
            longest=longest,
            layout=layout,
            padded_to=padded_to,
        )

    def batch(self, index, layout, padded_to=None, keep_padding=False):
        """Gather molecules into a batch: atoms, BatchedCSR and list of labels of `CSRConverter`.

        `index`: (n_graphs,) int64, at least one. With `keep_padding`, packed and folded molecules
        have rows for stored padding, too. ValueError: more than 2**31 - 1 columns or entries.
        """
        sizes, nnz = self.sizes[index], self.nnz[index]
        nodes = build.ranges(self.starts[index], sizes)
        entries = build.ranges(self.entry_starts[index], nnz)
        atoms = self.atoms.take(nodes, axis=0)
        row_nnz = self.row_nnz.take(nodes)

        max_atom_id = int(atoms.max(initial=0)) if atoms.ndim == 1 else None
        n = self.padded_size(index, padded_to)
        full = self.full_sizes[index] if keep_padding else sizes
        rows = build.rows_of(full, layout, n)
        if rows is not sizes:
            atoms, row_nnz = build.spread((atoms, row_nnz), sizes, rows)
        if layout == 'padded':
            atoms = atoms.reshape((index.size, rows[0]) + atoms.shape[1:])
        columns = self.columns.take(entries)
        adj = BatchedCSR._trusted(
            **build.block_diagonal(rows, row_nnz, nnz, columns, self.n_relations),
            data=None if self.data is None else self.data.take(entries),
            layout=layout,
            max_atom_id=max_atom_id,
            is_symmetric=self.is_symmetric(index),
            row_weights=build.row_weights(full, n) if layout == 'folded' else None,
            padded_to=padded_to,
        )
        return atoms, adj, [padded(label[index]) for label in self.labels]

    @classmethod
    def load(cls, path):
        """Read a file written by :meth:`save`; raise ValueError if any number in it is wrong."""
        text = '%s: expected the .npz file of a SparseDataset'
        try:
            file = numpy.load(path, allow_pickle=False)
        except DAMAGES as error:
            raise ValueError(text % path) from error
        if not isinstance(file, numpy.lib.npyio.NpzFile):
            raise ValueError(text % path)
        try:
            with file:
                return cls.from_arrays(file)
        except (*DAMAGES, OSError) as error:
            raise ValueError('%s: %s' % (path, error)) from None

    def save(self, path):
        """Write an ``.npz`` file without pickled objects."""
        numpy.savez(path, **self.arrays())

    @classmethod
    def from_arrays(cls, arrays):
        """Make molecules from the results of :meth:`arrays`; ValueError if any number is wrong."""
        names = set(arrays)
        n_labels = sum(name.startswith('label_') for name in names)
        expected = {'atoms', *INTEGERS, 'n_relations', *('label_%d' % i for i in range(n_labels))}
        shapes = {i: 'shapes_%d' % i for i in range(n_labels) if 'shapes_%d' % i in names}
        if names - {'data', 'is_padding', *shapes.values()} != expected:
            text = 'expected the arrays of a SparseDataset, got %s'
            raise ValueError(text % ', '.join(sorted(names)))
        arrays = {'data': None, **{name: arrays[name] for name in names}}
        for name, array in arrays.items():
            if isinstance(array, bytes):  # a member of the archive that is no .npy file
                raise ValueError('%s: expected an array, got a file of another kind' % name)
        is_padding = arrays.pop('is_padding', None)
        if is_padding is not None and (is_padding.shape or is_padding.dtype != bool):
            words = is_padding.dtype, is_padding.shape
            raise ValueError('is_padding: expected one bool, got %s of shape %s' % words)
        labels = [arrays.pop('label_%d' % i) for i in range(n_labels)]
        for i, name in shapes.items():
            labels[i] = VaryingLabels.from_arrays('label_%d' % i, labels[i], arrays.pop(name))
        if numpy.ndim(arrays['n_relations']):
            text = 'n_relations: expected one number, got shape %s'
            raise ValueError(text % (arrays['n_relations'].shape,))
        arrays['n_relations'] = int(arrays['n_relations'])
        _check(labels=labels, **arrays)
        dtypes = dict(zip(INTEGERS, (numpy.int64, numpy.int64, numpy.int32, numpy.int32)))
        if arrays['atoms'].ndim == 1:
            dtypes['atoms'] = numpy.int32
        for name, dtype in dtypes.items():
            arrays[name] = arrays[name].astype(dtype, copy=False)
        molecules = cls(labels=labels, **arrays)
        molecules._is_padding = None if is_padding is None else bool(is_padding)
        return molecules

    def arrays(self):
        """Return arrays by name, from which :meth:`from_arrays` makes the same molecules."""
        fields = self.fields()
        arrays = {}
        for i, label in enumerate(fields.pop('labels')):
            if isinstance(label, VaryingLabels):
                label, arrays['shapes_%d' % i] = label.arrays()
            arrays['label_%d' % i] = label
        arrays.update((name, array) for name, array in fields.items() if array is not None)
        if self._is_padding and not self._seem_padded():
            arrays['is_padding'] = numpy.True_
        return arrays

    def take(self, index):
        """Return a copy of the molecules at an index, (k,) int64."""
        nodes = build.ranges(self.starts[index], self.sizes[index])
        entries = build.ranges(self.entry_starts[index], self.nnz[index])
        taken = Molecules(
            atoms=self.atoms[nodes],
            sizes=self.sizes[index],
            full_sizes=self.full_sizes[index],
            row_nnz=self.row_nnz[nodes],
            columns=self.columns[entries],
            data=None if self.data is None else self.data[entries],
            n_relations=self.n_relations,
            labels=[label[index] for label in self.labels],
        )
        taken._is_padding = self.is_padding or None  # a part may be certain where the whole is not
        return taken

    @classmethod
    def from_examples(cls, examples, name='batch', first=0, strip=True, as_dense=True):
        """Make molecules, without labels, from the examples that `dense_examples.gather` returns.

        `strip`: trailing atoms of id 0 that have no entry in row or column are padding. Examples
        with SciPy matrices have no padding, because upstream pads only arrays. `as_dense`: see
        `build.entries_of`. Errors name example i `name[first + i]`.
        """
        try:
            entries = build.entries_of(examples.matrices, as_dense)
        except (TypeError, ValueError) as error:
            # The examples may be a part of a data set, which begins at `first`.
            text = re.sub(
                r'matrices\[(\d+)\]',
                lambda found: '%s[%d][1]' % (name, first + int(found[1])),
                str(error),
            )
            raise type(error)(text) from None
        atoms = dense_examples.join_atoms(examples.atoms, name, first)
        row_nnz, columns = (
            array.astype(numpy.int32) for array in (entries.row_nnz, entries.columns)
        )
        sizes = full_sizes = entries.sizes
        if strip and atoms.ndim == 1 and isinstance(examples.matrices[0], numpy.ndarray):
            starts = build.starts_of(sizes)
            if not atoms[starts[1:][sizes > 0] - 1].all():
                # Id 0 alone does not mark padding: it is RDKit's atomic number of a dummy atom.
                is_used = (atoms != 0) | (row_nnz != 0)
                nodes = columns // entries.n_relations
                is_used[nodes + numpy.repeat(starts[:-1], entries.nnz)] = True
                position = numpy.arange(1, atoms.size + 1) - numpy.repeat(starts[:-1], sizes)
                sizes = largest(position * is_used, starts[:-1], sizes)
                is_kept = position <= numpy.repeat(sizes, full_sizes)
                atoms, row_nnz = atoms[is_kept], row_nnz[is_kept]
        molecules = cls(
            atoms=atoms,
            sizes=sizes,
            full_sizes=full_sizes,
            row_nnz=row_nnz,
            columns=columns,
            data=entries.data,
            n_relations=entries.n_relations,
            labels=[],
        )
        molecules._symmetric = entries.symmetric
        return molecules

    def _kind(self):
        """Describe the properties that molecules must share to be joined."""
        return '%d relations, %s atoms of shape (n%s), labels of %s dimensions' % (
            self.n_relations,
            'integer' if self.atoms.dtype.kind == 'i' else 'floating',
            ''.join(', %d' % n for n in self.atoms.shape[1:]),
            [label.ndim - 1 for label in self.labels],
        )

    @classmethod
    def concatenate(cls, parts):
        """Join parts, which must agree in relations, kind of atoms and dimensions of labels."""
        kinds = {part._kind() for part in parts}
        if len(kinds) > 1:
            text = 'expected the same relations, features and labels throughout, got %s'
            raise ValueError(text % ' and '.join(sorted(kinds)))
        columns = {
            name: numpy.concatenate([getattr(part, name) for part in parts])
            for name in ('atoms', *INTEGERS)
        }
        data = None
        if any(part.data is not None for part in parts):
            data = numpy.concatenate(
                [
                    numpy.ones(part.columns.size, 'f') if part.data is None else part.data
                    for part in parts
                ]
            )
        molecules = cls(
            data=data,
            n_relations=parts[0].n_relations,
            labels=list(map(joined, zip(*[part.labels for part in parts]))),
            **columns,
        )
        if all(part._symmetric is not None for part in parts):
            molecules._symmetric = numpy.concatenate([part._symmetric for part in parts])
        if all(part._is_padding for part in parts):
            sizes = molecules.full_sizes
            molecules._is_padding = bool((sizes == sizes[:1]).all())
        return molecules


def _check(atoms, sizes, full_sizes, row_nnz, columns, data, n_relations, labels):
    """Raise ValueError where arrays from a file are not molecules."""
    if n_relations < 1:
        raise ValueError('n_relations: expected at least 1, got %d' % n_relations)
    _check_array('sizes', sizes, 'integers', least=0)
    _check_array('full_sizes', full_sizes, 'integers', 'the length of sizes', sizes.size, sizes)
    _check_array('row_nnz', row_nnz, 'integers', 'the sum of sizes', sizes.sum(), 0)
    _check_array('columns', columns, 'integers', 'the sum of row_nnz', row_nnz.sum(), 0)
    kind, least = ('integers', 0) if atoms.ndim == 1 else ('floats', None)
    _check_array('atoms', atoms, kind, 'the sum of sizes', sizes.sum(), least, (1, 2))
    if data is not None:
        _check_array('data', data, 'floats', 'the length of columns', columns.size)
    for i, label in enumerate(labels):
        _check_array('label_%d' % i, label, None, 'the length of sizes', sizes.size)
    widths = numpy.repeat(numpy.repeat(sizes.astype(numpy.int64) * n_relations, sizes), row_nnz)
    if (columns >= widths).any():
        i = int((columns >= widths).argmax())
        raise ValueError(
            'columns: expected less than %d, relations times the nodes of the '
            'molecule, at position %d, got %d' % (widths[i], i, columns[i])
        )


def _check_array(name, array, kind, what='', length=None, least=None, ndims=(1,)):
    if kind and (array.dtype.kind != kind[0] or array.ndim not in ndims):
        words = name, kind, ' or '.join(map(str, ndims)), array.dtype, array.shape
        raise ValueError('%s: expected %s of %s dimensions, got %s of shape %s' % words)
    if not array.ndim:
        raise ValueError('%s: expected an array, got a single value' % name)
    if length is not None and len(array) != length:
        raise ValueError('%s: expected %d items, %s, got %d' % (name, length, what, len(array)))
    if least is not None and (array < least).any():
        i = int((array < least).argmax())
        text = '%s: expected at least %d at position %d, got %d'
        raise ValueError(text % (name, numpy.broadcast_to(least, array.shape)[i], i, array[i]))
    if name in ('atoms', 'columns') and array.dtype.kind == 'i':
        check.fits_int32(name, int(array.max(initial=0)))


def largest(values, starts, sizes):
    """Return the largest value of every molecule, (M,), 0 for a molecule without nodes."""
    results = numpy.zeros(sizes.size, values.dtype)
    used = numpy.flatnonzero(sizes)
    if used.size:
        results[used] = numpy.maximum.reduceat(values, starts[used])
    return results
