"""Dense examples of Chainer Chemistry: check them, find node columns and padding."""

import collections
import operator

from chainer_chemistry.dataset.graph_dataset.base_graph_data import BaseGraphData
import numpy

from chainer_bspmm.sparse import BatchedCSR, check
from chainer_bspmm.sparse.build import all_to_host

_shape = operator.attrgetter('shape')

# atoms: for every molecule (n,) integer ids or (n, channels) features, on the host; full_sizes: the
# number of its nodes, padding included; matrices: its adjacency; labels: one tuple per column.
Examples = collections.namedtuple('Examples', 'atoms full_sizes matrices labels')


def check_sequence(name, examples):
    """Check that examples have a length and can be indexed."""
    if not hasattr(examples, '__len__') or not hasattr(examples, '__getitem__'):
        raise TypeError('%s: expected a sequence, got %s' % (name, type(examples).__name__))


def gather(examples, name='batch', first=0):
    """Check examples, called ``name[first]`` and so on in errors, and collect them by column."""
    columns = _columns(examples, name, first)
    atoms, matrices = _molecules(columns[0], columns[1], name, first)
    return Examples(atoms, list(map(len, atoms)), matrices, columns[2:])


def join_atoms(atoms, name='batch', first=0):
    """Return the atoms of all molecules as one array: (n_nodes,) int32, or (n_nodes, channels)."""
    if atoms[0].ndim > 1:
        widths = [array.shape[1] for array in atoms]
        if len(set(widths)) > 1:
            i = next(i for i, width in enumerate(widths) if width != widths[0])
            text = '%s[%d][0]: expected %d channels as in %s[%d], got %d'
            raise ValueError(text % (name, first + i, widths[0], name, first, widths[i]))
    flat = numpy.concatenate(atoms)
    if flat.dtype.kind in 'iu':
        check.fits_int32('atom ids', int(flat.max(initial=0)))
        if flat.min(initial=0) < 0:
            ends = numpy.cumsum(list(map(len, atoms)))
            graph = int(numpy.searchsorted(ends, flat.argmin(), side='right'))
            text = '%s[%d][0]: expected atom ids of at least 0, got %d'
            raise ValueError(text % (name, first + graph, flat.min()))
        flat = flat.astype(numpy.int32, copy=False)
    return flat


def count_node_columns(examples, last_too=False):
    """Count the leading columns of labels that have a row for each atom.

    If all molecules have one size, a label of a molecule may have as many rows by chance. Then a
    column counts only if it consists of one-dimensional integer arrays, and if the last batch of
    molecules that differed in size has not shown that labels of this shape belong to molecules.
    Then the last column, and any column if molecules have one atom, count only with `last_too`.
    """
    one_size = len(set(examples.full_sizes)) == 1
    for i, column in enumerate(examples.labels):
        shapes = [getattr(value, 'shape', ()) for value in column]
        kind = (i, shapes[0], getattr(column[0], 'dtype', None))
        width = shapes[0][1:]
        if any(shape != (n, *width) for shape, n in zip(shapes, examples.full_sizes)):
            if not one_size:
                _of_molecules.update((i, shape, kind[2]) for shape in set(shapes))
            return i
        if one_size and (
            any(values.ndim != 1 or values.dtype.kind not in 'iu' for values in column)
            or (not last_too and (i == len(examples.labels) - 1 or examples.full_sizes[0] == 1))
            or kind in _of_molecules
        ):
            return i
        if not one_size:  # this is a node column, so labels on record are of another data set
            # Another thread may add to the set meanwhile, so a copy is searched.
            _of_molecules.difference_update(
                [other for other in _of_molecules.copy() if (i, kind[2]) == (other[0], other[2])]
            )
    return len(examples.labels)


# (column, shape, dtype) of labels that were seen to belong to molecules.
_of_molecules: set[tuple] = set()


