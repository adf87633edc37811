"""Warnings of losses that take rows of a sparse batch for molecules; silence for right losses.

Each case trains two steps as a user's script does, by the two lines; how the package finds a
mistake does not matter here. `WRONG` must get a warning and `RIGHT` none, and the check must not
change anything.
"""

import argparse
import contextlib
import logging
import random
import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import function_hooks, functions as F, link_hooks, links as L, optimizers
from chainer.iterators import SerialIterator
from chainer.training.updaters import ParallelUpdater, StandardUpdater
from chainer_chemistry.links import EmbedAtomID, GeneralReadout, GGNNUpdate
from chainer_chemistry.models import RSGCN
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.prediction import Classifier, GraphConvPredictor, Regressor
from chainer_chemistry.models.prediction import set_up_predictor

from chainer_bspmm import CSRConverter, functions
from chainer_bspmm.dataset import dense_examples, to_sparse
from tests.support.devices import slow_unless
from tests.support.training import assert_same_bits, HOST, parameters, run

args = argparse.Namespace(weight=0.5)
logger = logging.getLogger(__name__)
TASKS = ['logp', 'tpsa']
CFG = {'weight': 0.5}
CLASS_WEIGHTS = numpy.array([0.5, 2.0], 'f')
N_LABELS = 2


@pytest.fixture(autouse=True)
def as_a_user_has_it(monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'bspmm_capture', True)


def examples(n=12, n_relations=4, sizes=(1, 12), labels=None):
    """Return dense molecules; ``labels(rng, n_atoms)`` makes the label of each."""
    rng = numpy.random.RandomState(0)
    made = []
    for size in rng.randint(sizes[0], sizes[1], n):
        adj = (rng.uniform(size=(n_relations, size, size)) < 0.2).astype('f')
        adj = numpy.maximum(adj, adj.transpose(0, 2, 1))
        label = rng.uniform(1, 2, N_LABELS).astype('f') if labels is None else labels(rng, size)
        made.append((rng.randint(1, 9, size).astype('i'), adj, label))
    return made


def of_one_relation(**options):
    return [(atoms, adj[0], label) for atoms, adj, label in examples(**options)]


def with_super_nodes(given):
    """Return examples with features of a super node, as many as upstream's examples have."""
    rng = numpy.random.RandomState(1)
    return [(atoms, adj, rng.rand(248).astype('f'), label) for atoms, adj, label in given]


class Own(chainer.Chain):
    """A user's Chain around a predictor; `loss` is a function of self, y, and the batch."""

    def __init__(self, loss, **attributes):
        super().__init__()
        self.loss = loss
        with self.init_scope():
            self.predictor = chainer_bspmm.sparsify(set_up_predictor('ggnn', 8, 2, N_LABELS))
            self.weight = chainer.Parameter(2.0, (1,))
            self.late = L.Linear(None, N_LABELS)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, atoms, adj, t):
        loss = self.loss(self, self.predictor(atoms, adj), atoms, adj, t)
        chainer.report({'loss': loss}, self)
        return loss


class Layers(chainer.Chain):
    """Layers that a user has put together; `reduce` computes the loss from the rows' features."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce
        with self.init_scope():
            self.embed = EmbedAtomID(8)
            self.update = GGNNUpdate(8, 8)
            self.norm = L.BatchNormalization(8)

    def __call__(self, atoms, adj, t):
        self.update.reset_state()
        loss = self.reduce(self, self.update(self.embed(atoms), adj), adj, t)
        chainer.report({'loss': loss}, self)
        return loss


def layers(reduce):
    return chainer_bspmm.sparsify(Layers(reduce))


def regressor(method='ggnn', kind=Regressor, **options):
    options.setdefault('lossfun', F.mean_squared_error)
    return kind(chainer_bspmm.sparsify(set_up_predictor(method, 8, 2, N_LABELS)), **options)


def by_hand(updater, n_steps):
    """Train in a user's own loop, without the updater."""
    iterator, optimizer = updater.get_iterator('main'), updater.get_optimizer('main')
    for _ in range(n_steps):
        batch = updater.converter(iterator.next(), updater.device)
        optimizer.update(optimizer.target, *batch)


