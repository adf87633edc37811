"""Models, examples and updaters for tests of captured training."""

import collections
import types

import numpy

import chainer_bspmm
import chainer
from chainer import functions, optimizers
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.prediction import Classifier, GraphConvPredictor, Regressor

from chainer_bspmm import models
from chainer_bspmm.training import GraphUpdater
from tests.support import assert_close_arrays

BATCH = 8
HOST = chainer.get_device('@numpy')
MODELS = {
    'RSGCN': lambda: models.RSGCN(5, 8, 3),
    'RSGCN, batch norm': lambda: models.RSGCN(5, 8, 3, use_batch_norm=True),
    'RelGCN': lambda: models.RelGCN(5, hidden_channels=[8, 8]),
    'GGNN': lambda: models.GGNN(5, 8, n_update_layers=2),
    'GIN': lambda: models.GIN(8, hidden_channels=8, n_update_layers=2),
    'NFP': lambda: models.NFP(5, 8, n_update_layers=2),
}
RELATIONS = {'RelGCN': 4, 'GGNN': 4}


class _Hidden(types.ModuleType):
    @property
    def value(self):
        return vars(self)['a name that no code has']

    @value.setter
    def value(self, value):
        vars(self)['a name that no code has'] = value

    def __deepcopy__(self, memo):
        return hidden(self.value)


def hidden(value):
    """Return an object whose attribute `value` is not watched, because it is a library's module."""
    module = _Hidden('ctypes.hidden')
    module.value = value
    return module


def calls_of_the_first_check(device):
    """Return the number of runs of a correct loss, in this process, by the check of the first step.

    On the host the check runs it in other processes.
    """
    return 0 if device.xp is numpy else 2


def molecules(n, n_relations=1, seed=0, classes=False):
    """Return examples (atoms, adj, label) of 1 to 12 atoms with random bonds."""
    rng = numpy.random.RandomState(seed)
    examples = []
    for _ in range(n):
        size = rng.randint(1, 13)
        adj = rng.uniform(size=(n_relations, size, size)) < 2.5 / size / n_relations
        adj = numpy.maximum(adj, adj.transpose(0, 2, 1)).astype('f') / 3
        atoms = rng.randint(1, 20, size).astype('i')
        label = (
            rng.randint(-1, 2, 3).astype('i')
            if classes
            else (atoms.sum() / 50 + rng.normal(size=3)).astype('f')
        )
        examples.append((atoms, adj if n_relations > 1 else adj[0], label))
    return examples


def same_molecules(n=BATCH):
    """Return examples of equal size, so that all full batches have one form."""
    return [example for example in molecules(400) if len(example[0]) == 5][:n]


class Row(chainer.Chain):
    """Model that calls a function of (itself, atoms, adj); tests may change `counter`."""

    def __init__(self, function, predictor=None):
        super().__init__()
        self.function = function
        self.counter = 0
        with self.init_scope():
            self.inner = predictor or MODELS['RSGCN']()

    def forward(self, atoms, adj):
        return self.function(self, atoms, adj)


def three_columns(link, atoms, adj):
    return link.inner(atoms, adj)[:, :3]


def mean_of_rows(link, atoms, adj):
    """Return three columns plus a mean over all rows, including spare ones."""
    h = functions.mean(link.inner.embed(atoms), axis=0)
    return functions.broadcast_to(h[None, :3], (adj.n_graphs, 3)) + three_columns(link, atoms, adj)


def counting(link, atoms, adj):
    """Return three columns, and change an attribute."""
    link.counter += 1
    return three_columns(link, atoms, adj)


def reading_the_last(link, atoms, adj):
    """Return three columns plus half of the last result, which `link.last` keeps."""
    last = link.last
    y = three_columns(link, atoms, adj)
    link.last = y.array
    return y if last is None else y + 0.5 * last


def small_model(function=three_columns, lossfun=functions.mean_squared_error, **attributes):
    numpy.random.seed(0)
    row = Row(function)
    for name, value in attributes.items():
        setattr(row, name, value)
    return Regressor(row, lossfun=lossfun)