def refuse_loss(sizes, full_sizes, n_rows):
    """Raise ValueError if a molecule would lose rows that may be atoms; it keeps at least `n_rows`.

    `sizes`: numbers of rows without trailing padding; `full_sizes`: with it.
    """
    lost = numpy.asarray(full_sizes) - numpy.maximum(sizes, n_rows)
    if (lost > 0).any():
        i = int((lost > 0).argmax())
        raise ValueError(
            'strip_padding: expected True or False for this data set, got None: batch[%d] would '
            'lose the last %d of its %d atoms, which have id 0 and no bond. They may be atoms, '
            'not padding: the batch is one molecule, or molecules differ in size, or other atoms '
            'have id 0, too. strip_padding=True drops such atoms, strip_padding=False keeps them'
            % (i, lost[i], full_sizes[i])
        )


def _columns(examples, name, first):
    if not examples:
        raise ValueError('%s: expected at least one example, got none' % name)
    kinds = list(map(type, examples))
    for kind in dict.fromkeys(kinds):  # in order: the first wrong one is named
        if not issubclass(kind, tuple):
            hint = '; dataset.to_sparse takes these' * issubclass(kind, BaseGraphData)
            words = name, first + kinds.index(kind), kind.__name__, hint
            raise TypeError('%s[%d]: expected a tuple (atoms, adj, label...), got %s%s' % words)
    n_columns = max(len(examples[0]), 2)
    if set(map(len, examples)) != {n_columns}:
        i, example = next((i, e) for i, e in enumerate(examples) if len(e) != n_columns)
        text = '%s[%d]: expected a tuple (atoms, adj, label...) of %d elements, got %d'
        raise ValueError(text % (name, first + i, n_columns, len(example)))
    return list(zip(*examples))


def _molecules(atoms, matrices, name, first):
    """Check that atoms and adjacency agree; return both, on the host."""
    kinds = {*map(type, atoms), *map(type, matrices)}
    if BatchedCSR in kinds:
        # Examples of a sparse data set that were modified: rare, so they are converted one by one.
        matrices = [
            matrix.to_dense()[0] if isinstance(matrix, BatchedCSR) else matrix
            for matrix in matrices
        ]
    pairs = set(zip(map(_shape, atoms), map(_shape, matrices))) if kinds == {numpy.ndarray} else ()
    if not pairs or any(shape[-2:] != ids[:1] * 2 for ids, shape in pairs):
        _check_each(atoms, matrices, name, first)
    dtypes = set(map(operator.attrgetter('dtype'), atoms))
    kinds = {'id' if dtype.kind in 'iu' else dtype.kind for dtype in dtypes}
    if (kinds, set(map(operator.attrgetter('ndim'), atoms))) not in (({'id'}, {1}), ({'f'}, {2})):
        got = ', '.join(sorted({'%s of %d dimensions' % (a.dtype, a.ndim) for a in atoms}))
        raise ValueError(
            '%s: expected (n,) integer atom ids, or (n, channels) floating features, throughout, '
            'got %s' % (name, got)
        )
    return all_to_host(atoms), all_to_host(matrices)


def _check_each(atoms, matrices, name, first):
    """Raise for the first example whose atoms and adjacency do not agree."""
    for i, (ids, matrix) in enumerate(zip(atoms, matrices)):
        for part in matrix if isinstance(matrix, list) else [matrix]:
            if not hasattr(ids, 'dtype') or not hasattr(part, 'shape'):
                text = '%s[%d]: expected arrays of atoms and adjacency, got %s and %s'
                raise TypeError(text % (name, first + i, type(ids).__name__, type(part).__name__))
            if part.shape[-2:] != ids.shape[:1] * 2:
                raise ValueError(
                    '%s[%d]: expected a row and a column of the adjacency for each '
                    'atom, got atoms of shape %s and adjacency of shape %s'
                    % (name, first + i, ids.shape, part.shape)
                )