class Case(NamedTuple):
    """A user's script: model, converter, data, updater and loop."""

    model: Callable[[], chainer.Link]
    converter: Callable = chainer_bspmm.concat_mols
    data: Callable[[], Any] = examples
    kind: Any = StandardUpdater
    loop: Callable = run
    loss_func: Callable | None = None  # loss function of a model
    within: Callable = contextlib.nullcontext  # context manager around the steps


def updater_of(case, device):
    random.seed(0)
    numpy.random.seed(0)
    if device.xp is not numpy:
        device.xp.random.seed(0)
    model = case.model()
    data = case.data()
    optimizer = optimizers.Adam(0.01).setup(model)
    iterator = SerialIterator(data, len(data), shuffle=False)
    given: dict[str, Any] = {'converter': case.converter}
    if case.kind is ParallelUpdater:
        given['devices'] = {'main': device, 'second': device}
    else:
        given['device'] = device
    if case.loss_func is not None:
        given['loss_func'] = case.loss_func(model)
    if case.loop is by_hand:
        model.to_device(device)
    return case.kind(iterator, optimizer, **given)


def warned(case, device):
    """Train two steps by the two lines; return the texts of the warnings that a user gets."""
    updater = updater_of(case, device)
    with warnings.catch_warnings(record=True) as caught, case.within():
        warnings.simplefilter('always')
        case.loop(updater, 2)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def tells_of_rows(text):
    """Return whether a text says that results are wrong, rather than that no check was possible."""
    return 'molecule' in text and not re.search('could not|cannot be', text)


def squares(y, t):
    return F.sum((y - t) ** 2)


def over_rows(self, y, x, adj, t):
    return squares(y, t) / len(x)


def over_molecules(self, y, x, adj, t):
    return squares(y, t) / len(t)


def own(loss, **attributes):
    return lambda: Own(loss, **attributes)


def only_a_metric(self, y, x, adj, t):
    chainer.report({'mae': F.sum(abs(y - t)) / len(x)}, self)
    return F.mean_squared_error(y, t)


def a_metric_on_the_host(self, y, x, adj, t):
    error = numpy.abs(chainer.as_array(y) - t) if self.xp is numpy else self.xp.abs(y.array - t)
    chainer.report({'mae': float(error.sum()) / len(x)}, self)
    return F.mean_squared_error(y, t)


class OfArguments(Own):
    def __call__(self, atoms, adj, t):
        return super().__call__(atoms, adj, t) * args.weight


class OfLogger(Own):
    def __call__(self, atoms, adj, t):
        logger.debug('a step of %d', len(t))
        return super().__call__(atoms, adj, t)


class OfTasks(Own):
    def __call__(self, atoms, adj, t):
        return super().__call__(atoms, adj, t) / len(TASKS)


class OfDict(Own):
    def __call__(self, atoms, adj, t):
        return super().__call__(atoms, adj, t) * CFG['weight']


class OfArray(Own):
    def __call__(self, atoms, adj, t):
        return super().__call__(atoms, adj, t) * float(CLASS_WEIGHTS[0])


class OfAnotherMethod(Own):
    def plot(self):
        return [CFG, TASKS, args]


class Locked(Own):
    def __call__(self, atoms, adj, t):
        with self.lock:
            return super().__call__(atoms, adj, t)


class RowsRegressor(Regressor):
    def __call__(self, atoms, adj, t):
        loss = squares(self.predictor(atoms, adj), t) / atoms.shape[0]
        chainer.report({'loss': loss}, self)
        return loss


def convert(batch, device=None):
    return chainer_bspmm.concat_mols(batch, device)


class Converter:
    """A user's converter, which calls ours."""

    def __init__(self):
        self.inner = CSRConverter()

    def __call__(self, batch, device=None):
        return self.inner(batch, device)


class OwnConverter(CSRConverter):
    pass


class OwnUpdater(StandardUpdater):
    pass


class WrittenOut(StandardUpdater):
    def update_core(self):
        optimizer = self.get_optimizer('main')
        loss = optimizer.target(*self.converter(self.get_iterator('main').next(), self.device))
        optimizer.target.cleargrads()
        loss.backward()
        optimizer.update()


def closure(model):
    def loss_func(atoms, adj, t):
        return squares(model.predictor(atoms, adj), t) / len(atoms)

    return loss_func


def with_link_hook():
    model = Own(over_rows)
    model.predictor.add_hook(link_hooks.TimerHook())
    return model


def only_in_training(self, y, x, adj, t):
    return squares(y, t) / (len(x) if chainer.config.train else len(t))


