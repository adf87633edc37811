"""Construction of the containers: gathering matrices into one CSR, sorting entries."""

import collections

import numpy
import scipy.sparse

from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans
from chainer_bspmm.sparse import check

MANY_KEYS = 1000  # keys from which SciPy's counting sort is faster, despite its slow start

# Ways in which a kernel finds the value of an entry (WEIGHTS); see kernels/bspmm_csr.cu.
ONES, DATA, ORDERED = 0, 1, 2


def values_of(adj, data=None, trans=False):
    """Return a kernel's WEIGHTS, values and order of the values; the last two may be None.

    The values are `data`. If it is None, they are the matrix's, or with `trans` its transpose's.
    """
    if data is not None:
        return (ORDERED, data, adj.transpose_order) if trans else (DATA, data, None)
    data = (adj.T if trans else adj).data
    return (ONES, None, None) if data is None else (DATA, data, None)


def to_host(array):
    """Copy a CuPy array to the host, return anything else as it is; faster than ``to_cpu``."""
    return array.get() if isinstance(array, cuda.ndarray) else array


def all_to_host(arrays):
    """Return :func:`to_host` of every array, quickly if none has to be copied."""
    if any(issubclass(kind, cuda.ndarray) for kind in set(map(type, arrays))):
        return list(map(to_host, arrays))
    return arrays


def entry_rows(xp, indptr, nnz, has_spare=False):
    """Return the row of every entry, (nnz,) int32; 0 for spare ones, past ``indptr[-1]``."""
    if xp is numpy:
        rows = numpy.repeat(numpy.arange(indptr.size - 1, dtype=numpy.int32), numpy.diff(indptr))
        return numpy.pad(rows, (0, nnz - rows.size)) if has_spare else rows
    rows = (xp.searchsorted(indptr, xp.arange(nnz, dtype=indptr.dtype), side='right') - 1).astype(
        numpy.int32
    )
    return rows * (rows < indptr.size - 1) if has_spare else rows


def group(xp, keys, n_groups):
    """Group entries by integer keys from 0 to n_groups; return starts of groups, and an order.

    Both are int32. Entries with the same key keep their order.
    """
    nnz = keys.size
    if xp is numpy and nnz >= MANY_KEYS:
        starts, order, _ = transpose(numpy, numpy.arange(nnz + 1), keys, n_groups + 1)
        return starts[:-1], order
    # Keys are made unique, so that the order is fixed even if the device's sort is not stable.
    order = xp.argsort(keys.astype(numpy.int64) * max(nnz, 1) + xp.arange(nnz)).astype(numpy.int32)
    starts = xp.searchsorted(keys[order], xp.arange(n_groups + 1, dtype=numpy.int32))
    return starts.astype(numpy.int32), order


def transpose(xp, indptr, indices, n_cols, has_spare=False):
    """Return the transpose's indptr (n_cols + 1,), indices (nnz,) and order (nnz,).

    Entry k of the transpose is entry ``order[k]`` of the matrix. Entries of one column keep their
    order. Spare entries, past ``indptr[-1]``, stay where they are, with index 0.
    """
    nnz = indices.size
    if xp is numpy:
        pattern = scipy.sparse.csr_matrix(
            (numpy.arange(nnz, dtype=numpy.int32), indices, indptr), shape=(indptr.size - 1, n_cols)
        ).tocsc()
        if not has_spare:
            return pattern.indptr, pattern.indices, pattern.data
        spare = numpy.arange(pattern.nnz, nnz, dtype=numpy.int32)
        return (
            pattern.indptr,
            numpy.pad(pattern.indices, (0, spare.size)),
            numpy.concatenate([pattern.data, spare]),
        )
    if has_spare:  # spare entries are treated as if they were in a column past the last one
        indices = xp.where(xp.arange(nnz) < indptr[-1], indices, numpy.int32(n_cols))
    starts, order = group(xp, indices, n_cols)
    return starts, entry_rows(xp, indptr, nnz, has_spare)[order], order


