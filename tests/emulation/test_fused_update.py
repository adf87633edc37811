import numpy
import pytest

import chainer
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from chainer.backends import cuda

from chainer_bspmm.training import fused_update
from chainer_bspmm.training.fused_update import FusedUpdate

from tests.support.training import assert_same_update

OPTIMIZERS = {
    'SGD': lambda: optimizers.SGD(0.1),
    'MOMENTUM_SGD': lambda: optimizers.MomentumSGD(0.1, 0.8),
    'RMSPROP': lambda: optimizers.RMSprop(0.02, 0.9, 1e-3),
    'RMSPROP_EPS_INSIDE': lambda: optimizers.RMSprop(0.02, 0.9, 1e-3, eps_inside_sqrt=True),
    'ADAM': lambda: optimizers.AdamW(0.02, eta=0.7, weight_decay_rate=0.01),
    'AMSGRAD': lambda: optimizers.AMSGrad(0.02, beta2=0.9),
}
CHUNK = {'f': 1024, 'd': 512}
# A step rounds a number about ten times, and Chainer computes the same formulas in another order on
# the CPU.
BOUND = {'f': 50 * 2**-24, 'd': 1e-14}
SHAPES = ((), (0,), (1,), (3, 5), (1024,), (1025,), (3, 0), (2, 1025))


def links(device, dtypes, shapes):
    """Return two links with equal parameters, one of them with arrays on the emulated device.

    The parameter `late` of both is not initialised.
    """
    rng = numpy.random.RandomState(0)
    ours, theirs = chainer.Link(), chainer.Link()
    for i, shape in enumerate(shapes):
        array = rng.normal(size=shape).astype(dtypes[i % len(dtypes)])
        for link, own in ((ours, device.put(array)), (theirs, numpy.array(array))):
            with link.init_scope():
                setattr(link, 'p%03d' % i, chainer.Parameter(own))
    for link in (ours, theirs):
        with link.init_scope():
            link.late = chainer.Parameter()
    return ours, theirs


def normal(rng, shape):
    return rng.normal(size=shape)


def check(
    device, make, dtypes, shapes=SHAPES, add_hooks=(), n_steps=5, change=None, gradient=normal
):
    """Compare parameters, gradients, states and counters after steps; return Chainer's link.

    The parameter `late` gets its array in the second step, p003 has no gradient, `alone` no rule.
    """

    links_ = links(device, dtypes, shapes)
    ours, theirs = (make().setup(link) for link in links_)
    both = (ours, device.put), (theirs, numpy.array)
    for optimizer, put in both:
        for i, hook in enumerate(add_hooks):
            optimizer.add_hook(hook, str(i))
        with optimizer.target.init_scope():
            optimizer.target.alone = chainer.Parameter(put(numpy.ones(2, dtypes[0])))
    update = FusedUpdate(ours)
    rng = numpy.random.RandomState(1)
    for step in range(n_steps):
        for optimizer, put in both:
            if step == 1:
                optimizer.target.late.array = put(numpy.arange(3, dtype=dtypes[0]))
            optimizer.target.cleargrads()
            if change:
                change(step, optimizer)
        for own, other in zip(ours.target.params(), theirs.target.params()):
            if other.array is not None and other.name != 'p003':
                other.grad = numpy.asarray(gradient(rng, other.shape), other.dtype)
                own.grad = device.put(other.grad)
        ours.reallocate_cleared_grads()
        update.prepare()
        device.reachable = []
        for param in ours.target.params(False):
            state = (param.update_rule and param.update_rule.state) or {}
            device.reachable += [param.array, param.grad, *state.values()]
        update.launch(device.put(update.advance()))
        theirs.update()
        assert ours.t == theirs.t == step + 1
        assert_same_update(ours.target, theirs.target, BOUND)
    return links_[1]


def schedule(step, optimizer):
    hp = optimizer.hyperparam
    for name in ('lr', 'alpha'):
        if name in hp.__dict__ and not (name == 'alpha' and 'lr' in hp.__dict__):
            setattr(hp, name, getattr(hp, name) * (0.5 if step == 2 else 1.1))


@pytest.mark.parametrize('dtype', 'fd')
@pytest.mark.parametrize('variant', OPTIMIZERS)
def test_five_steps(device, variant, dtype):
    start = links(device, dtype, SHAPES)[1]
    link = check(device, OPTIMIZERS[variant], dtype, change=schedule)
    del link.alone
    for param, before in zip(link.params(), start.params()):
        if param.size and param.name not in ('p003', 'late'):
            assert (param.array != before.array).any(), param.name
    launches = [(launch['RULE'], launch['CHUNK']) for launch in device.launched]
    assert launches == 5 * [(variant, CHUNK[dtype])]


ELEMENTWISE = (hooks.WeightDecay(0.1), hooks.Lasso(0.02), hooks.GradientHardClipping(-1.2, 0.9))
ACTIVE, INACTIVE = hooks.GradientClipping(1.5), hooks.GradientClipping(1e4)