def with_dropout(self, y, x, adj, t):
    return squares(F.dropout(y, 0.5), t) / len(x)


def softmax_over_rows(self, h, adj, t):
    return F.sum(F.softmax(h, axis=0)[0] ** 2)


def large():
    return examples(3, sizes=(66, 70))


WRONG = {
    'len(atoms)': Case(own(over_rows)),
    'atoms.shape[0]': Case(own(lambda self, y, x, adj, t: squares(y, t) / x.shape[0])),
    'atoms.size': Case(own(lambda self, y, x, adj, t: squares(y, t) / x.size)),
    'only a metric': Case(own(only_a_metric)),
    'a metric on the host': Case(own(a_metric_on_the_host)),
    'a penalty by len(atoms)': Case(own(lambda self, y, x, adj, t: F.mean(y) + 0.1 * len(x))),
    'a regulariser by len(atoms)': Case(
        own(lambda self, y, x, adj, t: F.mean((y - t) ** 2) + 0.1 * F.mean(y**2) * len(x))
    ),
    'a weight that learns': Case(
        own(lambda self, y, x, adj, t: F.sum(self.weight * len(x)) + F.mean(y))
    ),
    'the deviation of ids': Case(own(lambda self, y, x, adj, t: F.mean(y) / float(x.std()))),
    'the mean of ids': Case(own(lambda self, y, x, adj, t: F.mean(y) * float(x.mean()))),
    'copies of y': Case(
        own(lambda self, y, x, adj, t: F.mean(F.tile(y, (len(x), 1))) * len(x) ** 0.5)
    ),
    'only the gradient': Case(
        own(lambda self, y, x, adj, t: F.mean(y) + len(x) * F.sum(y - y.array))
    ),
    'a mean over all rows': Case(lambda: layers(lambda self, h, adj, t: F.mean(h))),
    'a sum over len(h)': Case(lambda: layers(lambda self, h, adj, t: F.sum(h**2) / len(h))),
    'a mean over axis 0': Case(
        lambda: layers(lambda self, h, adj, t: F.sum(F.mean(h, axis=0) ** 2))
    ),
    'the norm of rows': Case(
        lambda: layers(lambda self, h, adj, t: F.mean(F.normalize(h, axis=1)))
    ),
    'a softmax over all rows': Case(lambda: layers(softmax_over_rows)),
    'a Regressor of ones own': Case(lambda: regressor(kind=RowsRegressor)),
    'a loss function': Case(own(over_rows), loss_func=closure),
    'a function as converter': Case(own(over_rows), convert),
    'an object as converter': Case(own(over_rows), Converter()),
    'a subclass of CSRConverter': Case(own(over_rows), OwnConverter()),
    'packed batches': Case(own(over_rows), CSRConverter('packed')),
    'batches padded to a number': Case(own(over_rows), CSRConverter(padded_to=12)),
    'padded to fewer atoms': Case(own(over_rows), CSRConverter(padded_to=3)),
    'a sparse data set': Case(own(over_rows), data=lambda: to_sparse(examples())),
    'molecules of more than 64 atoms': Case(own(over_rows), data=large),
    'a subclass of StandardUpdater': Case(own(over_rows), kind=OwnUpdater),
    'a loop by hand': Case(own(over_rows), loop=by_hand),
    'a global Namespace': Case(lambda: OfArguments(over_rows)),
    'a global logger': Case(lambda: OfLogger(over_rows)),
    'a global list': Case(lambda: OfTasks(over_rows)),
    'a global dict': Case(lambda: OfDict(over_rows)),
    'a global array': Case(lambda: OfArray(over_rows)),
    'globals of another method': Case(lambda: OfAnotherMethod(over_rows)),
    'a lock': Case(lambda: Locked(over_rows, lock=threading.Lock())),
    'an open file': Case(lambda: Own(over_rows, file=tempfile.TemporaryFile())),
    'a hook of functions': Case(own(over_rows), within=function_hooks.TimerHook),
    'a hook of links': Case(with_link_hook),
    'a big attribute': Case(lambda: Own(over_rows, bank=numpy.zeros((3000, 1000), 'f'))),
    'a random loss': Case(own(with_dropout)),
}
# The check runs in test mode, and only where a script calls `optimizer.update(loss, ...)`
# (docs/limits.md).
UNSEEN = {
    'a normalisation over all rows': Case(
        lambda: layers(lambda self, h, adj, t: F.mean(self.norm(h)[0] ** 2))
    ),
    'only in training mode': Case(own(only_in_training)),
    'an updater that is written out': Case(own(over_rows), kind=WrittenOut),
}
# These cases go through the check like others that are not slow, and most of them are also in
# tests/training/test_first_step.py, which calls the functions of the check.
SLOW = {
    *('atoms.shape[0]', 'atoms.size', 'a penalty by len(atoms)', 'a weight that learns'),
    *('the deviation of ids', 'the mean of ids', 'copies of y', 'only the gradient'),
    *('a sum over len(h)', 'a mean over axis 0', 'the norm of rows', 'an object as converter'),
    *('padded to fewer atoms', 'a global logger', 'a global list', 'a global dict'),
    *('a global array', 'globals of another method', 'a big attribute'),
    *('a mean of y', 'y.shape[0]', 'adj.n_graphs', 'a layer that is made late', 'dropout'),
    *('a random weight', 'a sum that cancels', 'a loss that is NaN', 'a loss that is infinite'),
    *('a tiny loss', 'a huge loss', 'a root of the error'),
    *('relgcn', 'relgat', 'gnnfilm', 'rsgcn', 'gin', 'nfp', 'ggnn_gwm', 'rsgcn_gwm', 'nfp_gwm'),
}
# For these cases it is enough if a warning says why there was no check.
MAY_SAY_THAT_IT_CANNOT = 'a random loss', 'an open file', 'a hook of functions', 'a hook of links'


