"""Gradients of a step: constant ones (1 of the loss, 0 of unused parameters), deferred sums."""

import operator
import types

import numpy
import pytest

import chainer
from chainer import functions, optimizer_hooks, optimizers
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.cuda import partial_sums, step
from chainer_bspmm.functions import segment_sum
from chainer_bspmm.ops.node import AccumulateInPlace, FusedNode
from chainer_bspmm.training import GraphUpdater, training_step
from chainer_bspmm.training.program import Program
from tests.support import relative_error
from tests.support.training import assert_same_training, HOST, make_updater, parameters, run
from tests.support.training import same_molecules, small_model
from tests.training import host_graphs

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')


def parameter(device, shape, dtype='float32'):
    param = chainer.Parameter(numpy.ones(shape, dtype))
    param.to_device(device)
    param.cleargrad()
    return param


def test_what_has_a_gradient_or_is_no_scalar_keeps_it(device):
    one = training_step.SeedGradient(device)
    param = parameter(device, (3,))
    loss = functions.sum(param)
    loss.grad = grad = device.xp.full((), 5, 'f')
    one.set(loss)
    assert loss.grad is grad
    one.set(param)
    assert param.grad is None


@pytest.mark.parametrize('shape', [(), (1,), (2, 3)])
def test_hooks_may_change_gradients(device, shape):
    """A parameter that is added to the loss shares the gradient of the loss, until detached."""
    one = training_step.SeedGradient(device)
    param = parameter(device, shape)
    other = parameter(device, shape)
    loss = functions.sum(param) + functions.sum(2 * other)
    one.set(loss)
    loss.backward()
    unshared = other.grad
    one.detach([param, other, parameter(device, shape)])
    param.grad += 7
    assert (param.grad == 8).all() and other.grad is unshared
    assert all(array == 1 for array in one._ones.values())


def test_variables_from_which_a_loss_was_computed():
    given = [chainer.Variable(numpy.ones(2, 'f'), name=name) for name in 'ab']
    a, b = given
    between = a * b
    loss = functions.sum(between * a + functions.exp(between) + chainer.Variable(b.array))
    found = training_step.leaves(loss)
    assert sorted(variable.name for variable in found) == ['a', 'b']
    assert training_step.leaves(a) == [a]


def test_gradients_that_are_kept():
    x = chainer.Variable(numpy.ones(2, 'f'), grad=numpy.full(2, 3, 'f'))
    other = chainer.Variable(numpy.ones(2, 'f'))
    missing = chainer.Parameter()
    gradient = x.grad
    with training_step.gradients_kept([x, other, missing]):
        assert x.grad is None
        functions.sum(x * other).backward()
    assert x.grad is gradient and other.grad is None


def test_zeros_of_what_has_no_gradient(device):
    params = [parameter(device, shape) for shape in ((), (3, 5), (4,), (0, 2))]
    params += [parameter(device, (3,), 'float64'), parameter(device, (2,), 'float16')]
    params[2].grad = saved = device.xp.ones(4, 'f')
    training_step.zero_missing(params)

    def address(a):
        return a.ctypes.data if device.xp is numpy else a.data.ptr

    first, second = (address(param.grad) for param in params[:2])
    assert second - first == training_step.VECTOR_BYTES
    for param in params:
        assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
        assert param.grad.flags.c_contiguous
        if param is not params[2]:
            assert not param.grad.any()
            param.grad += 1  # no other parameter shares the array
    assert params[2].grad is saved
    assert all((param.grad == 1).all() for param in params)


