"""Difficult graph batches, tolerances, and comparisons with the float64 reference."""

import numpy

from chainer.backends import cuda

from chainer_bspmm import BatchedCOO, BatchedCSR
from chainer_bspmm.ops import dropout

DTYPES = ('float16', 'float32', 'float64')

# Relative error norm ||out - reference|| / ||reference||; the float64 reference has the same
# rounded inputs. In float32 and float64 there are at most a few hundred roundings of 6e-8 and
# 1e-16. Sums of float16 are float32, so only the result is rounded, by at most 2**-11 = 5e-4 of
# an element.
TOLERANCE = {'float16': 5e-4, 'float32': 1e-5, 'float64': 1e-14}


def draw_as_chainer(monkeypatch):
    """Make dropout on a host keep the elements that ``chainer.functions.dropout`` keeps."""

    def draw_kept(shape, ratio):
        return numpy.random.rand(*shape) >= ratio

    monkeypatch.setattr(dropout, 'draw_kept', draw_kept)


def assert_close(actual, expected, dtype):
    """Check the relative error norm against the tolerance of the dtype, and the places of NaN."""
    actual = cuda.to_cpu(actual)
    assert actual.dtype == numpy.dtype(dtype)
    assert actual.shape == expected.shape
    actual = actual.astype(numpy.float64)
    assert (numpy.isnan(actual) == numpy.isnan(expected)).all()
    error = float(numpy.linalg.norm(numpy.nan_to_num(actual - expected)))
    scale = float(numpy.linalg.norm(numpy.nan_to_num(expected)))
    assert error <= TOLERANCE[numpy.dtype(dtype).name] * scale, error / max(scale, 1e-300)


def assert_exact(array, expected, dtype):
    """Check that an array equals the float64 `expected`, rounded once to the array's dtype."""
    assert array.dtype == numpy.dtype(dtype)
    assert array.shape == expected.shape
    numpy.testing.assert_array_equal(cuda.to_cpu(array), expected.astype(dtype))


def relative_error(actual, expected):
    actual, expected = (cuda.to_cpu(a).astype(numpy.float64) for a in (actual, expected))
    scale = numpy.linalg.norm(expected)
    return numpy.linalg.norm(actual - expected) / (scale if scale else 1.0)