@pytest.mark.parametrize('name', [slow_unless(name not in SLOW, name) for name in WRONG])
def test_rows_that_are_taken_for_molecules(device, name):
    texts = warned(WRONG[name], device)
    assert any(map(tells_of_rows, texts)) or (texts and name in MAY_SAY_THAT_IT_CANNOT), texts


def masked(self, y, x, adj, t):
    known = self.xp.isfinite(t)
    return F.sum(F.where(known, (y - F.where(known, t, 0 * t)) ** 2, 0 * y)) / len(t)


def some_unknown(rng, size):
    """Return labels; about half of the molecules lack one."""
    label = rng.uniform(1, 2, N_LABELS).astype('f')
    if rng.uniform() < 0.5:
        label[rng.randint(N_LABELS)] = numpy.nan
    return label


def classes(rng, size):
    return rng.randint(-1, 2, N_LABELS).astype('i')


def classifier():
    return regressor(
        kind=Classifier, lossfun=F.sigmoid_cross_entropy, metrics_fun=F.binary_accuracy
    )


def of_atoms(rng, size):
    return rng.uniform(1, 2, (size, 1)).astype('f')


def loss_of_atoms(self, h, adj, t):
    """Sum labels of atoms times features over a molecule; labels of phantom atoms are 0."""
    return F.sum(F.sum(h * t, axis=-1) ** 2) / adj.n_graphs


def of_padded(self, h, adj, t):
    return F.mean(F.max(F.sum(h, axis=1), axis=1))


def by_segments(self, h, adj, t):
    return F.mean((functions.segment_sum(adj, h)[:, :N_LABELS] - t) ** 2)


def of_tied_maxima():
    model = RSGCN(8, hidden_channels=8, n_update_layers=2, readout=GeneralReadout(mode='max'))
    return Regressor(
        GraphConvPredictor(chainer_bspmm.sparsify(model), MLP(N_LABELS, 8)), F.mean_squared_error
    )


def penalised(self, y, x, adj, t):
    (gradient,) = chainer.grad([F.sum(self.late(y))], [y], enable_double_backprop=True)
    return F.mean(gradient**2) + F.mean_squared_error(y, t)


def batch_normed():
    model = RSGCN(8, hidden_channels=8, n_update_layers=2, use_batch_norm=True)
    return Regressor(
        GraphConvPredictor(chainer_bspmm.sparsify(model), MLP(N_LABELS, 8)), F.mean_squared_error
    )


def reports_numbers(self, y, x, adj, t):
    chainer.report({'n': adj.n_graphs, 'labels': len(t), 'largest': float(t.max())}, self)
    return F.mean_squared_error(y, t)


def weighted_by_class(self, y, x, adj, t):
    weights = self.xp.asarray(CLASS_WEIGHTS)
    return F.sum((y - t) ** 2 * F.broadcast_to(weights, y.shape)) / len(t)