class Shifted(chainer.Chain):
    """A loss to which a parameter is added, whose gradient is then that of the loss."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.inner = small_model()
            self.shift = chainer.Parameter(numpy.ones((), 'f'))

    def forward(self, *batch):
        return self.inner(*batch) + self.shift


def test_hooks_change_gradients_of_one_step_only(device, graphs):
    actual = []
    for kind in (GraphUpdater, StandardUpdater):
        sgd = optimizers.SGD(0.01)
        decay = [optimizer_hooks.WeightDecay(0.5)]
        updater = make_updater(kind, device, Shifted(), same_molecules(), sgd, decay)
        run(updater, 4)
        actual.append(parameters(updater)['/shift'])
    assert relative_error(*actual) < 1e-6


class Mapped(AccumulateInPlace, FusedNode):
    """Product x W^T; a step may defer the sum that is the gradient with respect to W."""

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
    """Three layers that share W. If `is_read`, the first is Chainer's, and reads the gradient."""

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
def launches(monkeypatch):
    """List of the number of sums in each launch; the host computes the sums."""
    host_graphs.stand_in(monkeypatch)
    found = []

    def launch(sums):
        found.append(len(sums))
        for array, parts in sums:
            size = array.size
            total = sum(partials[:, first : first + size].sum(axis=0) for partials, first in parts)
            array[...] = total.reshape(array.shape)

    monkeypatch.setattr(partial_sums, '_launch', launch)
    cupy = types.SimpleNamespace(empty=lambda shape, dtype: numpy.full(shape, numpy.nan, dtype))
    monkeypatch.setattr(partial_sums, 'cuda', types.SimpleNamespace(cupy=cupy))
    return found


def assert_same_steps(make_model, rate):
    """Train new models by both kinds of updaters on the host, and compare all parameters."""

    def make(kind):
        return make_updater(kind, HOST, make_model(), same_molecules(), optimizers.SGD(rate))

    assert_same_training(make, 4)


@pytest.mark.parametrize('is_read', [False, True])
def test_sums_of_a_step(launches, noted, is_read):
    """Sums are deferred only if nothing reads them before the end of the step."""
    programs = noted(Program, 'capture', of=lambda program: program)
    assert_same_steps(lambda: Model(is_read), 0.1)
    (program,) = programs
    assert program.work._defers_sums != is_read
    if not is_read:
        assert launches and set(launches) == {1}  # all uses of W are one sum


class LowRank(chainer.Chain):
    """Layer with the weight W + B A. The gradients of A and B are computed from that of the sum."""

    def __init__(self):
        super().__init__()
        rng = numpy.random.RandomState(0)
        with self.init_scope():
            for name, shape in (('W', (3, 3)), ('A', (1, 3)), ('B', (3, 1))):
                setattr(self, name, chainer.Parameter(rng.normal(size=shape).astype('f')))

    def forward(self, atoms, adj, t):
        x = self.xp.stack([atoms, atoms % 3, atoms % 5], axis=1).astype('f') / 10
        (y,) = Mapped().apply((x, self.W + functions.matmul(self.B, self.A)))
        return functions.mean_squared_error(segment_sum(adj, functions.tanh(y)), t)


def test_a_gradient_that_others_read_is_not_deferred(launches):
    assert_same_steps(LowRank, 0.1)


class Shared(chainer.Chain):
    """Two layers, the second with the weight W + D: one array is the gradient of W and of D.

    The gradient of the first layer is added to that of W later. `kind` makes D from an array.
    """

    def __init__(self, kind):
        super().__init__()
        rng = numpy.random.RandomState(0)
        W, D = rng.normal(size=(2, 3, 3)).astype('f') / 2
        with self.init_scope():
            self.W = chainer.Parameter(W)
            self.D = kind(D)

    def forward(self, atoms, adj, t):
        x = self.xp.stack([atoms, atoms % 3, atoms % 5], axis=1).astype('f') / 10
        (h,) = Mapped().apply((x, self.W))
        if not isinstance(self.D, chainer.Parameter):
            self.D.cleargrad()
        (y,) = Mapped().apply((functions.leaky_relu(h), self.W + self.D))
        return functions.mean_squared_error(segment_sum(adj, y), t)


@pytest.mark.parametrize('kind', [chainer.Parameter, chainer.Variable])
def test_a_gradient_that_two_variables_share_is_not_deferred(launches, noted, kind):
    models = []
    programs = noted(Program, 'capture', of=lambda program: program)

    def make_model():
        models.append(Shared(kind))
        return models[-1]

    assert_same_steps(make_model, 0.1)
    eager, captured = models
    assert relative_error(captured.D.grad, eager.D.grad) < 1e-5
    (program,) = programs
    assert program.work._defers_sums is False


