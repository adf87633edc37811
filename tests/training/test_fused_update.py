"""`FusedUpdate`: refusals, the numbers that it sends, its launches against Chainer's updates."""

import re
import sys
import types

import numpy
import pytest

from chainer_bspmm.training import fused_update  # repairs Chainer before anything imports it
import chainer
from chainer import optimizer_hooks as hooks, optimizers
from chainer.backends import cuda

from chainer_bspmm.training.fused_update import FusedUpdate, why_unsupported
from tests.support.training import assert_same_update

OPTIMIZERS = {
    'Adam': optimizers.Adam,
    'AdamW': lambda: optimizers.AdamW(eta=0.7, weight_decay_rate=0.01),
    'AMSGrad': optimizers.AMSGrad,
    'SGD': optimizers.SGD,
    'MomentumSGD': optimizers.MomentumSGD,
    'RMSprop': optimizers.RMSprop,
    'RMSprop, eps inside': lambda: optimizers.RMSprop(eps_inside_sqrt=True),
}
RULE = optimizers.SGD().create_update_rule()
HOOKS = {
    'none': (),
    'clipping last': (hooks.WeightDecay(0.1), hooks.Lasso(0.02), hooks.GradientClipping(1.5)),
    'clipping first': (hooks.GradientClipping(1.5), hooks.GradientHardClipping(-0.02, 0.01)),
    'clipping that does nothing': (hooks.GradientClipping(1e5),),
}


def link_of(xp, dtype='f', shapes=((), (0,), (3, 5), (2, 1025))):
    rng = numpy.random.RandomState(0)
    link = chainer.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            parameter = chainer.Parameter(xp.asarray(rng.normal(size=shape).astype(dtype)))
            setattr(link, 'p%03d' % i, parameter)
    return link


def optimizer_of(make=optimizers.Adam, link=None, add_hooks=()):
    optimizer = make().setup(link_of(numpy) if link is None else link)
    for hook in add_hooks:
        optimizer.add_hook(hook)
    return optimizer