def metric_that_is_nan(self, y, x, adj, t):
    chainer.report({'log': F.mean(F.log(-abs(y)))}, self)
    return F.mean_squared_error(y, t)


def random_weight(self, y, x, adj, t):
    return F.mean(y) * random.random() * float(numpy.random.rand())


def rmse(y, t):
    return F.sqrt(F.mean_squared_error(y, t))


RIGHT = {
    'a mean over labels': Case(own(over_molecules)),
    'a mean of y': Case(own(lambda self, y, x, adj, t: F.mean(y - t))),
    'y.shape[0]': Case(own(lambda self, y, x, adj, t: squares(y, t) / y.shape[0])),
    'adj.n_graphs': Case(own(lambda self, y, x, adj, t: squares(y, t) / adj.n_graphs)),
    'a layer that is made late': Case(
        own(lambda self, y, x, adj, t: F.mean((self.late(y) - t) ** 2))
    ),
    'a parameter': Case(
        own(lambda self, y, x, adj, t: F.mean(F.broadcast_to(self.weight, y.shape) * y))
    ),
    'dropout': Case(own(lambda self, y, x, adj, t: F.sum(F.dropout(y - t)))),
    'a random weight': Case(own(random_weight)),
    'a sum that cancels': Case(
        own(lambda self, y, x, adj, t: 1e3 * F.sum(y - F.broadcast_to(F.mean(y, axis=0), y.shape)))
    ),
    'a loss that is NaN': Case(own(lambda self, y, x, adj, t: F.mean(y) * float('nan'))),
    'labels that are NaN': Case(
        lambda: regressor(metrics_fun={'rmse': rmse}), data=lambda: examples(labels=some_unknown)
    ),
    'labels that are NaN, in a Chain': Case(
        own(over_molecules), data=lambda: examples(labels=some_unknown)
    ),
    'labels that are NaN, of RelGCN': Case(
        lambda: regressor('relgcn'), data=lambda: examples(labels=some_unknown)
    ),
    'labels that are NaN, of RSGCN': Case(
        lambda: regressor('rsgcn'), data=lambda: of_one_relation(labels=some_unknown)
    ),
    'labels that are NaN, and masked': Case(
        own(masked), data=lambda: examples(labels=some_unknown)
    ),
    'a loss that is infinite': Case(own(lambda self, y, x, adj, t: F.sum(y**2) * float('inf'))),
    'a metric that is NaN': Case(own(metric_that_is_nan)),
    'a loss that is zero': Case(own(lambda self, y, x, adj, t: 0 * F.mean(y))),
    'a tiny loss': Case(own(lambda self, y, x, adj, t: 1e-12 * squares(y, t) / len(t))),
    'a huge loss': Case(own(lambda self, y, x, adj, t: 1e12 * squares(y, t) / len(t))),
    'a root of the error': Case(own(lambda self, y, x, adj, t: F.sqrt(F.mean((y - t) ** 2)))),
    'weights of classes in a global': Case(own(weighted_by_class)),
    'a gradient penalty': Case(own(penalised)),
    'numbers that are reported': Case(own(reports_numbers)),
    'a Regressor': Case(lambda: regressor(metrics_fun={'mae': F.mean_absolute_error})),
    'a Classifier': Case(classifier, data=lambda: examples(labels=classes)),
    'a loss of Huber': Case(
        lambda: regressor(lossfun=lambda y, t: F.mean(F.huber_loss(y, t, 1.0)))
    ),
    'maxima that are tied': Case(of_tied_maxima, data=of_one_relation),
    'batch normalisation of a model': Case(batch_normed, data=of_one_relation),
    'labels of atoms': Case(
        lambda: layers(loss_of_atoms),
        CSRConverter(n_node_columns=1),
        data=lambda: examples(labels=of_atoms),
    ),
    'features of padded batches': Case(lambda: layers(of_padded), CSRConverter('padded')),
    'sums over segments': Case(lambda: layers(by_segments)),
    'packed batches': Case(own(over_molecules), CSRConverter('packed')),
    'batches padded to a number': Case(own(over_molecules), CSRConverter(padded_to=12)),
    'a sparse data set': Case(own(over_molecules), data=lambda: to_sparse(examples())),
    'molecules of more than 64 atoms': Case(own(over_molecules), data=large),
    'a function as converter': Case(own(over_molecules), convert),
    'a subclass of StandardUpdater': Case(own(over_molecules), kind=OwnUpdater),
    'a lock': Case(lambda: Locked(over_molecules, lock=threading.Lock())),
    'a global Namespace': Case(lambda: OfArguments(over_molecules)),
    'a hook of functions': Case(own(over_molecules), within=function_hooks.TimerHook),
}
for method, data in {
    'relgcn': examples,
    'relgat': examples,
    'gnnfilm': lambda: examples(n_relations=5),
    'rsgcn': of_one_relation,
    'gin': of_one_relation,
    'nfp': of_one_relation,
    'ggnn_gwm': lambda: with_super_nodes(examples()),
    'rsgcn_gwm': lambda: with_super_nodes(of_one_relation()),
    'nfp_gwm': lambda: with_super_nodes(of_one_relation()),
}.items():
    RIGHT[method] = Case(lambda method=method: regressor(method), data=data)
