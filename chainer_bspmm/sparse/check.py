"""Checks of arguments; every error names the argument, the expected value and the actual one.

Checks of single values come first, then of the matrices and arrays that an operation takes
together, then of the arrays of a container. Only `host_integers` copies from a device.
"""

import operator

import numpy
import scipy.sparse

import chainer
from chainer import backend
from chainer.backends import cuda

FLOATS = tuple(numpy.dtype(name) for name in ('float16', 'float32', 'float64'))
INT32_MAX = 2**31 - 1

# Layouts of the nodes of a batch as rows. Chainer Chemistry pads every molecule of n atoms to N
# with phantom atoms, which are all alike, have id 0 and no bonds.
#
# packed: a row for each of the n atoms.
# folded: these rows, and one that stands for all phantom atoms, with N - n as its weight.
# padded: N rows.
LAYOUTS = ('packed', 'folded', 'padded')


def one_of(name, value, allowed):
    """Check that a value is one of those that are allowed."""
    if value not in allowed:
        text = '%s: expected one of %s, got %r'
        raise ValueError(text % (name, ', '.join(map(repr, allowed)), value))


def options(n_relations, layout, max_atom_id):
    """Check the options of a container; return n_relations and max_atom_id."""
    one_of('layout', layout, ('packed', 'padded'))
    if max_atom_id is not None:
        max_atom_id = count('max_atom_id', max_atom_id, 0)
    return count('n_relations', n_relations, 1), max_atom_id


def layout(name, padded_to):
    """Check the name of a layout, and the size that its molecules are padded to."""
    one_of('layout', name, LAYOUTS)
    if padded_to is None:
        return
    if name != 'folded':
        text = "padded_to: expected None with layout=%r, got %r; it goes with 'folded'"
        raise ValueError(text % (name, padded_to))
    count('padded_to', padded_to, 1)


def fits_int32(what, number):
    """Check that a number of rows or entries fits in int32."""
    if number > INT32_MAX:
        text = '%s: expected at most 2**31 - 1 = %d in one batch, got %d'
        raise ValueError(text % (what, INT32_MAX, number))


def float_dtype(name, dtype):
    """Check that a dtype is one of floats; return it as ``numpy.dtype``."""
    dtype = numpy.dtype(dtype)
    if dtype not in FLOATS:
        raise _no_floats(name, dtype)
    return dtype


def _no_floats(name, got):
    return TypeError('%s: expected float16, float32 or float64, got %s' % (name, got))


def numpy_or_cupy(name, x):
    """Check that an argument is a NumPy or CuPy array."""
    if not isinstance(x, (numpy.ndarray, cuda.ndarray)):
        raise TypeError('%s: expected a NumPy or CuPy array, got %s' % (name, type(x).__name__))


def count(name, value, least):
    """Check that a value is an integer of at least `least`; return it as int."""
    if not isinstance(value, (int, numpy.integer)) or isinstance(value, bool):
        raise TypeError('%s: expected an int, got %r' % (name, value))
    if value < least:
        raise ValueError('%s: expected at least %d, got %d' % (name, least, value))
    return int(value)


def of_kind(adj, kinds):
    """Check that a matrix is exactly of one of these classes of containers."""
    if type(adj) not in kinds:
        advice = (
            'data sets become sparse batches with converter=chainer_bspmm.concat_mols, arrays '
            'with BatchedCSR.from_dense, two molecules in an example with a converter of pairs '
            '(docs/migration.md)'
        )
        if hasattr(adj, 'to_csr'):
            advice = 'adj.to_csr() makes a BatchedCSR, chainer_bspmm.papers.bspmm takes adj itself'
        got = type(adj).__name__ + (' of shape %s' % (adj.shape,) if hasattr(adj, 'shape') else '')
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise TypeError('adj: expected a %s, got %s; %s' % (names, got, advice))


def rows(name, x, adj, n_rows, width='n_B', each='node'):
    """Check that x has a row of floats for each node, or each graph, on the device of the batch."""
    floats(name, x, adj)
    if x.ndim != 2 or len(x) != n_rows:
        text = '%s: expected shape (%d, %s), a row for each %s of %r, got %s'
        raise ValueError(text % (name, n_rows, width, each, adj, x.shape))


def features(x, adj, width):
    """Check :func:`rows` of features to be multiplied; values of `adj` must have their dtype."""
    rows('x', x, adj, adj.n_rows, width)
    values_dtype(adj, x)


def shapes(context, expected):
    """Check shapes; `expected` is {name: (array or None, shape)}."""
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            text = '%s: expected shape %s to go with %s, got %s'
            raise ValueError(text % (name, shape, context, array.shape))