# The default limit of a block on every GPU, 48 KB, minus the kernel's static shared memory.
TRANSPOSE_SHARED_BYTES = 47 * 1024
TRANSPOSE_ENTRIES = 128  # entries of the largest graph per warp of a block


@plans.kept
def transpose_launch(n_graphs, max_cols, max_nnz) -> plans.Launch:
    """Plan transpose_csr: a block per graph; return None if the largest graph does not fit."""
    warps = 1
    while warps < plans.WARP and warps * TRANSPOSE_ENTRIES < max_nnz:
        warps *= 2
    while warps > 1 and (max_nnz + warps * max_cols) * 4 > TRANSPOSE_SHARED_BYTES:
        warps //= 2
    shared_bytes = (max_nnz + warps * max_cols) * 4
    if not n_graphs or shared_bytes > TRANSPOSE_SHARED_BYTES:
        return None
    return plans.Launch(
        (('VECTOR', 1),), (n_graphs, 1, 1), (warps * plans.WARP, 1, 1), shared_bytes
    )


def transpose_batch(adj):
    """Return :func:`transpose` of a `BatchedCSR`, on a GPU in one launch if graphs are small."""
    plan = None
    if launch.on_gpu(adj.indptr):
        plan = transpose_launch(adj.n_graphs, adj.max_cols, adj.max_nnz)
    if plan is None:
        return transpose(adj.xp, adj.indptr, adj.indices, adj.n_cols, adj.has_spare)
    with launch.device_of(adj.indptr):
        indptr, indices, order = (
            cuda.cupy.empty(size, numpy.int32) for size in (adj.n_cols + 1, adj.nnz, adj.nnz)
        )
        tables = adj.row_offsets, adj.col_offsets, indptr, indices, order
        sizes = numpy.int32(adj.n_cols), numpy.int32(adj.nnz)
        launch.run(
            'transpose_csr', indptr, plan, adj.indptr, adj.indices, *tables, *sizes, storage='f'
        )
    return indptr, indices, order


def asymmetric(rows, columns, data, n_relations):
    """Compare graphs with their transposes: return (nnz,) bool, all False in a symmetric graph.

    Entries are ``(i, j * R + r)``, where i and j have the same numbering, sorted by i. A graph is
    symmetric if its matrix of every relation is.
    """
    rows = rows.astype(numpy.int64)
    columns, relations = numpy.divmod(columns.astype(numpy.int64), n_relations)
    n_nodes = max(rows.max(initial=0), columns.max(initial=0)) + 1
    places = (rows * n_relations + relations) * n_nodes + columns
    mirrored = (columns * n_relations + relations) * n_nodes + rows
    if data is None:
        is_sorted = (places[1:] >= places[:-1]).all()
        return (places if is_sorted else numpy.sort(places)) != numpy.sort(mirrored)
    order, other = numpy.lexsort((data, places)), numpy.lexsort((data, mirrored))
    return (places[order] != mirrored[other]) | (data[order] != data[other])


# Result of relation_rows: the arrays of the new matrix. `transposed_data` are the values of its
# transpose in the same order if there are `reciprocals`, else None.
RelationRows = collections.namedtuple(
    'RelationRows', 'indptr indices data row_offsets col_offsets transposed_data'
)