# There may be a warning: random losses cannot be compared, and a hook must see only the user's
# calls. On a GPU such steps train eagerly, with another warning.
MAY_BE_TOLD = 'dropout', 'a random weight', 'a hook of functions'


@pytest.mark.parametrize('name', [slow_unless(name not in SLOW, name) for name in RIGHT])
def test_losses_that_are_right(device, name):
    texts = warned(RIGHT[name], device)
    assert not any(map(tells_of_rows, texts)), texts
    if device.xp is numpy and name not in MAY_BE_TOLD:
        assert not texts


step = 0


class InGlobal(Own):
    def __call__(self, *batch):
        global step
        step += 1
        return super().__call__(*batch) * (1 - 0.5**step)


class InClass(Own):
    n = 0

    def __call__(self, *batch):
        type(self).n += 1
        return super().__call__(*batch) * (1 - 0.5 ** type(self).n)


class InAttribute(Own):
    def __call__(self, *batch):
        self.n += 1
        return super().__call__(*batch) * (1 - 0.5**self.n)


class InList(Own):
    def __call__(self, *batch):
        loss = super().__call__(*batch)
        self.losses.append(float(loss.array))
        return loss


class InObject(Own):
    def __call__(self, *batch):
        self.state.n += 1
        return super().__call__(*batch) * (1 - 0.5**self.state.n)


class InArray(Own):
    def __call__(self, *batch):
        self.counts += 1
        return super().__call__(*batch) * (1 - 0.5 ** float(self.counts[0]))


def uniform(self, y, x, adj, t):
    return F.mean((y - t) ** 2) * float(numpy.random.uniform(0.5, 1))


def of_python(self, y, x, adj, t):
    return F.mean((y - t) ** 2) * random.uniform(0.5, 1)


def of_own_state(self, y, x, adj, t):
    return F.mean((y - t) ** 2) * float(self.drawn.uniform(0.5, 1))


def of_generator(self, y, x, adj, t):
    return F.mean((y - t) ** 2) * next(self.weights)


class GradientOfBefore(Own):
    """A Chain that notes the gradient from before the step, which only the user clears."""

    def __call__(self, *batch):
        loss = super().__call__(*batch)
        gradient = self.weight.grad
        self.seen.append('none' if gradient is None else repr(gradient.tolist()))
        return loss + F.sum(self.weight**2)


UNDISTURBED: dict[str, tuple[Callable, Callable]] = {
    'a global': (lambda: InGlobal(over_molecules), lambda model: step),
    'a class attribute': (lambda: InClass(over_molecules), lambda model: InClass.n),
    'an attribute': (lambda: InAttribute(over_molecules, n=0), lambda model: model.n),
    'a list': (lambda: InList(over_molecules, losses=[]), lambda model: model.losses),
    'an object': (
        lambda: InObject(over_molecules, state=argparse.Namespace(n=0)),
        lambda model: model.state.n,
    ),
    'an array': (
        lambda: InArray(over_molecules, counts=numpy.zeros(1)),
        lambda model: model.counts.tolist(),
    ),
    'random numbers of NumPy': (own(uniform), lambda model: numpy.random.rand()),
    'random numbers of Python': (own(of_python), lambda model: random.random()),
    'a RandomState': (
        lambda: Own(of_own_state, drawn=numpy.random.RandomState(0)),
        lambda model: model.drawn.rand(),
    ),
    'a generator': (
        lambda: Own(of_generator, weights=(0.9**n for n in range(100))),
        lambda model: next(model.weights),
    ),
    'running averages of normalisation': (
        batch_normed,
        lambda model: [float(norm.avg_var.sum()) for norm in model.predictor.graph_conv.bnorms],
    ),
    'gradients': (lambda: GradientOfBefore(over_molecules, seen=[]), lambda model: model.seen),
}


