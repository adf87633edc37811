"""Updates on a host by one call for many parameters: the bits of Chainer's, one by one."""

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions as F
from chainer import links as L
from chainer import optimizers
from chainer.optimizer_hooks import GradientClipping
from chainer.optimizer_hooks import WeightDecay

from chainer_bspmm.training import joint_update

X = numpy.random.RandomState(1).normal(size=(6, 5)).astype('f')


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.second, self.third = L.Linear(5, 7), L.Linear(None, 3), L.Linear(3)
            self.unused = chainer.Parameter(numpy.ones((2, 0, 3), 'f'))
            self.scale = chainer.Parameter(numpy.array(2, 'f'))
            self.double = chainer.Parameter(numpy.arange(3.0))
            self.half = chainer.Parameter(numpy.ones(3, 'e'))

    def forward(self, x):
        y = self.third(F.relu(self.second(F.tanh(self.first(x)))))
        y = y * F.broadcast_to(self.scale, y.shape)
        y += F.cast(F.broadcast_to(self.double * F.cast(self.half, 'd'), y.shape), 'f')
        return F.sum(y * y)


class Own(chainer.optimizers.Adam):
    def update(self, *args, **kwargs):
        super().update(*args, **kwargs)
        self.n_updates = getattr(self, 'n_updates', 0) + 1


def hooks(optimizer):
    optimizer.add_hook(WeightDecay(0.01))
    optimizer.add_hook(GradientClipping(0.5))


def options(optimizer):
    net = optimizer.target
    net.first.W.update_rule.hyperparam.alpha = 0.1
    net.first.b.update_rule.enabled = False
    net.second.b.update_rule.add_hook(lambda rule, param: param.grad.fill(1), name='ones')
    net.third.b.update_rule = None
    net.scale.update_rule.t = 5


def later(optimizer):
    optimizer.use_cleargrads(False)
    optimizer.add_hook(lambda opt: opt.target.first.cleargrads(), 'clear', timing='post')


def shared(optimizer):
    net = optimizer.target
    with net.init_scope():
        net.again = net.first  # updated twice
    net.cleargrads()


def views(optimizer):
    net, both = optimizer.target, numpy.ones(3, 'f')
    net.third.b.array, net.second.b.array = both[:], both[::-1]


CASES = {
    'Adam': (optimizers.Adam, None),
    'AdamW': (lambda: optimizers.AdamW(weight_decay_rate=0.1), None),
    'AMSGrad': (optimizers.AMSGrad, None),
    'AdaBound': (optimizers.AdaBound, None),
    'SGD': (optimizers.SGD, None),
    'its own update': (Own, None),
    'hooks': (optimizers.Adam, hooks),
    'options of parameters': (optimizers.Adam, options),
    'a shared link': (optimizers.Adam, shared),
    'shared memory': (optimizers.Adam, views),
    'hooks at the end': (optimizers.Adam, later),
}


@pytest.mark.parametrize('name', CASES)
def test_the_bits_of_chainers_update(name):
    make, change = CASES[name]
    found = []
    for update in (joint_update.update, lambda optimizer, *args: optimizer.update(*args)):
        numpy.random.seed(0)
        optimizer = make().setup(Net())
        if change is not None:
            change(optimizer)
        for _ in range(5):
            update(optimizer, optimizer.target, X)
        values = {'t': optimizer.t, 'updates': getattr(optimizer, 'n_updates', 0)}
        for path, param in optimizer.target.namedparams():
            values[path] = param.array.tobytes(), param.grad.tobytes()
            rule = param.update_rule
            if rule is not None:
                state = {key: value.tobytes() for key, value in (rule.state or {}).items()}
                values['rule of ' + path] = rule.t, state
        found.append(values)
    assert found[0] == found[1]


def test_parameters_that_are_alike_are_updated_at_once(monkeypatch):
    together = []
    at_once = joint_update._update_at_once
    monkeypatch.setattr(
        joint_update,
        '_update_at_once',
        lambda params: together.append([param.size for param in params]) or at_once(params),
    )
    optimizer = optimizers.Adam().setup(Net())
    for _ in range(2):
        joint_update.update(optimizer, optimizer.target, X)
    # One by one at first, where states are made.
    assert sorted(map(len, together)) == [1, 1, 8]