def make_model(name='RSGCN', classes=False, seed=0, lossfun=functions.mean_squared_error):
    numpy.random.seed(seed)
    predictor = GraphConvPredictor(MODELS[name](), MLP(3, hidden_dim=8))
    if classes:
        return Classifier(
            predictor,
            lossfun=functions.sigmoid_cross_entropy,
            metrics_fun=functions.binary_accuracy,
        )
    return Regressor(predictor, lossfun=lossfun, metrics_fun={'mae': functions.mean_absolute_error})


def without_dropout(model):
    for link in model.links():
        if getattr(link, 'dropout_ratio', 0):
            link.dropout_ratio = 0.0
    return model


def make_updater(
    kind, device, model=None, examples=None, optimizer=None, hooks=(), batch_size=BATCH, **kwargs
):
    """Return an updater, by default of :func:`small_model` with :func:`same_molecules`."""
    model = small_model() if model is None else model
    examples = same_molecules() if examples is None else examples
    optimizer = (optimizer or optimizers.Adam()).setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    numpy.random.seed(3)
    if device.xp is not numpy:
        device.xp.random.seed(3)  # layers that learn their input size are initialised there
    iterator = SerialIterator(examples, batch_size)
    kwargs.setdefault('converter', chainer_bspmm.concat_mols)
    if kind is GraphUpdater:
        kwargs.setdefault('seed', 7)
        kwargs.setdefault('on_difference', 'raise')
    return kind(iterator, optimizer, device=device, **kwargs)


def run(updater, n_steps):
    """Update `n_steps` times; return a list of dicts of the values that each step has reported."""
    reporter = chainer.Reporter()
    reported = []
    target = updater.get_optimizer('main').target
    reporter.add_observer('main', target)
    reporter.add_observers('main', target.namedlinks(skipself=True))
    for _ in range(n_steps):
        observation = {}
        with reporter.scope(observation):
            updater.update()
        reported.append(
            {name: float(getattr(value, 'array', value)) for name, value in observation.items()}
        )
    return reported


def parameters(updater):
    return {
        name: cuda.to_cpu(param.array).copy()
        for name, param in updater.get_optimizer('main').target.namedparams(include_uninit=False)
    }


def assert_same_training(make, n_steps=6, between=lambda updater: None, bound=1e-5):
    """Train with both kinds of updaters and compare parameters; return the GraphUpdater.

    ``make(kind)`` makes an updater, ``between(updater)`` is called after each step.
    """
    found = []
    for kind in (StandardUpdater, GraphUpdater):
        updater = make(kind)
        for _ in range(n_steps):
            run(updater, 1)
            between(updater)
        found.append(parameters(updater))
    assert_close_arrays(found[1], found[0], bound)
    return updater


def is_captured(updater):
    return any(program.is_captured for program in updater._driver.programs.values())


def of_variables(batch, device=None):
    """Convert a batch, with labels as a Variable."""
    atoms, adj, labels = chainer_bspmm.concat_mols(batch, device)
    return atoms, adj, chainer.Variable(labels)


def assert_same_bits(found, expected):
    """Check that two dicts name -> array have the same bits."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name


def n_keys(updater):
    """Return the number of different keys of the guards in the keys of programs."""
    return len({layout[-1] for layout in updater._driver.programs})


def assert_same_update(ours, theirs, bounds):
    """Compare parameters, gradients, states and counters of two links.

    bounds: letter of a dtype -> error, relative to the largest element of all parameters, of all
    gradients, of all states m, ...: in an average of gradients, single elements may cancel.
    """
    groups = collections.defaultdict(list)  # (kind, dtype) -> pairs of arrays
    for own, other in zip(ours.params(False), theirs.params(False), strict=True):
        pairs = {'data': (own.array, other.array), 'grad': (own.grad, other.grad)}
        rule, expected = own.update_rule, other.update_rule
        if expected is not None:
            assert rule.t == expected.t
            assert (rule.state is None) == (expected.state is None)
            assert set(rule.state or ()) == set(expected.state or ())
            for name, state in (expected.state or {}).items():
                pairs[name] = rule.state[name], state
        for kind, pair in pairs.items():
            groups[kind, other.dtype].append(pair)
    for (_, dtype), arrays in groups.items():
        actual, wanted = (
            numpy.concatenate([cuda.to_cpu(array).ravel() for array in side])
            for side in zip(*arrays)
        )
        bound = bounds[dtype.char] * numpy.nan_to_num(abs(wanted)).max()
        numpy.testing.assert_allclose(actual, wanted, rtol=0, atol=bound)
