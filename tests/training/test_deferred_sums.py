"""Gradients that a step sums at its end: only where nothing reads them before."""

import types

import numpy
import pytest

import chainer
from chainer import functions, optimizers
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.cuda import partial_sums, step
from chainer_bspmm.functions import segment_sum
from chainer_bspmm.ops.node import AccumulateInPlace, FusedNode
from chainer_bspmm.training import step_program
from chainer_bspmm.training.graph_updater import GraphUpdater
from tests.support import relative_error
from tests.support.training import make_updater, parameters, run, same_molecules


class Mapped(AccumulateInPlace, FusedNode):
    """x W^T; the gradient by W is a sum that a step may put off."""

    def _output(self, inputs):
        return inputs[0] @ inputs[1].T

    def _gradients(self, inputs, gy, wanted):
        x, W = inputs
        partials = (gy[:, :, None] * x[:, None]).reshape(len(x), -1)
        current = step.current()
        if current is None or current.sums is None:
            return gy @ W, partials.sum(axis=0).reshape(W.shape)
        return gy @ W, current.sums.add(partials, 0, W.shape, W.dtype)


class Model(chainer.Chain):
    """Three layers that share W; the first, whose gradient is added last, may be Chainer's."""

    def __init__(self, is_read):
        super().__init__()
        self.is_read = is_read
        with self.init_scope():
            self.W = chainer.Parameter(numpy.random.RandomState(0).normal(size=(3, 3)).astype('f'))

    def forward(self, atoms, adj, t):
        x = self.xp.stack([atoms, atoms % 3, atoms % 5], axis=1).astype('f') / 10
        for is_chainers in (self.is_read, False, False):
            (x,) = (functions.linear(x, self.W),) if is_chainers else Mapped().apply((x, self.W))
            x = functions.tanh(x)
        y = segment_sum(adj, x)
        return functions.mean_squared_error(y, t)


@pytest.fixture
def launches(device, graphs, monkeypatch):
    """How many sums each launch did, of sums on the host."""
    if graphs is None:
        pytest.skip('a stand-in for the kernel on the host')
    found = []

    def launch(sums):
        found.append(len(sums))
        for array, parts in sums:
            size = array.size
            array[...] = sum(
                partials[:, first : first + size].sum(axis=0) for partials, first in parts
            ).reshape(array.shape)

    def empty(shape, dtype):
        return numpy.full(shape, numpy.nan, dtype)

    monkeypatch.setattr(partial_sums, '_launch', launch)
    fake = types.SimpleNamespace(cupy=types.SimpleNamespace(empty=empty))
    monkeypatch.setattr(partial_sums, 'cuda', fake)
    return found


@pytest.mark.parametrize('is_read', [False, True])
@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_sums_of_a_step(device, launches, monkeypatch, is_read):
    examples, found = same_molecules(), []
    programs = []
    monkeypatch.setattr(
        step_program.StepProgram, 'capture', _noted(step_program.StepProgram.capture, programs)
    )
    for kind in (GraphUpdater, StandardUpdater):
        model = Model(is_read)
        updater = make_updater(kind, device, model, examples, optimizers.SGD(0.1))
        run(updater, 4)
        found.append(parameters(updater))
    assert relative_error(*(found_of['/W'] for found_of in found)) < 1e-5
    (program,) = programs
    assert program._defers_sums != is_read
    if not is_read:
        assert launches and set(launches) == {1}  # the uses of W are summed together


def _noted(method, calls):
    def noted(self):
        calls.append(self)
        return method(self)

    return noted
