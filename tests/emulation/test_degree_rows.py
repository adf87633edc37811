"""Rows by the degree of nodes, compared with a loop, and the node that uses them, with a host's."""

import numpy
import pytest

from chainer_bspmm import BatchedCSR
from chainer_bspmm.ops import degree_linear
from chainer_bspmm.ops.degree_linear import DegreeLinearSigmoid
from chainer_bspmm.sparse import build
from tests.emulation.kernel_cases import DTYPES, larger, summed
from tests.support.molecules import adjacency


def symmetric(kind='counts', sizes=(5, 1, 0, 9, 2), dtype='f'):
    """Return a symmetric batch; with 'any values', the degree of the third node is no integer."""
    rng = numpy.random.RandomState(0)
    matrices = [adjacency(rng, n, 'counted bonds') if n else numpy.zeros((0, 0)) for n in sizes]
    if kind == 'any values':
        matrices[0][2, 2] += 0.5
        matrices[-1][...] = numpy.nan
    adj = BatchedCSR.from_matrices(matrices).astype(dtype)
    assert kind == 'any values' or adj.is_symmetric
    adj.is_symmetric = True
    return adj


def expected(adj, n_types):
    """Compute the five arrays entry by entry."""
    data = numpy.ones(adj.nnz) if adj.data is None else adj.data.astype('d')
    rows = [range(*pair) for pair in zip(adj.indptr, adj.indptr[1:])]
    degrees = [data[row].sum() for row in rows]
    counts = [degree in range(1, n_types + 1) for degree in degrees]
    types = [int(d) - 1 if is_there else n_types - 1 for d, is_there in zip(degrees, counts)]
    indptr, t_indptr, order = [], [], []
    for i, row in enumerate(rows):
        indptr += [row.start if t <= types[i] else row.stop for t in range(n_types)]
        for t in range(n_types):
            t_indptr.append(len(order))
            order += [k for k in row if types[adj.indices[k]] == t]
    own = numpy.concatenate([[0], *([counts[i]] * len(row) for i, row in enumerate(rows))])[1:]
    others = numpy.array([counts[j] for j in adj.indices])
    order, data = numpy.array(order, int), numpy.nan_to_num(data)
    return (
        indptr + [adj.nnz],
        data * own,
        t_indptr + [adj.nnz],
        adj.indices[order],
        (data * others)[order],
    )


def check(device, adj, n_types, dtype, spare=0):
    found = build.launch_degree_rows(larger(device.put, adj, spare), n_types, numpy.dtype(dtype))
    more = {0: spare * n_types, 2: spare * n_types}
    for i, (array, of) in enumerate(zip(found, expected(adj, n_types))):
        wanted = numpy.pad(of, (0, more.get(i, spare)), 'edge' if i in more else 'constant')
        numpy.testing.assert_array_equal(array, wanted)
        assert array.dtype == (dtype if i in (1, 4) else 'i4')


@pytest.mark.parametrize('n_types', [1, 4, 7])
@pytest.mark.parametrize('dtype', DTYPES)
def test_degrees(device, dtype, n_types):
    check(device, symmetric(dtype=dtype), n_types, dtype)
    ones = BatchedCSR.from_matrices([numpy.ones((3, 3)), numpy.eye(2), numpy.zeros((1, 1))])
    assert ones.data is None
    check(device, ones, n_types, dtype)


@pytest.mark.parametrize('spare', [0, 1, 300])
def test_degree_that_is_not_whole(device, spare):
    check(device, symmetric('any values'), 6, 'f', spare)  # the third degree is 5.5


@pytest.mark.parametrize('spare', [0, 1, 300])
def test_many_rows(device, spare):
    check(device, symmetric(sizes=(40, 60, 50)), 6, 'f', spare)


def test_degrees_are_rounded_as_the_values(device):
    """Degrees are rounded to the dtype of values, as on a host, so three thirds are 1."""
    third = numpy.full((3, 3), 1 / 3, 'e')
    assert third.astype('d').sum(axis=1)[0] != 1
    adj = larger(device.put, BatchedCSR.from_matrices([third]))
    found = build.launch_degree_rows(adj, 2, third.dtype)
    assert (found[1] == third[0, 0]).all() and found[0].tolist() == [0, 3, 3, 6, 6, 9, 9]


def test_node(device, monkeypatch):
    """Output and gradients equal a host's, also for nodes of degrees without a weight."""
    adj = symmetric()
    n_types = 3
    rng = numpy.random.RandomState(1)
    shapes = [(adj.n_rows, 5)] + [(4, 5)] * n_types + [(4,)] * n_types
    inputs = [rng.uniform(-1, 1, shape).astype('f') for shape in shapes]
    gy = rng.uniform(-1, 1, (adj.n_rows, 4)).astype('f')

    def outcome(adj, inputs, gy):
        node = DegreeLinearSigmoid(adj)
        y = node._output(inputs)
        wanted = range(len(inputs))
        gradients = node._gradients(inputs, gy, wanted)
        return [y, *(gradients[i] for i in wanted)]

    on_host = outcome(adj, inputs, gy)
    join = degree_linear.concat
    monkeypatch.setattr(degree_linear, 'concat', lambda arrays: device.put(join(arrays)))
    monkeypatch.setattr(DegreeLinearSigmoid, '_has_relations', lambda *_: True)
    monkeypatch.setattr('chainer_bspmm.ops.graph_linear.launches.sum_partials', summed)
    on_device = outcome(larger(device.put, adj), list(map(device.put, inputs)), device.put(gy))
    assert device.names == {'degree_rows', 'graph_linear'}
    for actual, expected_array in zip(on_device, on_host, strict=True):
        assert actual.shape == expected_array.shape and actual.dtype == 'f'
        numpy.testing.assert_allclose(actual, expected_array, 1e-5, 1e-5)
