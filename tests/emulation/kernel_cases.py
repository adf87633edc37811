"""Batches and values that the kernel tests share.

Every value is an integer so small that all sums are exact in the dtype the kernels calculate in,
and so large that they would not be in a narrower one. So the results must equal the reference,
rounded once to the storage dtype: there is no tolerance.
"""

import types

import numpy

from chainer_bspmm import BatchedCSR
from chainer_bspmm import reference
from chainer_bspmm.cuda import policy
from chainer_bspmm.sparse import build

DTYPES = 'efd'
CHANNELS = (1, 2, 3, 31, 33, 64, 1024)
# Largest value where products are summed (float16 and float32 storage: below 2**24; float64:
# between 2**24 and 2**53), and where values alone are.
FACTOR = {'e': 31, 'f': 255, 'd': 2**20}
TERM = {'e': 2000, 'f': 2**19, 'd': 2**40}
BATCHES = ('mixed', 'one node', 'no edges', 'empty graphs', 'duplicates', 'relations', 'padded')


def integers(shape, dtype, largest=FACTOR, seed=0):
    """Return random integers of either sign, as floats."""
    bound = largest[dtype]
    return numpy.random.RandomState(seed).randint(-bound, bound + 1, shape).astype(dtype)


def batch(name, dtype):
    """Return the BatchedCSR of one of BATCHES, or 'small'; none is symmetric."""

    def graph(*shape, density=0.4):
        shape = shape if len(shape) > 1 else shape * 2
        values = integers(shape, dtype, seed=shape[-1])
        kept = numpy.random.RandomState(shape[-1]).uniform(size=shape) < density
        return values * kept

    def empty(n):
        return numpy.zeros((n, n), dtype)

    if name == 'duplicates':
        indices = [1, 1, 1, 0, 0, 2, 2, 1, 2]
        return BatchedCSR(
            numpy.array([0, 3, 3, 9]),
            numpy.array(indices),
            numpy.array([0, 3]),
            integers(len(indices), dtype),
        )
    if name == 'mixed':  # one huge graph among small ones, with a row far longer than the others
        huge = graph(24, density=0.12)
        huge[5] = integers(24, dtype, seed=1)
        matrices = [empty(0), graph(3), empty(1), empty(4), huge, empty(0), graph(2, density=1)]
    else:
        matrices = {
            'small': [graph(3), graph(2, density=1)],
            'one node': [empty(1)],
            'no edges': [empty(3), empty(1)],
            'empty graphs': [empty(0), graph(3), empty(0)],
            'relations': [graph(3, 3, 3), numpy.zeros((3, 1, 1), dtype), graph(3, 6, 6)],
            'padded': [graph(3), empty(1), graph(6)],
        }[name]
    layout = 'padded' if name == 'padded' else 'packed'
    return BatchedCSR.from_matrices(matrices, layout).astype(dtype)


def film_arrays(adj, n_channels, dtype):
    """Return messages, film and the gradient by the result, for edge_film."""
    largest = {'e': 15, 'f': 31, 'd': 2**10}  # three are multiplied with each other
    shapes = (adj.n_cols, n_channels), (adj.n_cols, 2 * n_channels), (adj.n_rows, n_channels)
    return [integers(shape, dtype, largest, seed) for seed, shape in enumerate(shapes)]


def film_truth(adj, messages, film, gy):
    """Return what edge_film makes of them, in float64: result, gradients by messages and film."""
    messages, film, gy = (numpy.asarray(array, 'd') for array in (messages, film, gy))
    n_channels, n_relations = messages.shape[1], adj.n_relations
    y, gmessages, gfilm = (numpy.zeros(array.shape) for array in (gy, messages, film))
    for entry, row, column in reference.entries(adj):
        value = 1 if adj.data is None else float(adj.data[entry])
        pair = row * n_relations + column % n_relations
        gamma, beta = film[pair, :n_channels], film[pair, n_channels:]
        z = gamma * messages[column] + beta
        g = value * gy[row] * (z > 0)
        y[row] += value * numpy.maximum(z, 0)
        gmessages[column] += g * gamma
        gfilm[pair] += numpy.concatenate([g * messages[column], g])
    return y, gmessages, gfilm


def assert_exact(array, expected, dtype):
    """Fail unless an array equals the float64 `expected`, rounded once to its dtype."""
    assert array.dtype == numpy.dtype(dtype)
    assert array.shape == expected.shape
    numpy.testing.assert_array_equal(array, expected.astype(dtype))


def transpose_on(device, adj):
    """Return what the kernel makes of a host BatchedCSR: indptr, indices, order."""
    launch = policy.transpose_launch(adj.n_graphs, adj.max_cols, adj.max_nnz)
    placed = types.SimpleNamespace(
        n_cols=adj.n_cols,
        nnz=adj.nnz,
        **{name: device.put(getattr(adj, name)) for name in adj._integers},
    )
    return build.launch_transpose(placed, launch)
