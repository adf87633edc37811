"""Sums over ranks for batch normalisation, whose results are tested in test_optimizer.py."""

import types

from chainer_bspmm.cuda import step  # repairs Chainer before anything imports it
import numpy
import pytest

from chainer_bspmm.multi_node import statistics
from chainer_bspmm.ops.batch_norm import ONE_RANK


def of_ranks(size):
    return statistics.ranks_of(types.SimpleNamespace(comm=types.SimpleNamespace(size=size)))


def test_communicator_of_one_rank_needs_no_sums():
    assert of_ranks(1) is ONE_RANK


def test_loss_that_raises_leaves_no_weight(monkeypatch):
    added = []
    monkeypatch.setattr(statistics.AllRanks, 'sum', lambda self, x: added.append(x) or x)
    ranks = of_ranks(2)
    with pytest.raises(KeyError), statistics.weighted_by(5):
        ranks.sum_of_gradients(numpy.ones(2))
        raise KeyError
    ranks.sum_of_gradients(numpy.ones(2))
    assert [array[0] for array in added] == [5, 1]


def test_a_batch_of_no_molecules_has_the_weight_of_one(monkeypatch):
    """The gradient is divided by the weight."""
    monkeypatch.setattr(statistics.AllRanks, 'sum', lambda self, x: x)
    with statistics.weighted_by(0):
        assert of_ranks(2).sum_of_gradients(numpy.ones(2)).tolist() == [1, 1]


def test_step_adds_up_on_the_device(monkeypatch):
    sums = types.SimpleNamespace(sum=lambda array: 3 * array)
    monkeypatch.setattr(step, 'current', lambda: types.SimpleNamespace(peer_sums=sums))
    assert of_ranks(2).sum(numpy.ones(2)).tolist() == [3, 3]


def test_step_of_one_rank_refuses_statistics_of_several(monkeypatch):
    monkeypatch.setattr(step, 'current', lambda: types.SimpleNamespace(peer_sums=None))
    text = (
        '^statistics over several ranks: expected an update over several ranks, got one of a '
        'single rank$'
    )
    with pytest.raises(RuntimeError, match=text):
        of_ranks(2).sum(numpy.ones(2))


def test_higher_derivatives_are_refused():
    text = '^statistics over several ranks have first derivatives only$'
    with pytest.raises(RuntimeError, match=text):
        of_ranks(2).refuse_derivatives()