class MappedNow(Mapped):
    """The product; the sum is computed at once."""

    def _gradients(self, inputs, gy, wanted):
        return gy @ inputs[1], gy.T @ inputs[0]


class Settled(Shared):
    """The same, and a third gradient of W is not deferred, so that the shared sum is settled."""

    def forward(self, atoms, adj, t):
        x = self.xp.stack([atoms, atoms % 3, atoms % 5], axis=1).astype('f') / 10
        (now,) = MappedNow().apply((x, self.W))
        (later,) = Mapped().apply((x, self.W))
        (y,) = Mapped().apply((functions.leaky_relu(later + now), self.W + self.D))
        return functions.mean_squared_error(segment_sum(adj, functions.tanh(y)), t)


class Forgotten(Shared):
    """The same; D is used inside of F.forget only."""

    def forward(self, atoms, adj, t):
        x = self.xp.stack([atoms, atoms % 3, atoms % 5], axis=1).astype('f') / 10
        (h,) = Mapped().apply((x, self.W))
        y = functions.forget(lambda h: Mapped().apply((h, self.W + self.D))[0], h)
        return functions.mean_squared_error(segment_sum(adj, y), t)


class Selected(Shared):
    """W + D where a mask is set, which it is nowhere: D has a gradient of 0."""

    def forward(self, atoms, adj, t):
        x = self.xp.stack([atoms, atoms % 3, atoms % 5], axis=1).astype('f') / 10
        mask = self.xp.zeros(self.D.shape, bool)
        (y,) = Mapped().apply((x, self.W + functions.where(mask, self.D, 0 * self.W.array)))
        return functions.mean_squared_error(segment_sum(adj, y), t)


@pytest.mark.parametrize('model', [Settled, Forgotten, Selected])
def test_a_gradient_that_a_node_is_given_is_not_deferred(launches, noted, model):
    programs = noted(Program, 'capture', of=lambda program: program)
    assert_same_steps(lambda: model(chainer.Parameter), 0.05)
    (program,) = programs
    assert program.work._defers_sums is False


class Preset(Model):
    """Model whose loss has a gradient."""

    def forward(self, *batch):
        loss = super().forward(*batch)
        loss.grad = self.xp.full((), 3, 'f')
        return loss


def test_a_gradient_that_the_loss_has_is_kept_by_the_trial(launches, noted):
    programs = noted(Program, 'capture', of=lambda program: program)
    assert_same_steps(lambda: Preset(False), 0.01)
    assert len(programs) == 1


class Thawing(Model):
    """Model that lets its parameter be updated, or sets the rate, after some steps."""

    change = None

    def forward(self, *batch):
        for rule in map(operator.attrgetter('update_rule'), self.params()):
            if self.change == 'enabled':
                rule.enabled = True
            elif self.change == 'rate':
                rule.hyperparam.lr = 0.05
        return super().forward(*batch)


@pytest.mark.parametrize('change', ['enabled', 'rate'])
def test_a_loss_that_changes_the_optimizer(launches, change):
    def make(kind):
        updater = make_updater(kind, HOST, Thawing(False), same_molecules(), optimizers.SGD(0.1))
        if change == 'enabled':
            updater.get_optimizer('main').target.W.update_rule.enabled = False
        return updater

    def let_the_loss_change(updater):
        if updater.iteration == 4:
            updater.get_optimizer('main').target.change = change

    with host_graphs.eager_causes() as causes:
        assert_same_training(make, 8, let_the_loss_change)
    assert any('the loss changes numbers of the optimizer' in cause for cause in causes)


def test_a_parameter_without_a_rule_that_is_replaced(launches, monkeypatch):
    """The fused update takes the new one's gradient into the norm."""
    host_graphs.fuse(monkeypatch)
    model = Shared(chainer.Parameter)
    updater = make_updater(GraphUpdater, HOST, model, same_molecules(), optimizers.SGD(0.1))
    model.D.update_rule = None
    run(updater, 4)
    new = chainer.Parameter(2 * model.D.array)
    del model.D
    with model.init_scope():
        model.D = new
    run(updater, 4)
    assert any(param is new for param in updater._driver.session.update._fused._params)