def relation_rows(adj, reciprocals=None):
    """Return the `RelationRows` of a matrix, for ``sparse.relations.relation_rows``.

    If `reciprocals` is a dtype, the values are made for ``sparse.relations.scaled_by_source``.
    """
    if not launch.on_gpu(adj.indptr):
        n_relations = adj.n_relations
        rows = entry_rows(numpy, adj.indptr, adj.nnz, adj.has_spare).astype(numpy.int64)
        places = rows * n_relations + adj.indices % n_relations
        n_places = adj.n_rows * n_relations
        places[int(adj.indptr[-1]) :] = n_places  # spare entries come after all others
        starts, order = group(numpy, places, n_places)
        return RelationRows(
            indptr=starts,
            indices=adj.indices[order] // n_relations,
            data=None if adj.data is None else adj.data[order],
            row_offsets=adj.row_offsets * n_relations,
            col_offsets=adj.col_offsets // n_relations,
            transposed_data=None,
        )
    dtype = adj.dtype if reciprocals is None else reciprocals
    with launch.device_of(adj.indptr):
        n_offsets = adj.row_offsets.size
        sizes = adj.n_rows * adj.n_relations + 1, adj.nnz, n_offsets, n_offsets
        indptr, indices, *offsets = (cuda.cupy.empty(size, numpy.int32) for size in sizes)
        data = None if dtype is None else cuda.cupy.empty(adj.nnz, dtype)
        transposed = None if reciprocals is None else cuda.cupy.empty(adj.nnz, dtype)
        given = adj.indptr, adj.indices, adj.data, adj.row_offsets, adj.col_offsets
        made = indptr, indices, data, transposed, *offsets
        counts = map(numpy.int32, (adj.n_rows, adj.nnz, adj.n_relations, n_offsets))
        plan = plans.row_threads(max(adj.n_rows, 1))
        storage = 'f' if dtype is None else dtype.char
        values = 'NONE' if dtype is None else 'RECIPROCALS' if reciprocals else 'GIVEN'
        launch.run(
            'relation_rows', indptr, plan, *given, *made, *counts, storage=storage, VALUES=values
        )
    return RelationRows(indptr, indices, data, *offsets, transposed_data=transposed)


def launch_degree_rows(adj, n_types, dtype):
    """Return indptr and data for a layer, and indptr, indices and data for its gradient."""
    with launch.device_of(adj.indptr):
        indptr, t_indptr = (
            cuda.cupy.empty(adj.n_rows * n_types + 1, numpy.int32) for _ in range(2)
        )
        t_indices = cuda.cupy.empty(adj.nnz, numpy.int32)
        data, t_data = (cuda.cupy.empty(adj.nnz, dtype) for _ in range(2))
        weights, values, _ = values_of(adj)
        plan = plans.row_threads(max(adj.n_rows, 1))
        results = indptr, data, t_indptr, t_indices, t_data
        sizes = map(numpy.int32, (adj.n_rows, adj.nnz))
        table = adj.indptr, adj.indices, values
        launch.run(
            'degree_rows', data, plan, *table, *results, *sizes, RELATIONS=n_types, WEIGHTED=weights
        )
    return results


# The entries of matrices, one per graph.
# sizes, nnz: (n_graphs,) int64, number of nodes and of entries of every graph.
# row_nnz: (n_nodes,), number of entries of every row.
# columns: (nnz,), j * R + r of every entry; j is counted from 0 in every graph.
# data: (nnz,), or None for ones.
# symmetric: (n_graphs,) bool, or None if it is not known.
Entries = collections.namedtuple('Entries', 'sizes nnz row_nnz columns data n_relations symmetric')


def from_matrices(matrices, layout, padded_to=None):
    """Gather host matrices, one per graph, into the fields of a `BatchedCSR`."""
    entries = entries_of(matrices)
    sizes, row_nnz = entries.sizes, entries.row_nnz
    rows = rows_of(sizes, layout, sizes.max())
    check.fits_int32('nodes times relations', int(rows.sum()) * entries.n_relations)
    if rows is not sizes:
        (row_nnz,) = spread([row_nnz], sizes, rows)
    weights = None
    if layout == 'folded':
        weights = row_weights(sizes, sizes.max() if padded_to is None else padded_to)
    return {
        **block_diagonal(rows, row_nnz, entries.nnz, entries.columns, entries.n_relations),
        'data': entries.data,
        'is_symmetric': None if entries.symmetric is None else bool(entries.symmetric.all()),
        'row_weights': weights,
        'padded_to': padded_to,
    }


