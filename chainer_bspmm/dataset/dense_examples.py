"""Dense examples of Chainer Chemistry: check them, remove padding, stack labels."""

import collections

import numpy

from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import validate
from chainer_bspmm.sparse.build import to_host

# atoms: (n_nodes,) int32 ids or (n_nodes, channels) features; sizes, full_sizes: nodes of every
# molecule without and with padding; matrices: the adjacency of each; labels: one tuple per column.
Examples = collections.namedtuple('Examples', 'atoms sizes full_sizes matrices labels')


def gather(examples, strip, name='batch', first=0):
    """Check examples ``(atoms, adj, label...)`` and collect them by column.

    Args:
        examples (list): see `CSRConverter`.
        strip (bool): whether to remove padding.
        name (str), first (int): errors call the examples ``name[first]`` and so on.

    Returns:
        Examples: on the host.
    """
    columns = _columns(examples, name, first)
    full_sizes, atoms, matrices = _molecules(columns[0], columns[1], strip, name, first)
    flat = numpy.concatenate(atoms)
    if flat.dtype.kind in 'iu':
        validate.fits_int32('atom ids', int(flat.max(initial=0)))
        if flat.min(initial=0) < 0:
            ends = numpy.cumsum(list(map(len, atoms)))
            graph = int(numpy.searchsorted(ends, flat.argmin(), side='right'))
            raise ValueError(
                '%s[%d][0]: expected atom ids of at least 0, got %d'
                % (name, first + graph, flat.min())
            )
        flat = flat.astype(numpy.int32, copy=False)
    return Examples(flat, list(map(len, atoms)), full_sizes, matrices, columns[2:])


def stack(column, name, position, sizes=None):
    """Return the labels of all examples as one array, (n_examples, ...).

    `sizes` are the molecules' numbers of atoms: an error suggests `n_node_columns` where the
    labels have as many rows.
    """
    try:
        stacked = numpy.array([to_host(label) for label in column])
    except ValueError:
        stacked = None
    if stacked is None or stacked.dtype.kind not in 'biuf':
        kinds = sorted(
            {
                '%s %s' % (getattr(label, 'dtype', type(label).__name__), numpy.shape(label))
                for label in map(to_host, column)
            }
        )
        hint = ''
        if sizes is not None and [numpy.shape(label)[:1] for label in column] == [
            (n,) for n in sizes
        ]:
            hint = '; for one row per atom use CSRConverter(n_node_columns=%d)' % (position - 1)
        raise ValueError(
            '%s[...][%d]: expected labels of one shape, got %s%s'
            % (name, position, ', '.join(kinds), hint)
        )
    return stacked


def _columns(examples, name, first):
    if not examples:
        raise ValueError('%s: expected at least one example, got none' % name)
    for i, example in enumerate(examples):
        if not isinstance(example, tuple):
            raise TypeError(
                '%s[%d]: expected a tuple (atoms, adj, label...), got %s'
                % (name, first + i, type(example).__name__)
            )
    n_columns = max(len(examples[0]), 2)
    if set(map(len, examples)) != {n_columns}:
        i, example = next((i, e) for i, e in enumerate(examples) if len(e) != n_columns)
        raise ValueError(
            '%s[%d]: expected a tuple (atoms, adj, label...) of %d elements, '
            'got %d' % (name, first + i, n_columns, len(example))
        )
    return list(zip(*examples))


def _molecules(atoms, matrices, strip, name, first):
    """Check that atoms and adjacency agree, remove padding, return sizes, atoms, matrices."""
    # Examples of a sparse data set that were modified: rare, so they are converted one at a time.
    matrices = [
        matrix.to_dense()[0] if isinstance(matrix, BatchedCSR) else matrix for matrix in matrices
    ]
    for i, (ids, matrix) in enumerate(zip(atoms, matrices)):
        if not hasattr(ids, 'dtype') or not hasattr(matrix, 'shape'):
            raise TypeError(
                '%s[%d]: expected arrays of atoms and adjacency, got %s and %s'
                % (name, first + i, type(ids).__name__, type(matrix).__name__)
            )
        if matrix.shape[-2:] != ids.shape[:1] * 2:
            raise ValueError(
                '%s[%d]: expected a row and a column of the adjacency for each '
                'atom, got atoms of shape %s and adjacency of shape %s'
                % (name, first + i, ids.shape, matrix.shape)
            )
    kinds = {('id' if ids.dtype.kind in 'iu' else ids.dtype.kind, ids.ndim) for ids in atoms}
    if kinds != {('id', 1)} and kinds != {('f', 2)}:
        raise ValueError(
            '%s: expected (n,) integer atom ids, or (n, channels) floating '
            'features, throughout, got %s'
            % (name, ', '.join(sorted({'%s of %d dimensions' % (a.dtype, a.ndim) for a in atoms})))
        )
    sizes = list(map(len, atoms))
    atoms = [to_host(ids) for ids in atoms]
    if strip and atoms[0].ndim == 1:
        for i, ids in enumerate(atoms):
            if ids.size and not ids[-1]:
                matrices[i] = to_host(matrices[i])
                n = _used(ids, matrices[i])
                atoms[i], matrices[i] = ids[:n], matrices[i][..., :n, :n]
    return sizes, atoms, matrices


def _used(ids, matrix):
    """Return the number of nodes without trailing padding: id 0, no entry in row or column.

    Id 0 alone does not mean padding: it is also RDKit's atomic number of a dummy atom.
    """
    if not isinstance(matrix, numpy.ndarray):
        return len(ids)
    bonds = (matrix != 0).reshape(-1, len(ids), len(ids)).any(axis=0)
    used = numpy.flatnonzero((ids != 0) | bonds.any(axis=0) | bonds.any(axis=1))
    return int(used[-1]) + 1 if used.size else 0