@pytest.mark.parametrize(
    'add_hooks',
    [
        ELEMENTWISE,
        ELEMENTWISE[::-1],
        (ACTIVE,),
        (INACTIVE,),
        (*ELEMENTWISE, ACTIVE),
        (ACTIVE, *ELEMENTWISE),
        (*ELEMENTWISE[:2], ACTIVE, ELEMENTWISE[2]),
        (*ELEMENTWISE, INACTIVE),
        (ELEMENTWISE[0], ACTIVE, ELEMENTWISE[1], hooks.GradientClipping(0.5), ELEMENTWISE[2]),
    ],
    ids=lambda add_hooks: '-'.join(type(hook).__name__ for hook in add_hooks),
)
def test_hooks(device, add_hooks):
    dtype = 'f' if len(add_hooks) == 4 else 'd'
    check(device, OPTIMIZERS['SGD'], dtype, SHAPES[:6], add_hooks, n_steps=2)
    n_clippings = sum(type(hook) is hooks.GradientClipping for hook in add_hooks)
    rules = [launch['RULE'] for launch in device.launched]
    assert rules == 2 * (n_clippings * ['NONE'] + ['NONE', 'SGD'])  # the last NONE is for `alone`


def test_hooks_whose_numbers_change(device):
    decay, clipping = hooks.WeightDecay(0.1), hooks.GradientClipping(3.0)

    def change(step, optimizer):
        decay.rate = 0.1 * step
        clipping.threshold = (1e4, 0.5, 1.0)[step]

    check(device, OPTIMIZERS['ADAM'], 'd', SHAPES[:5], (decay, clipping), 3, change)


def test_more_parameters_than_blocks(device, monkeypatch):
    monkeypatch.setattr(fused_update, '_MAX_BLOCKS', 7)
    shapes = [(1 + i % 5,) for i in range(200)]
    check(device, OPTIMIZERS['ADAM'], 'f', shapes, (ELEMENTWISE[0], ACTIVE), n_steps=2)
    rules = [launch['RULE'] for launch in device.launched]
    assert rules == 2 * (4 * ['NONE'] + 3 * ['ADAM'])


def test_both_dtypes_in_one_norm(device):
    # Chainer sums the float32 part of the norm in float32, which is exact for integers.
    check(
        device,
        OPTIMIZERS['MOMENTUM_SGD'],
        'fd',
        SHAPES[:6],
        (ACTIVE,),
        n_steps=2,
        gradient=lambda rng, shape: rng.randint(-3, 4, shape),
    )


@pytest.mark.parametrize('add_hooks', [(), (ELEMENTWISE[0], ACTIVE)], ids=['plain', 'hooks'])
def test_parameters_that_are_not_updated(device, add_hooks):
    """As in Chainer, hooks and the norm include them, but their data and counters stay."""

    def change(step, optimizer):
        if step == 1:
            optimizer.target.p002.update_rule.enabled = False
        if step == 2:
            optimizer.target.p002.update_rule.enabled = True
            optimizer.target.p005.update_rule.enabled = False

    check(device, OPTIMIZERS['ADAM'], 'd', SHAPES[:6], add_hooks, n_steps=4, change=change)


def test_hyperparameters_of_one_rule(device):
    def change(step, optimizer):
        optimizer.target.p002.update_rule.hyperparam.alpha = 0.3
        if step == 1:
            optimizer.target.p004.update_rule.t += 5

    check(device, OPTIMIZERS['ADAM'], 'd', SHAPES[:6], n_steps=3, change=change)


def test_one_rule_with_a_variant_of_its_own(device):
    def change(step, optimizer):
        optimizer.target.p002.update_rule.hyperparam.amsgrad = True

    check(device, OPTIMIZERS['ADAM'], 'd', SHAPES[:4], n_steps=2, change=change)
    assert {launch['RULE'] for launch in device.launched} == {'ADAM', 'AMSGRAD'}


@pytest.mark.parametrize('dtype', 'fd')
def test_sign_of_parameters_that_have_none(device, dtype):
    """Lasso leaves the gradients of 0 and -0 alone, and the gradient of NaN becomes NaN."""

    def change(step, optimizer):
        optimizer.target.p000.array[...] = [0.0, -0.0, numpy.nan, 2, -2, 3]

    check(device, OPTIMIZERS['SGD'], dtype, [(6,)], (hooks.Lasso(0.5),), 1, change)


@pytest.mark.parametrize('value', [0.0, numpy.nan, numpy.inf])
def test_norms_that_are_no_numbers(device, value):
    check(
        device,
        OPTIMIZERS['SGD'],
        'd',
        SHAPES[:5],
        (ACTIVE,),
        n_steps=1,
        gradient=lambda rng, shape: numpy.full(shape, value),
    )


def test_parameters_that_share_a_gradient(device, monkeypatch):
    """The parameters of ``V + W`` share one, but hooks must clip and decay each one separately."""
    ours, theirs = (OPTIMIZERS['SGD']().setup(link) for link in links(device, 'd', SHAPES[3:5] * 2))
    rng = numpy.random.RandomState(1)
    device.reachable = []
    copied = []

    def copy(array, order):
        copied.append(device.put(array))
        device.reachable.append(copied[-1])
        return copied[-1]

    monkeypatch.setattr(cuda.cupy, 'array', copy)
    for optimizer in (ours, theirs):
        optimizer.add_hook(ELEMENTWISE[0])
        optimizer.add_hook(ACTIVE)
    for names in (('p000', 'p002'), ('p001', 'p003')):
        gradient = rng.normal(size=getattr(ours.target, names[0]).shape)
        shared = device.put(gradient)
        for name in names:
            getattr(ours.target, name).grad = shared
            getattr(theirs.target, name).grad = gradient.copy()
    del ours.target.late, theirs.target.late
    update = FusedUpdate(ours)
    update.prepare()
    for param in ours.target.params():
        device.reachable += [param.array, param.grad]
    update.launch(device.put(update.advance()))
    theirs.update()
    assert len(copied) == 2
    assert_same_update(ours.target, theirs.target, BOUND)