def floats(name, x, adj):
    """Check that x is an array of floats, or a Variable, on the device of a matrix."""
    on_device(name, x, adj)
    floating(name, x)


def floating(name, x):
    """Check that x is an array of floats, or a Variable."""
    if not hasattr(x, 'dtype') or x.dtype not in FLOATS:
        raise _no_floats(name, getattr(x, 'dtype', type(x).__name__))


def same_dtype(name, dtype, expected):
    """Check that two dtypes are equal."""
    if dtype != expected:
        raise TypeError('%s: expected %s, got %s' % (name, expected, dtype))


def values_dtype(adj, x):
    """Check that the values of a matrix, if it has any, have the dtype of x."""
    if adj.data is not None and adj.data.dtype != x.dtype:
        text = 'x: expected %s, like the values of adj, got %s; adj.astype(x.dtype) converts'
        raise TypeError(text % (adj.data.dtype, x.dtype))


def on_device(name, x, adj):
    """Check that an array or Variable is on the device of a matrix."""
    x, offsets = chainer.as_array(x), adj.row_offsets
    if type(x) is type(offsets) and (
        type(x) is numpy.ndarray or x.data.device_id == offsets.data.device_id
    ):
        return
    numpy_or_cupy(name, x)
    here, there = backend.get_device_from_array(x), backend.get_device_from_array(offsets)
    if here != there:
        text = '%s: expected an array on %s, like adj, got one on %s'
        raise ValueError(text % (name, there, here))


def gradient(gy, result):
    """Check a gradient against (dtype, shape, type) of the result, which Chainer does not check."""
    if (gy.dtype, gy.shape, type(gy)) == result:
        return
    dtype, shape, kind = result
    if gy.dtype != dtype:
        raise TypeError('gy: expected %s, like the result, got %s' % (dtype, gy.dtype))
    if gy.shape != shape:
        raise ValueError('gy: expected shape %s, like the result, got %s' % (shape, gy.shape))
    if isinstance(gy, cuda.ndarray) != issubclass(kind, cuda.ndarray):
        where = 'a GPU' if issubclass(kind, cuda.ndarray) else 'the host'
        text = 'gy: expected an array on %s, like the result, got %s'
        raise ValueError(text % (where, type(gy).__name__))


def algorithm(name, is_on_gpu, names):
    """Check the name of an algorithm: on a GPU one of `names`, on a CPU only 'auto'."""
    if is_on_gpu:
        one_of('algorithm', name, names)
    else:
        one_of('algorithm on a CPU', name, ('auto',))


def host_integers(arrays, data, n_relations):
    """Check kind, dimension and length of raw arrays; return host copies and their device.

    All arrays have one dimension, except for ``ids``, which has two. Without ``col_offsets`` every
    row has `n_relations` columns.
    """
    device = None
    entries = 'ids' if 'ids' in arrays else 'indices'
    if arrays['col_offsets'] is None:
        arrays = {name: array for name, array in arrays.items() if name != 'col_offsets'}
    for name, array in list(arrays.items()) + ([] if data is None else [('data', data)]):
        numpy_or_cupy(name, array)
        here = backend.get_device_from_array(array)
        if device is not None and here != device:
            text = '%s: expected an array on %s, like the other arrays, got one on %s'
            raise ValueError(text % (name, device, here))
        device = here
        if name == 'ids':
            if array.ndim != 2 or array.shape[1] != 2:
                text = 'ids: expected shape (nnz, 2), a row and a column for each entry, got %s'
                raise ValueError(text % (array.shape,))
        elif array.ndim != 1:
            raise ValueError('%s: expected 1 dimension, got shape %s' % (name, array.shape))
        fits_int32('non-zeros' if name in (entries, 'data') else 'length of ' + name, len(array))
        if name == 'data':
            float_dtype('data', array.dtype)
        elif array.dtype.kind not in 'iu':
            raise TypeError('%s: expected integers, got %s' % (name, array.dtype))
    if data is not None and len(data) != len(arrays[entries]):
        text = 'data: expected one value for each of the %d %s, got %d'
        raise ValueError(text % (len(arrays[entries]), entries, len(data)))
    # Checks calculate in int64, in which unsigned or narrow integers cannot wrap around.
    host = {name: cuda.to_cpu(array).astype(numpy.int64) for name, array in arrays.items()}
    if 'col_offsets' not in host:
        n_rows = int(host['row_offsets'].max(initial=0))
        if 'indptr' in host:
            n_rows = host['indptr'].size - 1
        fits_int32('nodes times relations', n_rows * n_relations)
        host['col_offsets'] = host['row_offsets'] * numpy.int64(n_relations)
    return host, device


