"""Gradients that are constants: the 1 of a loss, zeros of what is not used."""

import numpy
import pytest

import chainer
from chainer import functions, optimizer_hooks, optimizers
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.training import step_program
from chainer_bspmm.training.graph_updater import GraphUpdater
from tests.support import relative_error
from tests.support.training import make_updater, parameters, run, same_molecules, small_model


def parameter(device, shape, dtype='float32'):
    param = chainer.Parameter(numpy.ones(shape, dtype))
    param.to_device(device)
    param.cleargrad()
    return param


def test_what_has_a_gradient_or_is_no_scalar_keeps_it(device):
    one, param = step_program.SeedGradient(device), parameter(device, (3,))
    loss = functions.sum(param)
    loss.grad = grad = device.xp.full((), 5, 'f')
    one.set(loss)
    assert loss.grad is grad
    one.set(param)
    assert param.grad is None


@pytest.mark.parametrize('shape', [(), (1,), (2, 3)])
def test_hooks_may_change_gradients(device, shape):
    """Those of parameters that are added to the loss are the 1 itself, or a view of it."""
    one, param = step_program.SeedGradient(device), parameter(device, shape)
    other = parameter(device, shape)
    loss = functions.sum(param) + functions.sum(2 * other)
    one.set(loss)
    loss.backward()
    unshared = other.grad
    one.detach([param, other, parameter(device, shape)])
    param.grad += 7
    assert (param.grad == 8).all() and other.grad is unshared
    assert all(array == 1 for array in one._ones.values())


def test_zeros_of_what_has_no_gradient(device):
    params = [parameter(device, shape) for shape in ((), (3, 5), (4,), (0, 2))]
    params += [parameter(device, (3,), 'float64'), parameter(device, (2,), 'float16')]
    params[2].grad = saved = device.xp.ones(4, 'f')
    step_program.zero_missing(params)
    first, second = (
        param.grad.ctypes.data if device.xp is numpy else param.grad.data.ptr
        for param in params[:2]
    )
    assert second - first == step_program.VECTOR_BYTES
    for param in params:
        assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
        assert param.grad.flags.c_contiguous
        if param is not params[2]:
            assert not param.grad.any()
            param.grad += 1  # not shared
    assert params[2].grad is saved
    assert all((param.grad == 1).all() for param in params)


class Shifted(chainer.Chain):
    """A loss plus a parameter, whose gradient is that of the loss."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.inner, self.shift = small_model(), chainer.Parameter(numpy.ones((), 'f'))

    def forward(self, *batch):
        return self.inner(*batch) + self.shift


@pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')
def test_hooks_change_gradients_of_one_step_only(device, graphs):
    actual = []
    for kind in (GraphUpdater, StandardUpdater):
        sgd, decay = optimizers.SGD(0.01), [optimizer_hooks.WeightDecay(0.5)]
        updater = make_updater(kind, device, Shifted(), same_molecules(), sgd, decay)
        run(updater, 4)
        actual.append(parameters(updater)['/shift'])
    assert relative_error(*actual) < 1e-6
