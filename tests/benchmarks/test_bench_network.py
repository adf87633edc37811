"""Benchmark of network graphs, on a small graph."""

import chainer
import numpy
import pytest

from benchmarks.training import bench_network

SMALL = bench_network.Size(60, 150, 9, 3, warm=1, steps=2, rounds=1)


def test_generated_network():
    network = bench_network.generate(SMALL)
    sources, receivers = network.edges
    assert network.x.shape == (60, 9) and set(network.y) == {0, 1, 2}
    assert sources.shape == (300,) and sources.max() < 60
    numpy.testing.assert_array_equal(sources[:150], receivers[150:])  # edges have both directions
    assert network.train.sum() == network.valid.sum() == 12
    assert not (network.train & network.valid).any()
    counts = numpy.sort(numpy.bincount(sources, minlength=60))
    assert counts[-6:].sum() > 2 * counts[:6].sum()


def test_every_contender_trains():
    found = bench_network.run_size('small', SMALL, chainer.get_device('@numpy'))
    assert not found['not_run']
    assert set(found['milliseconds']) >= {
        bench_network.OURS,
        bench_network.SCATTER,
        bench_network.COO,
    }
    assert found['errors']['loss'] < 1e-5


def test_a_wrong_loss_is_noticed(monkeypatch):
    network = bench_network.generate(SMALL)
    data = bench_network.edge_list(network)
    other = bench_network.edge_list(network._replace(edges=network.edges[:, ::2]))
    turns = iter([data, other])
    monkeypatch.setattr(bench_network, 'edge_list', lambda _: next(turns))
    with pytest.raises(AssertionError, match='^relative errors .*, expected below 0.0001'):
        bench_network.check(network, chainer.get_device('@numpy'))


def test_no_timed_step_is_a_check():
    """Checks of the first form come at the first 16 replays, then at powers of two."""
    checks = {*range(17), *(2**i for i in range(11))}
    for size in bench_network.SIZES.values():
        # The first steps are eager or captured, so there are one or two replays fewer.
        replays = {
            step - eager
            for step in range(size.warm + 1, size.warm + size.steps + 1)
            for eager in (0, 1, 2)
        }
        assert not checks & replays