def blocks(indptr, indices, row_offsets, col_offsets, n_relations):
    """Check that the arrays describe a block-diagonal CSR matrix."""
    n_rows = indptr.size - 1
    if n_rows < 0:
        raise ValueError('indptr: expected n_rows + 1 entries, got none')
    _starts('row_offsets', row_offsets, n_rows, 'rows, len(indptr) - 1')
    _columns(row_offsets, col_offsets, n_relations)
    _starts('indptr', indptr, indices.size, 'non-zeros, len(indices)')
    graph_nnz = numpy.diff(indptr[row_offsets])
    low = numpy.repeat(col_offsets[:-1], graph_nnz)
    high = numpy.repeat(col_offsets[1:], graph_nnz)
    wrong = (indices < low) | (indices >= high)
    if wrong.any():
        k = int(wrong.argmax())
        graph = numpy.searchsorted(indptr[row_offsets], k, side='right') - 1
        row = numpy.searchsorted(indptr, k, side='right') - 1
        raise ValueError(
            'indices: graph %d, row %d: expected a column in [%d, %d), the block of that graph, '
            'got %d (entry %d)' % (graph, row, low[k], high[k], indices[k], k)
        )


def entries(ids, row_offsets, col_offsets, entry_offsets, n_relations):
    """Check that the arrays describe a block-diagonal matrix, with adjacent entries per graph."""
    if not row_offsets.size:
        raise ValueError('row_offsets: expected at least one entry, got none')
    fits_int32('row_offsets', int(row_offsets[-1]))
    _starts('row_offsets', row_offsets, int(row_offsets[-1]), 'rows')
    _columns(row_offsets, col_offsets, n_relations)
    _one_for_each_graph('entry_offsets', entry_offsets, row_offsets)
    _starts('entry_offsets', entry_offsets, len(ids), 'non-zeros, len(ids)')
    graph = numpy.repeat(numpy.arange(row_offsets.size - 1), numpy.diff(entry_offsets))
    for what, places, offsets in (
        ('row', ids[:, 0], row_offsets),
        ('column', ids[:, 1], col_offsets),
    ):
        low = offsets[graph]
        high = offsets[graph + 1]
        wrong = (places < low) | (places >= high)
        if wrong.any():
            k = int(wrong.argmax())
            raise ValueError(
                'ids: graph %d, entry %d: expected a %s in [%d, %d), the block of that graph, '
                'got %d' % (graph[k], k, what, low[k], high[k], places[k])
            )


def _columns(row_offsets, col_offsets, n_relations):
    _one_for_each_graph('col_offsets', col_offsets, row_offsets)
    fits_int32('col_offsets', int(col_offsets[-1]))
    _starts('col_offsets', col_offsets, int(col_offsets[-1]), 'columns')
    if (col_offsets % n_relations).any():
        text = 'col_offsets: expected multiples of n_relations = %d, got %d'
        raise ValueError(text % (n_relations, col_offsets[(col_offsets % n_relations).argmax()]))


def _one_for_each_graph(name, starts, row_offsets):
    if starts.size != row_offsets.size:
        text = '%s: expected n_graphs + 1 = %d entries as row_offsets has, got %d'
        raise ValueError(text % (name, row_offsets.size, starts.size))


def _starts(name, starts, total, meaning):
    if starts.size < 1:
        raise ValueError('%s: expected at least one entry, got none' % name)
    if starts[0] != 0:
        raise ValueError('%s: expected to start at 0, got %d' % (name, starts[0]))
    decreasing = numpy.diff(starts) < 0
    if decreasing.any():
        i = int(decreasing.argmax())
        text = '%s: expected not to decrease, got %d after %d at position %d'
        raise ValueError(text % (name, starts[i + 1], starts[i], i + 1))
    if starts[-1] != total:
        text = '%s: expected to end at %d (the number of %s), got %d'
        raise ValueError(text % (name, total, meaning, starts[-1]))


def equal_blocks(arrays):
    """Check that all graphs have as many rows, and as many columns."""
    for name in ('row_offsets', 'col_offsets'):
        sizes = numpy.diff(arrays[name])
        if sizes.size and (sizes != sizes[0]).any():
            text = "%s: layout='padded' expects blocks of one size, got %d to %d"
            raise ValueError(text % (name, sizes.min(), sizes.max()))