@pytest.mark.parametrize('name', UNDISTURBED)
def test_what_must_not_be_disturbed(name, monkeypatch):
    """Losses, parameters and a script's counters have the same bits with the check as without."""
    make, state_of = UNDISTURBED[name]
    checks = [option for option in vars(chainer.global_config) if option.startswith('bspmm_check')]
    data = of_one_relation if make is batch_normed else examples
    found = []
    for is_checked in (False, True):
        monkeypatch.setitem(globals(), 'step', 0)
        monkeypatch.setattr(InClass, 'n', 0)
        for option in checks:
            monkeypatch.setattr(chainer.global_config, option, is_checked)
        updater = updater_of(Case(make, data=data), HOST)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            reported = run(updater, 3)
        state = state_of(updater.get_optimizer('main').target)
        found.append((reported, state, parameters(updater)))
    (expected, state, params), (actual, own_state, own_params) = found
    assert actual == expected and own_state == state
    assert_same_bits(own_params, params)


def convert_to_variables(batch, device=None):
    atoms, adj, t = chainer_bspmm.concat_mols(batch, device)
    return chainer.Variable(atoms), adj, chainer.Variable(t)


@pytest.mark.parametrize('loss, is_wrong', [(over_rows, True), (over_molecules, False)])
def test_variables_are_looked_at_as_arrays(loss, is_wrong):
    texts = warned(Case(own(loss), converter=convert_to_variables), HOST)
    assert list(map(tells_of_rows, texts)) == [True] * is_wrong


def test_the_cause_in_batches_padded_to_a_number(device):
    """The text advises `len(t)`, and not another converter, which would change all results."""
    text = next(filter(tells_of_rows, warned(WRONG['batches padded to a number'], device)))
    assert 'len(t)' in text and "CSRConverter('padded')" not in text


class WithWeights(Own):
    """A Chain whose batches have labels, and a weight for each molecule."""

    def __call__(self, atoms, adj, t, weights):
        losses = F.sigmoid_cross_entropy(self.predictor(atoms, adj), t, reduce='no')
        loss = F.sum(F.sum(losses, axis=1) * weights[:, 0])
        chainer.report({'loss': loss}, self)
        return loss


@pytest.mark.parametrize('name', UNSEEN)
def test_what_the_check_does_not_see(name):
    """The check on a host overlooks these; the trial of a captured step finds the first two."""
    assert not any(map(tells_of_rows, warned(UNSEEN[name], chainer.get_device('@numpy'))))


def test_labels_that_are_taken_for_atoms(device, monkeypatch):
    """If each molecule has as many labels as atoms, a dense batch runs, but a sparse one fails."""
    monkeypatch.setattr(dense_examples, '_of_molecules', set())  # forgets other tests' labels
    data = [
        (atoms, adj, numpy.array([0, 1], 'i'), numpy.ones(1, 'f'))
        for atoms, adj, _ in examples(6, sizes=(N_LABELS, N_LABELS + 1))
    ]
    updater = updater_of(Case(lambda: WithWeights(None), data=lambda: data), device)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Exception) as raised:
        warnings.simplefilter('always')
        run(updater, 1)
    texts = [str(raised.value), *getattr(raised.value, '__notes__', ())]
    texts += [str(warning.message) for warning in caught]
    assert any('CSRConverter(n_node_columns=0)' in text for text in texts), texts


def test_an_optimizer_without_a_model():
    """The error is Chainer's, or names the optimizer, but no argument of the check."""
    iterator = SerialIterator(examples(), 4)
    updater = StandardUpdater(iterator, optimizers.SGD(), converter=chainer_bspmm.concat_mols)
    with pytest.raises(Exception) as raised:
        updater.update()
    assert 'model: expected a chainer.Link' not in str(raised.value)


def test_how_many_there_are():
    assert len(WRONG) >= 38 and len(RIGHT) >= 34 and len(UNDISTURBED) >= 12
    assert SLOW <= WRONG.keys() | RIGHT.keys()