def assert_close_arrays(found, expected, bound=1e-5):
    """Check the relative error of each array of two mappings name -> array."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert relative_error(found[name], array) < bound, name


def assert_same_arrays(a, b, names):
    """Check that two containers, on any device, have equal arrays, or both None, of these names."""
    for name in names:
        one = getattr(a, name)
        other = getattr(b, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            numpy.testing.assert_array_equal(cuda.to_cpu(one), cuda.to_cpu(other), name)


def random_matrix(rng, n, n_relations=1, symmetric=False, density=None, ones=False):
    """Return an (n, n) or (R, n, n) float64 matrix with about three entries per row."""
    density = min(1.0, 3.0 / max(n * n_relations, 1)) if density is None else density
    shape = n_relations, n, n
    matrix = rng.uniform(0.5, 2.0, shape) * (rng.uniform(size=shape) < density)
    if ones:
        matrix = (matrix != 0).astype(float)
    if symmetric:
        matrix = numpy.maximum(matrix, matrix.transpose(0, 2, 1))
    return matrix if n_relations > 1 else matrix[0]


# name -> sizes of the graphs of one batch
SIZES = {
    'one graph': [5],
    'isolated nodes': [1, 1, 1],
    'empty graphs first, between, last': [0, 4, 0, 0, 3, 0],
    'only empty graphs': [0, 0],
    'huge among tiny': [2, 1, 300, 3, 0, 2],
    'many': [9, 17, 3, 25, 12, 1, 8, 30, 19, 4] * 3,
}


def batches(seed=0):
    """Yield (name, BatchedCSR in float64 on the host) of every difficult kind."""
    rng = numpy.random.RandomState(seed)
    for name, sizes in SIZES.items():
        yield name, BatchedCSR.from_matrices([random_matrix(rng, n) for n in sizes])
    sizes = SIZES['many']
    for name, options in (
        ('symmetric', {'symmetric': True}),
        ('ones', {'ones': True}),
        ('symmetric ones', {'symmetric': True, 'ones': True}),
        ('four relations', {'n_relations': 4}),
        ('dense blocks', {'density': 1.0}),
    ):
        yield name, BatchedCSR.from_matrices([random_matrix(rng, n, **options) for n in sizes])
    yield 'no entries', BatchedCSR.from_matrices([numpy.zeros((n, n)) for n in (3, 2)])
    yield 'padded', BatchedCSR.from_matrices([random_matrix(rng, n) for n in sizes], 'padded')
    yield (
        'duplicates, unsorted',
        BatchedCSR(
            indptr=numpy.array([0, 4, 4, 7]),
            indices=numpy.array([1, 0, 1, 1, 2, 2, 2]),
            row_offsets=numpy.array([0, 2, 3]),
            data=rng.uniform(-1, 1, 7),
        ),
    )
    yield (
        'rectangular',
        BatchedCSR(
            indptr=numpy.array([0, 2, 3, 3]),
            indices=numpy.array([0, 4, 6]),
            row_offsets=numpy.array([0, 1, 3]),
            data=rng.uniform(-1, 1, 3),
            col_offsets=numpy.array([0, 5, 7]),
        ),
    )


BATCHES = dict(batches())


def shuffled(adj, seed=0):
    """Return a BatchedCOO on the host with the entries of every graph in another order."""
    rng = numpy.random.RandomState(seed)
    starts = adj.entry_offsets.tolist()
    order = [start + rng.permutation(end - start) for start, end in zip(starts, starts[1:])]
    order = numpy.concatenate(order).astype(int) if order else numpy.zeros(0, int)
    return adj.replace(ids=adj.ids[order], data=None if adj.data is None else adj.data[order])


def coo_batch_on(name, xp, dtype):
    """Return one of BATCHES as a BatchedCOO with shuffled entries, in a dtype on a device."""
    adj = shuffled(BatchedCOO.from_csr(BATCHES[name])).astype(dtype)
    return adj if xp is numpy else adj.to_device('@cupy:%d' % xp.cuda.Device().id)


def batch_on(name, xp, dtype):
    """Return one of BATCHES in a dtype on a device."""
    adj = BATCHES[name].astype(dtype)
    return adj if xp is numpy else adj.to_device('@cupy:%d' % xp.cuda.Device().id)


def device_of(xp):
    """Return the name of the device of an array module."""
    return '@numpy' if xp is numpy else '@cupy:0'


def ones_for(arguments):
    """Return a dict of arguments in which arrays of float32 ones replace tuples, their shapes."""
    return {
        name: numpy.ones(value, 'f') if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }


def features(rng, xp, n_rows, n_channels, dtype):
    return xp.asarray(rng.uniform(-1, 1, (n_rows, n_channels)).astype(dtype))


def poisoned(monkeypatch, cupy):
    """Fill arrays of cupy.empty with NaN, so that elements that a kernel leaves out are noticed."""
    empty = cupy.empty

    def empty_poisoned(shape, dtype=float, *args, **kwargs):
        array = empty(shape, dtype, *args, **kwargs)
        array.fill(numpy.nan if array.dtype.kind == 'f' else 127)
        return array

    monkeypatch.setattr(cupy, 'empty', empty_poisoned)


MATRIX_SIZES = [3, 1, 0, 5]


def random_matrices(n_relations=1, **options):
    """Return a `random_matrix` of each of `MATRIX_SIZES`; every call returns the same."""
    rng = numpy.random.RandomState(1)
    return [random_matrix(rng, n, n_relations, **options) for n in MATRIX_SIZES]