def block_diagonal(rows, row_nnz, nnz, columns, n_relations):
    """Return the tables of a batch by name; `rows` are the numbers of rows of the graphs.

    All other arguments are as in `Entries`.
    """
    row_offsets = starts_of(rows)
    check.fits_int32('nodes times relations', int(row_offsets[-1]) * n_relations)
    check.fits_int32('non-zeros', columns.size)
    row_offsets = row_offsets.astype(numpy.int32)
    col_offsets = row_offsets * numpy.int32(n_relations)
    indptr = numpy.zeros(row_nnz.size + 1, numpy.int32)
    # Without `dtype` NumPy would add in int64 and then copy.
    numpy.cumsum(row_nnz, dtype=numpy.int32, out=indptr[1:])
    return {
        'indptr': indptr,
        'indices': columns.astype(numpy.int32, copy=False) + numpy.repeat(col_offsets[:-1], nnz),
        'row_offsets': row_offsets,
        'col_offsets': col_offsets,
        'n_relations': n_relations,
    }


def entries_of(matrices, as_dense=False):
    """Return the `Entries` of host matrices; in a row they are sorted by relation, then column.

    `as_dense`: entries that a SciPy matrix stores at one place are added up, and stored zeros are
    left out, so that the result is that of the dense matrix.
    """
    if not matrices:
        raise ValueError('matrices: expected at least one matrix, got an empty sequence')
    kinds = set(map(type, matrices))
    if all(issubclass(kind, numpy.ndarray) for kind in kinds):
        if kinds != {numpy.ndarray}:  # such as a numpy.matrix, which stays a matrix when ravelled
            matrices = list(map(numpy.asarray, matrices))
        return _of_arrays(matrices)
    return _of_scipy(matrices, as_dense)


def _of_arrays(matrices):
    n_relations, sizes, dtype = check.dense_matrices(matrices)
    flat = numpy.concatenate([matrix.ravel() for matrix in matrices])
    place = numpy.flatnonzero(flat != 0)  # NaN counts as a value, because NaN != 0
    starts = starts_of(sizes * sizes * n_relations)
    entry_starts = numpy.searchsorted(place, starts)
    nnz = numpy.diff(entry_starts)
    size = numpy.repeat(sizes, nnz)
    data = flat[place]
    rest, column = numpy.divmod(place - numpy.repeat(starts[:-1], nnz), size)
    relation, row = (0, rest) if n_relations == 1 else numpy.divmod(rest, size)
    differs = starts_of(flat[place + (column - row) * (size - 1)] != data)
    row += numpy.repeat(starts_of(sizes)[:-1], nnz)
    n_rows = int(sizes.sum())
    columns = column * n_relations + relation
    data = data.astype(dtype, copy=False)
    if n_relations > 1:  # entries are sorted by (graph, relation, row, column)
        # NumPy sorts integers of 16 bits in linear time.
        order = numpy.argsort(row.astype(numpy.min_scalar_type(n_rows)), kind='stable')
        columns, data = columns[order], data[order]
    return Entries(
        sizes=sizes,
        nnz=nnz,
        row_nnz=numpy.bincount(row, minlength=n_rows),
        columns=columns,
        data=None if (data == 1).all() else data,
        n_relations=n_relations,
        symmetric=differs[entry_starts[1:]] == differs[entry_starts[:-1]],
    )


def _without_duplicates(part):
    """Return a copy of a matrix of bools with one entry at each place, True if any of them is."""
    part = part.copy()
    part.sum_duplicates()
    return part


def _as_dense(indptr, columns, data, dtype):
    """Add up the entries at one place, and leave out zeros."""
    n_rows = indptr.size - 1
    rows = numpy.repeat(numpy.arange(n_rows), numpy.diff(indptr))
    is_first = numpy.ones(columns.size, bool)  # of the entries at its place
    is_first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    if not is_first.all():
        data = numpy.ones(columns.size, dtype) if data is None else data
        data = numpy.add.reduceat(data, numpy.flatnonzero(is_first))
        rows, columns = rows[is_first], columns[is_first]
    if data is not None:
        is_kept = data != 0
        rows, columns, data = rows[is_kept], columns[is_kept], data[is_kept]
        data = None if (data == 1).all() else data
    return starts_of(numpy.bincount(rows, minlength=n_rows)), columns, data