def same_device(name, arrays):
    """Return the device that the CuPy arrays among `arrays` share, or None if there are none."""
    if not any(issubclass(kind, cuda.ndarray) for kind in set(map(type, arrays))):
        return None
    devices = {
        backend.get_device_from_array(array) for array in arrays if isinstance(array, cuda.ndarray)
    }
    if len(devices) > 1:
        text = '%s: expected arrays on one device, got them on %s'
        raise ValueError(text % (name, ' and '.join(sorted(map(str, devices)))))
    return devices.pop()


def dense_matrices(matrices):
    """Check dense square matrices; return number of relations, sizes (n_graphs,), value dtype."""
    first = matrices[0]
    if first.ndim not in (2, 3):
        raise ValueError('matrices[0]: expected shape (n, n) or (R, n, n), got %s' % (first.shape,))
    n_relations = 1 if first.ndim == 2 else first.shape[0]
    if n_relations == 0:
        text = 'matrices[0]: expected at least one relation, got shape %s'
        raise ValueError(text % (first.shape,))
    lead = first.shape[:-2]
    shapes = list(map(operator.attrgetter('shape'), matrices))
    for shape in dict.fromkeys(shapes):  # in their order, so that the first wrong one is named
        if shape != lead + (shape[-1:] * 2):
            raise ValueError(
                'matrices[%d]: expected shape %s as in matrices[0], got %s'
                % (shapes.index(shape), '(n, n)' if not lead else '(%d, n, n)' % n_relations, shape)
            )
    dtypes = set(map(operator.attrgetter('dtype'), matrices))
    return n_relations, numpy.array([shape[-1] for shape in shapes]), _value_dtype(dtypes)


def sparse_matrices(matrices):
    """Check sparse matrices; return number of relations, sizes, lists of matrices, value dtype.

    There is a list of SciPy matrices for every graph.
    """
    stacks = []
    for i, matrix in enumerate(matrices):
        stack = matrix if isinstance(matrix, (list, tuple)) else [matrix]
        for part in stack:
            if not scipy.sparse.issparse(part):
                raise TypeError(
                    'matrices[%d]: expected SciPy sparse matrices, or arrays throughout the batch, '
                    'got %s' % (i, type(part).__name__)
                )
            if part.shape != (stack[0].shape[0],) * 2:
                text = 'matrices[%d]: expected square matrices of one size, got %s'
                raise ValueError(text % (i, [other.shape for other in stack]))
        stacks.append(stack)
        if not stack:
            raise ValueError('matrices[%d]: expected at least one relation, got none' % i)
        if len(stack) != len(stacks[0]):
            text = 'matrices[%d]: expected %d relations as in matrices[0], got %d'
            raise ValueError(text % (i, len(stacks[0]), len(stack)))
    dtypes = {part.dtype for stack in stacks for part in stack}
    sizes = numpy.array([stack[0].shape[0] for stack in stacks])
    return len(stacks[0]), sizes, stacks, _value_dtype(dtypes)


def _value_dtype(dtypes):
    """Return the dtype that holds all floating values; integers and bools take that of others."""
    others = [dtype for dtype in dtypes if dtype.kind not in 'iub']
    return float_dtype('matrices', numpy.result_type(*others) if others else 'float32')


def dense_batch(adj):
    """Check that an array is a batch of square matrices, with or without relations."""
    numpy_or_cupy('adj', adj)
    if adj.ndim not in (3, 4) or adj.shape[-1] != adj.shape[-2]:
        text = 'adj: expected shape (n_graphs, N, N) or (n_graphs, R, N, N), got %s'
        raise ValueError(text % (adj.shape,))


def crop(adj, n_nodes):
    """Return the (.., n, n) corner of every graph of a padded dense batch."""
    if n_nodes is None:
        raise ValueError(
            "n_nodes: layout='packed' expects the number of nodes of every graph, got None"
        )
    n_nodes = numpy.asarray(n_nodes)
    if n_nodes.shape != (len(adj),) or n_nodes.dtype.kind not in 'iu':
        text = 'n_nodes: expected %d integers, one for each graph, got %s %s'
        raise ValueError(text % (len(adj), n_nodes.dtype, n_nodes.shape))
    matrices = []
    for graph, (matrix, n) in enumerate(zip(adj, n_nodes)):
        if not 0 <= n <= adj.shape[-1]:
            raise ValueError('n_nodes[%d]: expected 0 to %d, got %d' % (graph, adj.shape[-1], n))
        if (matrix[..., n:, :] != 0).any() or (matrix[..., n:] != 0).any():
            text = 'adj[%d]: expected zeros outside of its %d nodes, got other values'
            raise ValueError(text % (graph, n))
        matrices.append(matrix[..., :n, :n])
    return matrices