@pytest.mark.parametrize('add_hooks', HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize('dtype', 'fd')
@pytest.mark.parametrize('make', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_supported(make, dtype, add_hooks):
    link = link_of(numpy, dtype)
    with link.init_scope():
        link.late = chainer.Parameter()
    optimizer = optimizer_of(make, link, add_hooks)
    link.p002.update_rule.enabled = False
    assert why_unsupported(optimizer) is None
    FusedUpdate(optimizer)
    assert why_unsupported(make()) == 'the optimizer was not set up: call its method setup'


OTHER_CLASS = 'the optimizer is %s, expected one of AMSGrad, Adam, AdamW, MomentumSGD, RMSprop, SGD'


@pytest.mark.parametrize(
    'make, reason',
    [
        (type('OwnAdam', (optimizers.Adam,), {}), OTHER_CLASS % (__name__ + '.OwnAdam')),
        (optimizers.AdaBound, OTHER_CLASS % 'chainer.optimizers.adam.AdaBound'),
        (optimizers.AdaGrad, OTHER_CLASS % 'chainer.optimizers.ada_grad.AdaGrad'),
        (
            lambda: optimizers.Adam(adabound=True),
            "parameter '/p000' is updated by Adam with adabound=True",
        ),
        (
            lambda: optimizers.Adam(eps=1e-60),
            "parameter '/p000' is float32, for which eps=1e-60 of Adam is too small",
        ),
        (
            lambda: optimizers.RMSprop(eps=0),
            "parameter '/p000' is float32, for which eps=0 of RMSprop is too small",
        ),
    ],
)
def test_optimizers_that_are_refused(make, reason):
    assert why_unsupported(optimizer_of(make)) == reason


def put(name, value):
    return lambda optimizer: setattr(optimizer.target.p002, name, value)


def with_shared(optimizer):
    with optimizer.target.init_scope():
        optimizer.target.q = optimizer.target.p002


class OfUser(chainer.Parameter):
    def update(self):
        super().update()


def with_hook(hook, timing='auto'):
    return lambda optimizer: optimizer.add_hook(hook, timing=timing)


def with_hook_of_a_rule(timing):
    decay = hooks.WeightDecay(0.1)
    return lambda optimizer: optimizer.target.p002.update_rule.add_hook(decay, timing=timing)


def with_hooks(n):
    def add(optimizer):
        for i in range(n):
            optimizer.add_hook(hooks.Lasso(0.1), str(i))

    return add


@pytest.mark.parametrize(
    'change, reason',
    [
        (lambda optimizer: optimizer.loss_scaling(), 'the optimizer scales the loss'),
        (lambda optimizer: optimizer.set_loss_scale(8), 'the optimizer scales the loss'),
        (
            with_hook(hooks.GradientNoise(0.1)),
            "hook 'GradientNoise' of the optimizer is "
            'chainer.optimizer_hooks.gradient_noise.GradientNoise, expected one of '
            'GradientClipping, GradientHardClipping, Lasso, WeightDecay',
        ),
        (
            with_hook(hooks.WeightDecay(0.1), 'post'),
            "hook 'WeightDecay' of the optimizer runs after the update",
        ),
        (
            with_hook(hooks.GradientHardClipping(None, 1)),
            "hook 'GradientHardClipping' of the optimizer has None where a number is expected",
        ),
        (
            with_hook_of_a_rule('auto'),
            "parameter '/p002' has hook 'WeightDecay' on its update rule",
        ),
        (
            with_hook_of_a_rule('post'),
            "parameter '/p002' has hook 'WeightDecay' on its update rule",
        ),
        (
            lambda optimizer: optimizer.use_fp32_update(),
            "parameter '/p000' is updated in float32 (use_fp32_update)",
        ),
        (
            put('update_rule', RULE),
            "parameter '/p002' is updated by chainer.optimizers.sgd.SGDRule, expected AdamRule",
        ),
        (
            put('array', numpy.zeros((3, 5), 'e')),
            "parameter '/p002' is float16, expected float32 or float64",
        ),
        (with_shared, "parameter '/q' is also '/p002': it would be updated twice in a step"),
        (put('array', numpy.zeros((5, 3), 'f').T), "parameter '/p002' is not C-contiguous"),
        (with_hooks(17), 'the optimizer has 17 hooks, expected at most 16'),
        (put('_loss_scale', 2), "parameter '/p002' has a scaled gradient"),
        (
            lambda optimizer: setattr(optimizer, 'call_hooks', print),
            'the method call_hooks of the optimizer was replaced',
        ),
        (put('update', print), "parameter '/p002' has its own method update"),
        (put('__class__', OfUser), "parameter '/p002' has its own method update"),
        (
            lambda optimizer: setattr(optimizer.target.p002.update_rule, 'update_core', print),
            "parameter '/p002' is updated by a rule with its own method update_core",
        ),
    ],
)
def test_what_is_refused(change, reason):
    optimizer = optimizer_of()
    change(optimizer)
    assert why_unsupported(optimizer) == reason


@pytest.mark.parametrize('make', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_advance_over_steps_with_a_schedule(make):
    decay = hooks.WeightDecay(0.1)
    hard = hooks.GradientHardClipping(-2, 3)
    optimizer = optimizer_of(make, add_hooks=(decay, hard))
    plain = optimizer_of(make)
    rate = 'lr' if 'lr' in optimizer.hyperparam.__dict__ else 'alpha'
    for param in (optimizer.target.p002, plain.target.p002):
        setattr(param.update_rule.hyperparam, rate, 0.5)
    update = FusedUpdate(optimizer)
    for step in range(5):
        decay.rate = 0.1 * step
        for each in (optimizer, plain):
            setattr(each, rate, getattr(each, rate) * 0.9)
            each.target.p000.update_rule.enabled = step != 1
            each.target.p003.update_rule.enabled = step > 2
            each.target.cleargrads()
        plain.update()
        update.variants()
        numbers = update.advance()
        assert numbers.dtype == numpy.float64 and numbers.shape == (update.n_numbers,)
        assert numbers[:4].tolist() == [0.1 * step, 0, -2, 3]
        assert optimizer.t == plain.t == step + 1
        rows = numbers[4:].reshape(4, -1)
        for param, expected, row in zip(optimizer.target.params(), plain.target.params(), rows):
            rule = expected.update_rule
            assert param.update_rule.t == rule.t
            if not rule.enabled:
                continue
            assert row[0] == (rule.hyperparam.lr if rate == 'lr' else rule.alpha_t)
            if rate == 'alpha':
                hp = rule.hyperparam
                others = hp.eps, hp.eta, hp.weight_decay_rate
                assert row[1:].tolist() == [1 - hp.beta1, 1 - hp.beta2, *others]


def test_variants_follow_what_a_graph_cannot():
    optimizer = optimizer_of()
    update = FusedUpdate(optimizer)
    before = update.variants()
    optimizer.alpha = 0.5
    assert update.advance() is not update.advance()  # another array
    assert update.variants() == before and hash(before) is not None
    optimizer.target.p002.update_rule.enabled = False
    disabled = update.variants()
    optimizer.target.p003.update_rule.hyperparam.amsgrad = True
    other = update.variants()
    optimizer.hyperparam.adabound = True  # leads to a new capture, which is refused
    assert len({before, disabled, other, update.variants()}) == 4
    assert 'adabound' in why_unsupported(optimizer)


def test_hyperparameters_of_one_rule_are_seen_though_nothing_else_changed():
    optimizer = optimizer_of()
    update = FusedUpdate(optimizer)
    before = update.variants()
    own = optimizer.target.p002.update_rule.hyperparam
    own.eps = 0.5
    assert update.variants() == before
    assert update.advance().reshape(4, -1)[:, 3].tolist() == [1e-8, 1e-8, 0.5, 1e-8]
    own.amsgrad = True
    assert update.variants() != before
    del own.eps, own.amsgrad
    assert update.variants() == before
    assert set(update.advance().reshape(4, -1)[:, 3]) == {1e-8}


def rates(update):
    """Return the learning rate of each parameter in the next step."""
    update.variants()
    return update.advance().reshape(4, -1)[:, 0].tolist()


def test_hyperparameters_that_are_replaced():
    optimizer = optimizer_of(lambda: optimizers.SGD(0.25))
    update = FusedUpdate(optimizer)
    assert rates(update) == [0.25] * 4
    rule = optimizer.target.p002.update_rule
    rule.hyperparam = chainer.optimizer.Hyperparameter(optimizer.hyperparam)
    rule.hyperparam.lr = 0.5
    assert rates(update) == [0.25, 0.25, 0.5, 0.25]
    rule.hyperparam.__dict__ = {'_parent': optimizer.hyperparam, 'lr': 0.75}
    assert rates(update) == [0.25, 0.25, 0.75, 0.25]
    other = chainer.optimizer.Hyperparameter()
    vars(other).update(lr=2.0)
    rule.hyperparam.__dict__ = {'_parent': other}
    assert rates(update) == [0.25, 0.25, 2, 0.25]
    rule.enabled = False
    assert rates(update) == [0.25, 0.25, 0, 0.25]


def test_a_parameter_that_was_frozen_for_some_steps_has_its_own_counter():
    optimizer = optimizer_of()
    plain = optimizer_of()
    update = FusedUpdate(optimizer)
    for is_enabled in (True, False, True):
        for each in (optimizer, plain):
            each.target.p002.update_rule.enabled = is_enabled
        plain.target.cleargrads()
        plain.update()
        found = rates(update)
    expected = [param.update_rule.alpha_t for param in plain.target.params()]
    assert found == expected and len(set(expected)) == 2


def test_a_parameter_without_an_update_rule():
    optimizer = optimizer_of(lambda: optimizers.SGD(0.25))
    optimizer.target.p002.update_rule = None
    update = FusedUpdate(optimizer)
    assert rates(update) == [0.25, 0.25, 0, 0.25]
    assert update.variants()[2] is None


def test_scratch_memory_stays(monkeypatch):
    """Captured graphs keep writing to scratch memory, even if others are prepared later."""
    monkeypatch.setattr(fused_update.cuda, 'cupy', numpy)
    monkeypatch.setattr(FusedUpdate, 'load_kernels', lambda self: None)
    optimizer = optimizer_of(add_hooks=HOOKS['clipping first'])
    update = FusedUpdate(optimizer)
    update.prepare()
    before = update._partials[0]
    optimizer.target.p002.update_rule.enabled = False
    update.prepare()
    assert update._partials[0] is before


def test_scratch_memory_holds_the_sums_of_all_launches(monkeypatch):
    """Many parameters of two dtypes need several launches, each with the most blocks."""
    n_left = []  # elements behind the sums of a launch

    def run(name, like, plan, table, rates, before, after, **others):
        if after is not None:
            n_left.append(len(after) - plan.grid[0])

    link = link_of(numpy, 'f', [(3,)] * 75)
    with link.init_scope():
        for i in range(75):
            setattr(link, 'q%03d' % i, chainer.Parameter(numpy.zeros(3)))
    monkeypatch.setattr(fused_update.cuda, 'cupy', numpy)
    monkeypatch.setattr(fused_update, 'run', run)
    monkeypatch.setattr(FusedUpdate, 'load_kernels', lambda self: None)
    monkeypatch.setattr(fused_update, 'own_gradients', list)
    monkeypatch.setattr(FusedUpdate, '_table', lambda *args: (None, 10**6))
    update = FusedUpdate(optimizer_of(link=link, add_hooks=HOOKS['clipping last']))
    update.prepare()
    update.launch(update.advance())
    assert len(n_left) == 4 and min(n_left) >= 0  # two launches for each dtype


def interrupted(function, n):
    """Call a function, interrupted at its nth instruction; return whether it has that many."""

    def trace(frame, event, argument):
        nonlocal n
        frame.f_trace_opcodes = True
        if event == 'opcode' and frame.f_code.co_filename == fused_update.__file__:
            n -= 1
            if not n:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    'state, got',
    [
        (None, 'NoneType, None of shape None'),
        (numpy.zeros((2, 2), 'f'), 'ndarray, float32 of shape (2, 2)'),
        (numpy.zeros((2, 4), 'f'), 'ndarray, float32 of shape (2, 4)'),
        (numpy.zeros((2, 3), 'd'), 'ndarray, float64 of shape (2, 3)'),
        (numpy.zeros((2, 3), 'e'), 'ndarray, float16 of shape (2, 3)'),
        (numpy.zeros((3, 2), 'f').T, 'ndarray, float32 of shape (2, 3)'),
    ],
)
def test_a_state_that_a_launch_cannot_take(state, got):
    """A user's code, or a snapshot of another model, may have put it there."""
    param = chainer.Parameter(numpy.ones((2, 3), 'f'), name='W')
    rule = types.SimpleNamespace(state={'m': numpy.zeros((2, 3), 'f'), 'v': state})
    assert fused_update._state(rule, 'm', param) is rule.state['m']
    message = (
        "state 'v' of a parameter 'W': expected a C-contiguous array on its device, float32 of "
        'shape (2, 3), got ' + got
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        fused_update._state(rule, 'v', param)


def test_an_interrupt_while_counting():
    """All counters go up, or none, so that the optimizer's counter shows whether to count back."""
    optimizer = optimizer_of(add_hooks=[hooks.WeightDecay(0.1)])
    update = FusedUpdate(optimizer)
    found = []
    while interrupted(update.advance, len(found) + 1):
        found.append(optimizer.t)
        assert {param.update_rule.t for param in optimizer.target.params()} == {optimizer.t}
        update.count(-optimizer.t)
        assert {param.update_rule.t for param in optimizer.target.params()} == {0}
    assert {*found} == {0, 1}


# The tests below run on a GPU. Chainer's kernels have the same formulas, but the compiler may
# round a product and sum once or twice. Chainer sums the norm of float32 gradients in float32,
# our kernels in float64.
BOUND = {'f': 2e-6, 'd': 1e-14}
SHAPES = ((), (0,), (3, 5), (1024,), (1025,), (2, 1025), (300, 1000))


def give_gradients(step, *links):
    rng = numpy.random.RandomState(step)
    for params in zip(*(link.params(False) for link in links)):
        gradient = rng.normal(size=params[0].shape).astype(params[0].dtype)
        for param in params:
            param.cleargrad()
            if param.name != 'p003':
                param.grad = cuda.cupy.asarray(gradient)


def two_optimizers(make, dtype, shapes=SHAPES, add_hooks=()):
    return [optimizer_of(make, link_of(cuda.cupy, dtype, shapes), add_hooks) for _ in range(2)]


def assert_same_steps(ours, theirs, n_steps):
    """Compare updates by our launches with Chainer's after each step."""
    update = FusedUpdate(ours)
    update.prepare()
    for step in range(n_steps):
        give_gradients(step, ours.target, theirs.target)
        update.launch(cuda.cupy.asarray(update.advance()))
        theirs.update()
        assert_same_update(ours.target, theirs.target, BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize('add_hooks', HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize('dtype', 'fd')
@pytest.mark.parametrize('make', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_launch_equals_chainer(make, dtype, add_hooks):
    ours, theirs = two_optimizers(make, dtype, add_hooks=add_hooks)
    for each in (ours, theirs):
        each.target.p004.update_rule.enabled = False
    assert_same_steps(ours, theirs, 5)


@pytest.mark.gpu
def test_gradient_that_is_not_contiguous():
    ours, theirs = two_optimizers(optimizers.SGD, 'd', add_hooks=HOOKS['clipping last'])
    update = FusedUpdate(ours)
    update.prepare()
    give_gradients(0, ours.target, theirs.target)
    ours.target.p002.grad = cuda.cupy.asfortranarray(ours.target.p002.grad)
    update.launch(cuda.cupy.asarray(update.advance()))
    theirs.update()
    assert_same_update(ours.target, theirs.target, BOUND)


def test_parameters_in_one_array_or_with_one_rule():
    model = chainer.Sequential(chainer.links.Linear(2, 2), chainer.links.Linear(2, 2))
    optimizer = optimizers.Adam().setup(model)
    assert why_unsupported(optimizer) is None
    rule = model[1].b.update_rule
    model[1].b.update_rule = model[0].b.update_rule
    assert why_unsupported(optimizer) == "parameter '/1/b' has the update rule of '/0/b'"
    model[1].b.update_rule = rule
    model[1].W.array = model[0].W.array[::1]
    assert why_unsupported(optimizer) == "parameter '/1/W' shares memory with '/0/W'"


@pytest.mark.parametrize(
    'kind, name',
    [
        (chainer.optimizer_hooks.WeightDecay, '__call__'),
        (chainer.optimizers.adam.AdamRule, 'update_core_gpu'),
        (chainer.GradientMethod, 'update'),
    ],
)
def test_methods_that_a_script_replaces_in_a_class(monkeypatch, kind, name):
    optimizer = optimizers.Adam().setup(chainer.links.Linear(2, 2))
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    monkeypatch.setattr(kind, name, lambda *args: None)
    assert why_unsupported(optimizer).startswith('the method %s of ' % name)