def _of_scipy(matrices, as_dense):
    n_relations, sizes, stacks, dtype = check.sparse_matrices(matrices)
    starts = starts_of(sizes)
    n_rows = int(starts[-1])
    check.fits_int32('nodes times relations', n_rows * n_relations)
    # All parts form one matrix: a graph has the columns of its first relation, then of its second.
    parts = [matrix.tocoo() for stack in stacks for matrix in stack]
    if as_dense:
        parts = [_without_duplicates(part) if part.dtype == bool else part for part in parts]
    first_rows = numpy.repeat(starts[:-1], n_relations).tolist()
    first_columns = starts_of(numpy.repeat(sizes, n_relations)).tolist()
    rows = numpy.concatenate([part.row + n for part, n in zip(parts, first_rows)])
    columns = numpy.concatenate([part.col + n for part, n in zip(parts, first_columns)])
    data = numpy.concatenate([part.data for part in parts]).astype(dtype, copy=False)
    check.fits_int32('non-zeros', data.size)
    del parts
    if (data == 1).all():
        data = None
    # Two counting sorts, which move the values along, sort entries by row, then column. Entries at
    # the same place keep their order.
    values = numpy.zeros(rows.size, 'i1') if data is None else data.view('i%d' % data.itemsize)
    matrix = scipy.sparse.coo_matrix((values, (rows, columns)), (n_rows, n_rows * n_relations))
    matrix.has_canonical_format = True  # else SciPy would add up entries at the same place
    matrix = matrix.tocsc().tocsr()
    indptr, columns = matrix.indptr, matrix.indices
    data = None if data is None else matrix.data.view(data.dtype)
    if as_dense:
        indptr, columns, data = _as_dense(indptr, columns, data, dtype)
    nnz = numpy.diff(indptr[starts])
    columns = columns - numpy.repeat(starts[:-1] * n_relations, nnz)
    if n_relations > 1:
        relation, column = numpy.divmod(columns, numpy.repeat(sizes, nnz))
        columns = column * n_relations + relation
    return Entries(
        sizes=sizes,
        nnz=nnz,
        row_nnz=numpy.diff(indptr),
        columns=columns,
        data=data,
        n_relations=n_relations,
        symmetric=None,
    )


def longest(max_nnz, indptr, indices, is_symmetric):
    """Return an upper bound of the number of entries in a row or column.

    If no graph has more than LONG_ROW entries, as in most batches of molecules, rows are not read.
    """
    if max_nnz <= plans.LONG_ROW:
        return max_nnz
    of_row = int(numpy.diff(indptr).max(initial=0))
    return of_row if is_symmetric else max(of_row, int(numpy.bincount(indices).max(initial=0)))


def times(longest, n):
    """Return the bound `longest` times n, or unchanged if no graph has long rows."""
    return longest * n if longest > plans.LONG_ROW else longest


def rows_of(sizes, layout, n=None):
    """Return the number of rows of each graph, (n_graphs,); padded graphs have n."""
    if layout == 'padded':
        return numpy.full_like(sizes, n)
    return sizes + 1 if layout == 'folded' else sizes


def row_weights(sizes, n):
    """Return the weights of the rows of folded graphs of `sizes` nodes, padded to n, float32."""
    last = numpy.cumsum(sizes + 1) - 1
    weights = numpy.ones(int(sizes.sum()) + sizes.size, numpy.float32)
    weights[last] = numpy.maximum(n - sizes, 0)
    return weights


def ranges(starts, lengths):
    """Return the concatenated ranges from starts[i] to starts[i] + lengths[i], for every i."""
    ends = numpy.cumsum(lengths)
    places = numpy.repeat(starts - (ends - lengths), lengths)
    places += numpy.arange(places.size)
    return places


def spread(arrays, sizes, counts):
    """Return arrays with rows of zeros inserted after each molecule, from `sizes` to `counts`."""
    offsets = starts_of(counts)
    place = ranges(offsets[:-1], sizes)
    results = []
    for array in arrays:
        results.append(numpy.zeros((offsets[-1],) + array.shape[1:], array.dtype))
        results[-1][place] = array
    return results


def starts_of(lengths):
    """Return 0 and the running sums of `lengths`, int64."""
    starts = numpy.zeros(len(lengths) + 1, numpy.int64)
    numpy.cumsum(lengths, out=starts[1:])
    return starts
