"""Scripts with common practices: averages, schedules, freezing, own updaters, own data."""

import argparse
import collections
import copy
import ctypes
import itertools
import logging
import os
import random
import tempfile
import threading
from typing import Any

import numpy

import chainer_bspmm
import chainer
from chainer import functions as F, link_hooks, links as L, optimizer_hooks, optimizers
from chainer import function_hooks, training
from chainer.backends import cuda
from chainer.datasets import TransformDataset
from chainer.iterators import OrderSampler, SerialIterator, ShuffleOrderSampler
from chainer.training import extensions
from chainer.training.triggers import EarlyStoppingTrigger
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm import CSRConverter
from chainer_bspmm.training import GraphUpdater
from tests.training.unusual_scripts.bench import at, BATCH, every, N_LABELS, N_STEPS, number, RATE
from tests.training.unusual_scripts.bench import (
    script,
    Script,
    Squares,
    UsersExamples,
    warm,
    Weighted,
)

SCRIPTS: dict[str, Script] = {}

args = argparse.Namespace(weight=0.5)
logger = logging.getLogger('practices_of_a_user')
TASKS = ['logp', 'tpsa']


def regressor(bench, **options):
    return Regressor(bench.predictor(), lossfun=F.mean_squared_error, **options)


class Averaged(training.Extension):
    """Moving averages of the parameters, which the model gets at the end."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.averages = {}

    def __call__(self, trainer):
        for path, param in self.model.namedparams(include_uninit=False):
            before = self.averages.get(path, param.array)
            self.averages[path] = self.decay * before + (1 - self.decay) * param.array

    def finish(self):
        for path, param in self.model.namedparams(include_uninit=False):
            param.array[...] = self.averages[path]


@script(SCRIPTS)
def moving_averages_of_parameters(bench):
    model = regressor(bench)
    averaged = Averaged(model)
    bench.train(model, (averaged, every(1)))
    averaged.finish()


@script(SCRIPTS)
def weights_averaged_in_place(bench):
    model = regressor(bench)
    kept: dict[str, Any] = {}

    def average(trainer):
        for path, param in model.namedparams(include_uninit=False):
            if path in kept:
                param.array[...] = (param.array + kept[path]) / 2
            kept[path] = param.array.copy()

    bench.train(model, (average, every(7)))


@script(SCRIPTS)
def arrays_of_parameters_that_are_replaced(bench):
    model = regressor(bench)

    def shrink(trainer):
        for param in model.params(include_uninit=False):
            param.array = param.array * 0.9

    bench.train(model, (shrink, at(19, 21, 37)))


@script(SCRIPTS)
def slow_weights_of_lookahead(bench):
    model = regressor(bench)
    slow: dict[str, Any] = {}

    def look(trainer):
        for path, param in model.namedparams(include_uninit=False):
            slow[path] = param.array if path not in slow else (slow[path] + param.array) / 2
            param.array = slow[path].copy()

    bench.train(model, (look, every(5)))


@script(SCRIPTS, quick=True)
def freezing_and_thawing(bench):
    model = regressor(bench)

    def freeze(trainer):
        if trainer.updater.iteration == 21:
            model.predictor.graph_conv.disable_update()
        else:
            model.predictor.graph_conv.enable_update()

    bench.train(model, (freeze, at(21, 37)))


@script(SCRIPTS)
def a_hook_that_is_added_and_removed(bench):
    optimizer = optimizers.Adam(0.01)

    def change(trainer):
        if trainer.updater.iteration == 21:
            optimizer.add_hook(optimizer_hooks.WeightDecay(0.1), 'decay')
        else:
            optimizer.remove_hook('decay')

    bench.train(regressor(bench), (change, at(21, 37)), optimizer=optimizer)


class CountingHook:
    """A user's hook that scales gradients and counts its calls."""

    name = 'CountingHook'
    call_for_each_param = False

    def __init__(self):
        self.n = 0

    def __call__(self, optimizer):
        self.n += 1
        for param in optimizer.target.params(include_uninit=False):
            if param.grad is not None:
                param.grad = param.grad * (1 - 0.5**self.n)


@script(SCRIPTS)
def a_hook_of_ones_own_that_counts(bench):
    hook = CountingHook()
    model = regressor(bench)
    optimizer = optimizers.SGD(RATE)
    updater = bench.updater(model, optimizer=optimizer)
    optimizer.add_hook(hook)
    bench.run(updater)
    return {'n': hook.n}


@script(SCRIPTS)
def hooks_of_links_and_functions_for_a_while(bench):
    model = regressor(bench)
    updater = bench.updater(model)
    for _ in range(12):
        bench.step(updater)
    timer = link_hooks.TimerHook()
    with function_hooks.TimerHook() as functions, timer:
        for _ in range(5):
            bench.step(updater)
    for _ in range(12):
        bench.step(updater)
    n_of_functions = len(functions.call_history)
    return {'n': len(timer.call_history), 'some': n_of_functions > 0}


@script(SCRIPTS)
def schedules_of_the_rate(bench):
    optimizer = optimizers.MomentumSGD(RATE)
    shift = extensions.ExponentialShift('lr', 0.5)
    warm = extensions.LinearShift('momentum', (0.5, 0.9), (10, 30))
    bench.train(regressor(bench), (shift, every(11)), (warm, every(1)), optimizer=optimizer)
    return {'lr': optimizer.lr, 'momentum': optimizer.momentum}


@script(SCRIPTS)
def rates_of_layers(bench):
    model = regressor(bench)
    updater = bench.updater(model, optimizer=optimizers.Adam(0.01))
    for param in model.predictor.mlp.params():
        param.update_rule.hyperparam.alpha = 0.001

    def change(trainer):
        for param in model.predictor.mlp.params():
            param.update_rule.hyperparam.alpha *= 3

    bench.run(updater, (change, at(19)))


class Penalised(Squares):
    """Model with a penalty for the gradient of the output with respect to the features."""

    def __call__(self, atoms, adj, t):
        h = self.predictor.graph_conv(atoms, adj)
        y = self.predictor.mlp(h)
        (gradient,) = chainer.grad([F.sum(y)], [h], enable_double_backprop=True)
        loss = F.mean_squared_error(y, t) + 0.1 * F.mean(gradient**2)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_gradient_penalty(bench):
    bench.train(Penalised(bench))


class Adversarial(Squares):
    def __call__(self, atoms, adj, t):
        h = self.predictor.graph_conv(atoms, adj)
        loss = F.mean_squared_error(self.predictor.mlp(h), t)
        (gradient,) = chainer.grad([loss], [h])
        moved = h + 0.01 * F.sign(gradient)
        loss += F.mean_squared_error(self.predictor.mlp(moved), t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def adversarial_features(bench):
    bench.train(Adversarial(bench))


class OwnUpdater(StandardUpdater):
    """Updater with a counter whose step is written out in full."""

    n = 0

    def update_core(self):
        self.n += 1
        iterator, optimizer = self.get_iterator('main'), self.get_optimizer('main')
        batch = self.converter(iterator.next(), self.device)
        loss = optimizer.target(*batch) * (1 - 0.5**self.n)
        optimizer.target.cleargrads()
        loss.backward()
        optimizer.update()


@script(SCRIPTS, quick=True)
def an_updater_of_ones_own(bench):
    updater = bench.train(regressor(bench), kind=OwnUpdater)
    return {'n': updater.n}


class Calling(StandardUpdater):
    """Updater that counts before Chainer's step, and shrinks parameters after it."""

    def update_core(self):
        self.seen = getattr(self, 'seen', 0) + 1
        super().update_core()
        for param in self.get_optimizer('main').target.params(include_uninit=False):
            param.array[...] *= 0.999


@script(SCRIPTS)
def an_updater_around_that_of_chainer(bench):
    updater = bench.train(regressor(bench), kind=Calling)
    return {'seen': updater.seen}


class Accumulating(StandardUpdater):
    def update_core(self):
        optimizer = self.get_optimizer('main')
        optimizer.target.cleargrads()
        for _ in range(2):
            batch = self.converter(self.get_iterator('main').next(), self.device)
            (optimizer.target(*batch) / 2).backward()
        optimizer.update()


@script(SCRIPTS)
def accumulation(bench):
    bench.train(regressor(bench), kind=Accumulating)


@script(SCRIPTS)
def a_loop_without_an_updater(bench):
    model = regressor(bench)
    model.to_device(bench.device)
    bench.models.append(model)
    optimizer = optimizers.SGD(RATE).setup(model)
    iterator = SerialIterator(bench.molecules(), BATCH)
    for _ in range(N_STEPS):
        batch = chainer_bspmm.concat_mols(iterator.next(), bench.device)
        optimizer.update(model, *batch)
        bench.reports.append({'loss': number(model.loss)})


@script(SCRIPTS)
def distillation(bench):
    teacher, student = bench.predictor(), bench.predictor()
    bench.train(Regressor(teacher, lossfun=F.mean_squared_error), n_steps=10)
    teacher.to_device(bench.device)

    def loss_func(atoms, adj, t):
        with chainer.no_backprop_mode():
            soft = teacher(atoms, adj)
        y = student(atoms, adj)
        loss = F.mean_squared_error(y, t) + F.mean_squared_error(y, soft)
        chainer.report({'loss': loss}, student)
        return loss

    bench.train(student, loss_func=loss_func)


class MeanTeacher(Squares):
    """Model whose loss also moves a teacher towards the student."""

    def __init__(self, bench):
        super().__init__(bench)
        self.teacher = [bench.predictor()]

    def __call__(self, atoms, adj, t):
        (teacher,) = self.teacher
        y = self.predictor(atoms, adj)
        with chainer.no_backprop_mode():
            soft = teacher(atoms, adj)
        loss = F.mean_squared_error(y, t) + F.mean_squared_error(y, soft)
        for ours, theirs in zip(teacher.params(), self.predictor.params()):
            ours.array[...] = 0.9 * ours.array + 0.1 * theirs.array
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_teacher_that_follows_inside_of_the_loss(bench):
    model = MeanTeacher(bench)
    (teacher,) = model.teacher
    teacher.to_device(bench.device)
    with chainer.no_backprop_mode(), chainer.using_device(bench.device):
        teacher(*chainer_bspmm.concat_mols(bench.molecules()[:2], bench.device)[:2])
    bench.train(model)
    return {'sum': sum(number(abs(param.array).sum()) for param in teacher.params())}


class WithTeacher(Squares):
    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        with chainer.no_backprop_mode():
            soft = self.teachers['now'](atoms, adj)
        loss = F.mean_squared_error(y, t) + F.mean_squared_error(y, soft)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_teacher_that_is_replaced_in_a_dict(bench):
    model = WithTeacher(bench)
    model.teachers = {'now': bench.predictor()}
    model.teachers['now'].to_device(bench.device)

    def replace(trainer):
        model.teachers['now'] = model.predictor.copy('copy')

    bench.train(model, (replace, at(21, 35)))


@script(SCRIPTS)
def two_updaters_in_turn_on_one_model(bench):
    model = regressor(bench)
    first = bench.updater(model, optimizer=optimizers.SGD(RATE))
    second = bench.updater(model, optimizer=optimizers.MomentumSGD(RATE))
    first.get_optimizer('main').setup(model)
    for i in range(N_STEPS):
        bench.step(first if i % 2 else second, model)


@script(SCRIPTS)
def two_updaters_in_turn_on_two_models(bench):
    updaters = [bench.updater(regressor(bench)) for _ in range(2)]
    for i in range(N_STEPS):
        bench.step(updaters[i % 2])


@script(SCRIPTS)
def early_stopping(bench):
    model = regressor(bench)
    updater = bench.updater(model)
    trigger = EarlyStoppingTrigger(
        check_trigger=every(4), monitor='main/loss', patience=2, max_trigger=(N_STEPS, 'iteration')
    )
    bench.run(updater, until=trigger)
    return {'iteration': updater.iteration}


def of_optimizer(make):
    """Return a script that trains with the optimizer that `make` returns."""

    def run(bench):
        optimizer = make()
        bench.train(regressor(bench), optimizer=optimizer)
        return {'t': optimizer.t}

    return run


OPTIMIZERS = {
    'AdaGrad': lambda: optimizers.AdaGrad(0.01),
    'AdaDelta': optimizers.AdaDelta,
    'AMSGrad': lambda: optimizers.AMSGrad(0.01),
    'NesterovAG': lambda: optimizers.NesterovAG(0.005),
    'RMSpropGraves': lambda: optimizers.RMSpropGraves(0.001),
    'SMORMS3': lambda: optimizers.SMORMS3(0.01),
}
for name, make in OPTIMIZERS.items():
    SCRIPTS['the_optimizer_' + name] = Script(of_optimizer(make))


@script(SCRIPTS)
def an_optimizer_that_scales_the_loss(bench):
    optimizer = optimizers.SGD(RATE)
    optimizer.set_loss_scale(64.0)
    bench.train(regressor(bench), optimizer=optimizer)


class Lazy(Squares):
    def __init__(self, bench):
        super().__init__(bench)
        with self.init_scope():
            self.late = L.Linear(None, 2)

    def __call__(self, atoms, adj, t):
        y = self.late(self.predictor(atoms, adj))
        loss = F.mean_squared_error(y, t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def parameters_that_are_made_late(bench):
    bench.train(Lazy(bench))


class LazyAndRandom(Lazy):
    def __call__(self, atoms, adj, t):
        return super().__call__(atoms, adj, t) * float(numpy.random.uniform(0.5, 1))


@script(SCRIPTS)
def parameters_that_are_made_late_and_a_random_loss(bench):
    bench.train(LazyAndRandom(bench))
    return {'next': numpy.random.rand()}


def with_factor(bench, factor):
    def lossfun(y, t):
        return F.mean_squared_error(y, t) * factor()

    bench.train(Regressor(bench.predictor(), lossfun=lossfun))


@script(SCRIPTS)
def random_numbers_of_numpy(bench):
    with_factor(bench, lambda: float(numpy.random.uniform(0.5, 1.5)))
    return {'next': numpy.random.rand()}


@script(SCRIPTS)
def random_numbers_of_python(bench):
    with_factor(bench, random.random)
    return {'next': random.random()}


@script(SCRIPTS)
def a_random_state_of_ones_own(bench):
    drawn = numpy.random.RandomState(5)
    with_factor(bench, drawn.rand)
    return {'next': drawn.rand()}


RNG = numpy.random.default_rng(5)


class WithGenerator(Squares):
    def weighed(self, loss):
        return loss * float(RNG.uniform(0.5, 1.5))


@script(SCRIPTS)
def a_generator_of_numpy_in_a_global(bench):
    bench.train(WithGenerator(bench))
    return {'next': RNG.uniform()}


@script(SCRIPTS)
def a_generator_of_python_in_an_object(bench):
    holder = argparse.Namespace(drawn=random.Random(5))
    with_factor(bench, lambda: holder.drawn.random())
    return {'next': holder.drawn.random()}


class Permuted(Squares):
    """Model that compares with labels in another order, which NumPy draws."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        order = numpy.random.permutation(len(t))
        loss = F.mean_squared_error(y, t) - 0.1 * F.mean_squared_error(y, t[order])
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_permutation_of_the_batch(bench):
    bench.train(Permuted(bench))


class Unlabelled(Squares):
    """Model with a semi-supervised loss, which reads a batch from an iterator of its own."""

    def __init__(self, bench):
        super().__init__(bench)
        self.others = SerialIterator(bench.molecules(10, seed=1), 4, shuffle=False)

    def __call__(self, atoms, adj, t):
        loss = F.mean_squared_error(self.predictor(atoms, adj), t)
        more = chainer_bspmm.concat_mols(self.others.next(), self.device)
        loss += 0.1 * F.mean(self.predictor(*more[:2]) ** 2)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def an_iterator_that_the_loss_reads(bench):
    model = Unlabelled(bench)
    bench.train(model)
    return {'epoch': model.others.epoch, 'position': model.others.current_position}


class OfOrder(Weighted):
    """Model that draws from an iterator, which has a generator of its own."""

    def factor(self):
        return next(self.weights)[0]


@script(SCRIPTS)
def an_iterator_with_an_order_of_its_own(bench):
    order = ShuffleOrderSampler(numpy.random.RandomState(3))
    weights = SerialIterator([0.5, 1.0, 1.5], 1, order_sampler=order)
    model = OfOrder(bench)
    model.weights = weights
    bench.train(model)
    return {'epoch': weights.epoch, 'next': [weights.next() for _ in range(6)]}


class Remembering(Squares):
    """Model that passes a state from batch to batch, without its gradient."""

    def __init__(self, bench):
        super().__init__(bench)
        with self.init_scope():
            self.lstm = L.LSTM(N_LABELS, N_LABELS)

    def __call__(self, atoms, adj, t):
        if self.lstm.h is not None:
            state = self.lstm.c.array, self.lstm.h.array
            self.lstm.set_state(*map(chainer.Variable, state))
        loss = F.mean_squared_error(self.lstm(self.predictor(atoms, adj)), t)
        chainer.report({'loss': loss}, self)
        return loss


@script(
    SCRIPTS, told='the step reads the attribute c of lstm, which the step before it has assigned'
)
def a_state_of_an_lstm(bench):
    model = Remembering(bench)

    def reset(trainer):
        model.lstm.reset_state()

    bench.train(model, (reset, every(8)))


class WithAHead(chainer.Chain):
    """Chain whose head is outside of the link that the first optimizer trains."""

    def __init__(self, bench):
        super().__init__()
        with self.init_scope():
            self.body = bench.predictor(8)
            self.head = L.Linear(8, N_LABELS)
        self.head.to_device(bench.device)

    def loss(self, atoms, adj, t):
        loss = F.mean_squared_error(self.head(F.tanh(self.body(atoms, adj))), t)
        chainer.report({'loss': loss})
        return loss


@script(SCRIPTS, told=r'a parameter W of shape \(2, 8\), which another optimizer trains')
def a_head_with_a_second_optimizer(bench):
    model = WithAHead(bench)
    of_head = optimizers.SGD(RATE).setup(model.head)
    bench.models.append(model)
    model.head.cleargrads()

    def update_head(trainer):
        of_head.update()
        model.head.cleargrads()

    bench.train(model.body, (update_head, every(2)), loss_func=model.loss)


@script(SCRIPTS)
def a_head_without_an_optimizer(bench):
    model = WithAHead(bench)
    bench.models.append(model)
    bench.train(model.body, loss_func=model.loss)


class KeepingSizes(Squares):
    def __call__(self, atoms, adj, t):
        self.n_rows = atoms.shape[0]
        return super().__call__(atoms, adj, t)


@script(SCRIPTS, told='change the attribute n_rows of KeepingSizes: the step keeps arrays or sizes')
def a_number_of_rows_that_is_kept(bench):
    model = KeepingSizes(bench)
    sizes = []

    def note(trainer):
        sizes.append(model.n_rows)

    bench.train(model, (note, every(1)))
    return sizes


class LightSmallBatches(Squares):
    def __call__(self, atoms, adj, t):
        loss = super().__call__(atoms, adj, t)
        return loss * 0.5 if adj.n_rows < MOST_ATOMS else loss


class LightShortBatches(Squares):
    def __call__(self, atoms, adj, t):
        n_atoms = len(atoms)
        loss = super().__call__(atoms, adj, t)
        return loss * 0.5 if n_atoms < MOST_ATOMS else loss


MOST_ATOMS = 37  # some batches have fewer atoms, others more


@script(
    SCRIPTS, told='compares a size of its batch, "adj.n_rows < MOST_ATOMS" in LightSmallBatches'
)
def a_branch_on_the_rows_of_a_batch(bench):
    bench.train(LightSmallBatches(bench))


@script(SCRIPTS, told='compares a size of its batch, "n_atoms < MOST_ATOMS" in LightShortBatches')
def a_branch_on_the_length_of_a_batch(bench):
    bench.train(LightShortBatches(bench))


n_converted = 0


def counting_converter(batch, device=None):
    global n_converted
    n_converted += len(batch)
    return chainer_bspmm.concat_mols(batch, device)


@script(SCRIPTS)
def a_converter_function_that_counts(bench):
    bench.train(regressor(bench), converter=counting_converter)
    return {'n': n_converted}


def captured_or_not() -> Any:
    """Return the class of the run's updater: GraphUpdater also captures with a user's converter."""
    return GraphUpdater if chainer.config.bspmm_capture else StandardUpdater


def mixing_converter(batch, device=None):
    """Convert, and mix the labels of pairs of molecules by numbers that NumPy draws."""
    atoms, adj, t = counting_converter(batch, device)
    share = numpy.random.beta(0.4, 0.4)
    others = t[numpy.random.permutation(len(t))]
    return atoms, adj, (share * t + (1 - share) * others).astype('f')


@script(SCRIPTS, n_captures=2)
def a_converter_that_mixes_up_labels(bench):
    bench.train(Squares(bench), converter=mixing_converter, kind=captured_or_not())
    return {'n': n_converted, 'next': numpy.random.rand()}


@script(SCRIPTS, told='the step changes n of class WarmSquares at every run')
def a_converter_that_mixes_up_labels_of_a_step_that_counts(bench):
    bench.train(WarmSquares(bench), converter=mixing_converter, kind=captured_or_not())
    return {'n': n_converted, 'next': numpy.random.rand(), 'steps': WarmSquares.n}


class WarmSquares(Squares):
    n = 0

    def weighed(self, loss):
        WarmSquares.n += 1
        return loss * warm(WarmSquares.n)


class Annealed(Weighted):
    weight = 1.0

    def factor(self):
        return self.weight


@script(SCRIPTS, told='no step can be replayed, because the attribute weight of Annealed')
def a_converter_that_mixes_up_labels_of_a_step_that_is_annealed(bench):
    model = Annealed(bench)

    def anneal(trainer):
        model.weight *= 0.97

    bench.train(model, (anneal, every(1)), converter=mixing_converter, kind=captured_or_not())
    return {'n': n_converted, 'next': numpy.random.rand()}


weight_of_converter = 1.0


def weighing_converter(batch, device=None):
    """Convert, and halve a weight of the loss before every tenth batch is used."""
    global weight_of_converter
    if len(given_batches) % 10 == 9:
        weight_of_converter *= 0.5
    given_batches.append(len(batch))
    return chainer_bspmm.concat_mols(batch, device)


given_batches: list[int] = []


class WeighedByConverter(Weighted):
    def factor(self):
        return weight_of_converter


@script(SCRIPTS)
def a_converter_that_sets_a_weight(bench):
    bench.train(WeighedByConverter(bench), converter=weighing_converter, kind=captured_or_not())
    return {'n': len(given_batches), 'weight': weight_of_converter}


class NoisyConverter(CSRConverter):
    """Converter that adds noise, drawn by NumPy, to labels."""

    def __call__(self, batch, device=None, padding=None):
        batch = [
            (atoms, adj, t + numpy.random.normal(size=t.shape).astype('f') / 10)
            for atoms, adj, t in batch
        ]
        return super().__call__(batch, device)


@script(SCRIPTS)
def a_subclass_of_the_converter(bench):
    bench.train(regressor(bench), converter=NoisyConverter())


def of_layout(*layout, **options):
    def run(bench):
        model = regressor(bench)
        bench.train(model, converter=CSRConverter(*layout, **options))

    return run


SCRIPTS['packed_batches'] = Script(of_layout('packed'))
SCRIPTS['padded_batches'] = Script(of_layout('padded'))
SCRIPTS['batches_padded_to_a_number'] = Script(of_layout(padded_to=8))


class ReadsGlobals(Squares):
    def weighed(self, loss):
        logger.debug('%s', TASKS)
        return loss * args.weight / len(TASKS)


@script(SCRIPTS)
def globals_that_never_change(bench):
    bench.train(ReadsGlobals(bench))
    return {'weight': args.weight, 'tasks': TASKS}


class Locked(Squares):
    def __call__(self, atoms, adj, t):
        with self.lock:
            self.n += 1
            return super().__call__(atoms, adj, t)


@script(SCRIPTS)
def a_lock_as_an_attribute(bench):
    model = Locked(bench, lock=threading.Lock(), n=0)
    bench.train(model)
    return {'n': model.n}


class Writing(Squares):
    def weighed(self, loss):
        self.file.write('a step\n')
        return loss


@script(SCRIPTS, outside='')
def an_open_file_as_an_attribute(bench):
    """The file has more lines than there are steps: docs/migration.md says so, no warning does."""
    with tempfile.TemporaryFile('w+') as file:
        bench.train(Writing(bench, file=file))
        file.seek(0)
        return {'lines': len(file.readlines())}


class Appending(Squares):
    def weighed(self, loss):
        with open(self.path, 'a') as file:
            file.write('a step\n')
        return loss


@script(SCRIPTS, outside='')
def a_file_that_is_opened_at_every_step(bench):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'log.txt')
        bench.train(Appending(bench, path=path))
        with open(path) as file:
            return {'lines': len(file.readlines())}


class WithForeignNumber(Squares):
    def weighed(self, loss):
        return loss * self.weight.value


@script(SCRIPTS)
def a_number_of_ctypes(bench):
    model = WithForeignNumber(bench, weight=ctypes.c_double(1.0))

    def change(trainer):
        model.weight.value *= 0.5

    bench.train(model, (change, at(21, 35)))
    return {'weight': model.weight.value}


@script(SCRIPTS)
def a_snapshot_that_is_resumed(bench):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'model.npz')
        model = regressor(bench)

        def save(trainer):
            chainer.serializers.save_npz(path, model)

        def load(trainer):
            chainer.serializers.load_npz(path, model)

        bench.train(model, (save, at(21)), (load, at(37)))


@script(SCRIPTS)
def the_best_model_is_copied(bench):
    model = regressor(bench)
    best: dict[str, Any] = {'loss': float('inf')}

    def keep(trainer):
        loss = number(trainer.observation['main/loss'])
        if loss < best['loss']:
            best.update(loss=loss, model=copy.deepcopy(model))

    bench.train(model, (keep, every(3)))
    bench.models.append(best['model'])
    return {'loss': best['loss']}


class CountsModes(Squares):
    def __call__(self, atoms, adj, t):
        self.n[bool(chainer.config.train)] += 1
        return super().__call__(atoms, adj, t)


@script(SCRIPTS)
def an_evaluator_of_a_chain_that_counts(bench):
    model = CountsModes(bench, n={True: 0, False: 0})
    iterator = SerialIterator(bench.molecules(12, seed=2), BATCH, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(
        iterator, model, converter=chainer_bspmm.concat_mols, device=bench.device
    )
    bench.train(model, (evaluator, every(5)))
    return model.n


@script(SCRIPTS)
def the_loss_of_the_updater_is_replaced(bench):
    model = regressor(bench)
    updater = bench.updater(model)

    def absolute(atoms, adj, t):
        loss = F.mean_absolute_error(model.predictor(atoms, adj), t)
        chainer.report({'loss': loss}, model)
        return loss

    def change(trainer):
        updater.loss_func = absolute if updater.iteration == 21 else None

    bench.run(updater, (change, at(21, 37)))


@script(SCRIPTS)
def a_head_that_is_replaced(bench):
    model = Squares(bench)
    optimizer = optimizers.SGD(RATE)
    updater = bench.updater(model, optimizer=optimizer)

    def change(trainer):
        del model.predictor.mlp
        with model.predictor.init_scope():
            model.predictor.mlp = L.Linear(8, 2)
        model.to_device(bench.device)
        optimizer.setup(model)

    bench.run(updater, (change, at(21)))


@script(SCRIPTS)
def the_size_of_batches_changes(bench):
    updater = bench.updater(regressor(bench), data=bench.molecules(30))

    def change(trainer):
        updater.get_iterator('main').batch_size = 4

    bench.run(updater, (change, at(21)))


@script(SCRIPTS, refused='read-only')
def labels_that_are_edited_during_a_training(bench):
    data = bench.molecules()

    def edit(trainer):
        for _, _, labels in data:
            labels[...] += 0.1

    bench.train(regressor(bench), (edit, at(21)), data=data)


@script(SCRIPTS)
def examples_that_are_replaced_during_a_training(bench):
    data = bench.molecules()

    def replace(trainer):
        for i, (atoms, adj, labels) in enumerate(data):
            data[i] = atoms, adj, labels + numpy.float32(0.1)

    bench.train(regressor(bench), (replace, at(21)), data=data)


@script(SCRIPTS)
def a_data_set_that_counts_and_augments(bench):
    counts: collections.Counter = collections.Counter()

    def augmented(example):
        atoms, adj, labels = example
        counts[len(atoms)] += 1
        order = numpy.random.permutation(len(atoms))
        return atoms[order], adj[:, order][:, :, order], labels

    bench.train(regressor(bench), data=TransformDataset(bench.molecules(), augmented))
    return dict(counts)


class Heads(Squares):
    """Model whose number of heads grows."""

    def __init__(self, bench):
        super().__init__(bench, n_heads=1)
        with self.init_scope():
            self.heads = chainer.ChainList(*[L.Linear(2, 2) for _ in range(3)])

    def __call__(self, atoms, adj, t):
        h = self.predictor(atoms, adj)
        losses = [F.mean_squared_error(head(h), t) for head in self.heads[: self.n_heads]]
        loss = sum(losses) / len(losses)
        chainer.report({'loss': loss, 'last': losses[-1]}, self)
        return loss


@script(SCRIPTS)
def a_curriculum_of_heads(bench):
    model = Heads(bench)

    def grow(trainer):
        model.n_heads += 1

    bench.train(model, (grow, at(21, 37)))
    return {'n': model.n_heads}


class ByGradients(Squares):
    """Model that weights its loss by the gradients of the last step."""

    def weighed(self, loss):
        gradient = self.predictor.mlp.layers[-1].b.grad
        if gradient is None:
            return loss
        return loss / (1 + (gradient**2).sum())


@script(SCRIPTS)
def the_gradients_of_the_step_before(bench):
    model = ByGradients(bench)
    model.cleargrads()
    bench.train(model)


@script(SCRIPTS)
def clipping_after_the_update(bench):
    model = regressor(bench)

    def clip(trainer):
        for param in model.params(include_uninit=False):
            param.array = bench.xp.clip(param.array, -0.5, 0.5)

    bench.train(model, (clip, every(1)))


@script(SCRIPTS)
def optimizers_of_two_parts(bench):
    """A user's updater has a dict of two optimizers, like that of a GAN."""

    class Both(StandardUpdater):
        def update_core(self):
            batch = self.converter(self.get_iterator('main').next(), self.device)
            first, second = self.get_optimizer('main'), self.get_optimizer('head')
            loss = model(*batch)
            model.cleargrads()
            loss.backward()
            first.update()
            if self.iteration % 2:
                second.update()

    model = regressor(bench)
    given = {
        'main': optimizers.SGD(RATE).setup(model.predictor.graph_conv),
        'head': optimizers.SGD(RATE).setup(model.predictor.mlp),
    }
    iterator = SerialIterator(bench.molecules(), BATCH)
    model.to_device(bench.device)
    updater = Both(iterator, given, converter=chainer_bspmm.concat_mols, device=bench.device)
    bench.models.append(model)
    for _ in range(N_STEPS):
        bench.step(updater, model)


@script(SCRIPTS)
def an_optimizer_that_is_set_up_again(bench):
    model = regressor(bench)
    optimizer = optimizers.MomentumSGD(RATE)
    updater = bench.updater(model, optimizer=optimizer)
    bench.run(updater, (lambda trainer: optimizer.setup(model), at(21)))
    return {'t': optimizer.t}


@script(SCRIPTS)
def a_training_that_goes_on(bench):
    """Two Trainers run one after the other with one updater, and the loss changes in between."""
    model = Squares(bench, weight=1.0)
    updater = bench.updater(model)
    bench.run(updater, n_steps=20)
    model.weighed = lambda loss: 0.5 * loss
    bench.run(updater, n_steps=N_STEPS)


@script(SCRIPTS)
def stochastic_depth(bench):
    class Deep(Squares):
        def weighed(self, loss):
            return loss * 2 if random.random() < 0.5 else loss

    bench.train(Deep(bench))
    return {'next': random.random()}


@script(SCRIPTS)
def a_loss_that_raises_once(bench):
    class Failing(Squares):
        n = 0

        def weighed(self, loss):
            self.n += 1
            if self.n == 15:
                raise RuntimeError('out of luck')
            return loss

    model = Failing(bench)
    updater = bench.updater(model)
    errors = []
    for _ in range(N_STEPS):
        try:
            bench.step(updater)
        except RuntimeError as error:
            errors.append(str(error))
    return {'errors': errors, 'n': model.n}


class Printing(Squares):
    def weighed(self, loss):
        if self.is_verbose:
            self.lines.append('%s' % (loss.shape,))
        return loss


@script(SCRIPTS)
def a_debug_flag(bench):
    model = Printing(bench, is_verbose=False, lines=[])

    def switch(trainer):
        model.is_verbose = not model.is_verbose

    bench.train(model, (switch, at(21, 23)))
    return {'lines': model.lines}


class DecaysByAssignment(Squares):
    """Model that shrinks its weights by assigning new arrays."""

    def __call__(self, atoms, adj, t):
        for param in self.params(include_uninit=False):
            param.array = param.array * 0.9
        return super().__call__(atoms, adj, t)


@script(SCRIPTS, quick=True, told=r'changes the attribute W of embed')
def decay_by_assignment_in_the_loss(bench):
    bench.train(DecaysByAssignment(bench))


class FreezesInTurn(Squares):
    """Model that freezes its head at every third call."""

    def weighed(self, loss):
        rule = self.predictor.mlp.l_out.W.update_rule
        if rule is not None:
            rule.n = getattr(rule, 'n', 0) + 1
            rule.enabled = rule.n % 3 != 0
        return loss


@script(SCRIPTS, told=r'changes (n|enabled) of the update rule of the attribute W of l_out')
def freezing_at_every_third_call(bench):
    model = FreezesInTurn(bench)
    bench.train(model)
    return {'n': model.predictor.mlp.l_out.W.update_rule.n}


class Thaws(Squares):
    """Model that freezes and thaws its head in turn."""

    def weighed(self, loss):
        rule = self.predictor.mlp.l_out.W.update_rule
        rule.enabled = not rule.enabled
        return loss


@script(SCRIPTS, told=r'changes enabled of the update rule of the attribute W of l_out')
def freezing_and_thawing_in_the_loss(bench):
    model = Thaws(bench)
    bench.train(model)
    return {'is enabled': model.predictor.mlp.l_out.W.update_rule.enabled}


class LowersRate(Squares):
    def weighed(self, loss):
        self.optimizer.lr *= 0.98
        return loss


@script(SCRIPTS, told=r'changes the attribute lr of SGD')
def a_rate_that_the_loss_lowers(bench):
    model = LowersRate(bench, optimizer=optimizers.SGD(RATE))
    bench.train(model, optimizer=model.optimizer)
    return {'lr': model.optimizer.lr}


class LowersRateOfHead(Squares):
    def weighed(self, loss):
        self.predictor.mlp.l_out.W.update_rule.hyperparam.lr *= 0.97
        return loss


@script(SCRIPTS, told=r'changes lr of the update rule of the attribute W of l_out')
def a_rate_of_a_layer_that_the_loss_lowers(bench):
    model = LowersRateOfHead(bench)
    bench.train(model)
    return {'lr': model.predictor.mlp.l_out.W.update_rule.hyperparam.lr}


class LowersDecay(Squares):
    def weighed(self, loss):
        self.hook.rate *= 0.9
        return loss


@script(SCRIPTS, told=r'changes the attribute rate of WeightDecay')
def a_decay_that_the_loss_lowers(bench):
    model = LowersDecay(bench, hook=optimizer_hooks.WeightDecay(0.5))
    updater = bench.updater(model)
    updater.get_optimizer('main').add_hook(model.hook)
    bench.run(updater)
    return {'rate': model.hook.rate}


class LowersThreshold(Squares):
    def weighed(self, loss):
        for hook in self.optimizer._hookable._pre_update_hooks.values():
            hook.threshold *= 0.9
        return loss


@script(SCRIPTS, told=r'changes the attribute threshold of GradientClipping')
def a_threshold_of_clipping_that_the_loss_lowers(bench):
    hook = optimizer_hooks.GradientClipping(1.0)
    model = LowersThreshold(bench, optimizer=optimizers.SGD(RATE))
    updater = bench.updater(model, optimizer=model.optimizer)
    model.optimizer.add_hook(hook)
    bench.run(updater)
    return {'threshold': hook.threshold}


@script(SCRIPTS, told=r'changes the attribute n_of_a_user of GraphUpdater')
def an_attribute_of_the_updater(bench):
    predictor = bench.predictor()
    made = []

    def loss_func(atoms, adj, t):
        made[0].n_of_a_user += 1
        return F.mean_squared_error(predictor(atoms, adj), t) * warm(made[0].n_of_a_user)

    updater = bench.updater(predictor, loss_func=loss_func)
    made.append(updater)
    updater.n_of_a_user = 0
    bench.run(updater)
    return {'n': updater.n_of_a_user}


class OfState(Weighted):
    def factor(self):
        return self.trainer.state['factor']


class SetsState(training.Extension):
    def __init__(self, model):
        self.model = model

    def initialize(self, trainer):
        trainer.state = {'factor': 1.0}
        self.model.trainer = trainer

    def __call__(self, trainer):
        trainer.state['factor'] /= 2


@script(SCRIPTS)
def a_dict_of_the_trainer(bench):
    model = OfState(bench)
    bench.train(model, (SetsState(model), at(14, 30)))
    return model.trainer.state


class OfWeight(Weighted):
    def factor(self):
        return self.weight


class Trigger:
    """Trigger that lowers a weight of a model, and fires at the end."""

    def __init__(self, model):
        self.model = model

    def __call__(self, trainer):
        if trainer.updater.iteration in (14, 29):
            self.model.weight /= 2
        return trainer.updater.iteration >= N_STEPS


@script(SCRIPTS, quick=True, fused=True)
def a_trigger_of_the_users_that_stops(bench):
    model = OfWeight(bench, weight=1.0)
    bench.run(bench.updater(model), until=Trigger(model))
    return {'weight': model.weight}


@script(SCRIPTS, fused=True)
def a_trigger_of_the_users_in_a_report(bench):
    model = OfWeight(bench, weight=1.0)
    report = extensions.LogReport(trigger=Trigger(model), log_name=None)
    bench.train(model, (report, every(1)))
    return {'weight': model.weight}


class Curriculum(OrderSampler):
    """Order sampler that lowers a weight of a model when its fifth epoch begins."""

    def __init__(self, model):
        self.model = model
        self.n_epochs = 0

    def __call__(self, order, position):
        self.n_epochs += 1
        if self.n_epochs == 5:
            self.model.weight = 0.25
        return numpy.random.permutation(len(order))


@script(SCRIPTS, fused=True, n_captures=2)
def an_order_sampler_that_sets_a_weight(bench):
    """Only Chainer's extensions run between steps, but the iterator calls the user's sampler."""
    model = OfWeight(bench, weight=1.0)
    updater = bench.updater(model)
    iterator = updater.get_iterator('main')
    iterator.order_sampler = Curriculum(model)
    bench.run(updater)
    return {'weight': model.weight}


class Tee:
    """File that lowers a weight of a model after some lines were written."""

    def __init__(self, model):
        self.model = model
        self.n_lines = 0

    def write(self, text):
        self.n_lines += text.count('\n')
        self.model.weight = 1.0 if self.n_lines < 20 else 0.5


@script(SCRIPTS, fused=True)
def a_file_of_the_users_for_a_report(bench):
    model = OfWeight(bench, weight=1.0)
    report = extensions.PrintReport(['iteration', 'main/loss'], out=Tee(model))
    bench.train(model, (report, every(1)))
    return {'weight': model.weight}


@script(SCRIPTS)
def an_observation_that_is_a_variable(bench):
    """Chainer reports a model's loss as a variable, so extensions can read its `array`."""
    seen = []
    bench.train(
        Squares(bench),
        (lambda trainer: seen.append(number(trainer.observation['main/loss'].array)), every(1)),
    )
    return {'seen': seen}


class Distilled(Squares):
    def __call__(self, atoms, adj, t):
        with chainer.no_backprop_mode():
            taught = TEACHING.target(atoms, adj)
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t) + F.mean_squared_error(y, taught.array)
        chainer.report({'loss': loss}, self)
        return loss


TEACHING = optimizers.SGD(0.1)


@script(SCRIPTS)
def a_teacher_that_another_optimizer_holds(bench):
    TEACHING.setup(bench.predictor())
    TEACHING.target.to_device(bench.device)
    bench.train(Distilled(bench))


class Adapted(Squares):
    """Model whose loss trains a copy of itself for a step, with an optimizer of its own."""

    def __call__(self, atoms, adj, t):
        adapted = copy.deepcopy(self.predictor)
        inner = optimizers.SGD(0.01).setup(adapted)
        inner.update(lambda: F.mean_squared_error(adapted(atoms, adj), t))
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t) + F.mean_squared_error(y, adapted(atoms, adj).array)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def an_optimizer_inside_of_the_loss(bench):
    bench.train(Adapted(bench))


class KeepsLabels(Squares):
    def __call__(self, atoms, adj, t):
        self.t = t
        return super().__call__(atoms, adj, t)


@script(SCRIPTS, quick=True)
def labels_that_the_loss_keeps(bench):
    bench.train(KeepsLabels(bench))


@script(SCRIPTS)
def labels_of_a_data_set_of_the_users_that_the_loss_keeps(bench):
    """A user's data set has no copy on the device, so each batch is sent there."""
    bench.train(KeepsLabels(bench), data=UsersExamples(bench.molecules()))


@script(SCRIPTS, quick=True)
def outputs_of_the_best_step_kept_without_a_copy(bench):
    model = regressor(bench)
    best: dict[str, Any] = {'loss': float('inf')}

    def keep(trainer):
        loss = number(trainer.observation['main/loss'])
        if loss < best['loss']:
            best.update(loss=loss, y=model.y)

    bench.train(model, (keep, every(1)))
    return {'loss': best['loss'], 'y': cuda.to_cpu(best['y'].array).ravel().tolist()}


@script(SCRIPTS)
def views_of_outputs_kept_without_a_copy(bench):
    model = regressor(bench)
    rows = []
    bench.train(model, (lambda trainer: rows.append(model.y.array[0]), every(1)))
    return {'rows': [number(row.sum()) for row in rows]}


class Lookback:
    """Hook of an optimizer that adds half of the last step's gradient, kept without a copy."""

    name = 'Lookback'
    call_for_each_param = True
    timing = 'pre'

    def __init__(self):
        self.last = {}

    def __call__(self, rule, param):
        gradient = param.grad
        if id(param) in self.last:
            param.grad = gradient + 0.5 * self.last[id(param)]
        self.last[id(param)] = gradient


@script(SCRIPTS)
def a_hook_that_keeps_gradients(bench):
    model = regressor(bench)
    updater = bench.updater(model)
    updater.get_optimizer('main').add_hook(Lookback())
    bench.run(updater)


@script(SCRIPTS, fused=True)
def an_extension_that_keeps_gradients(bench):
    """The extension logs how gradients change from step to step."""
    model = regressor(bench)
    kept: list[dict] = []

    def keep(trainer):
        kept.append({path: param.grad for path, param in model.namedparams()})

    bench.train(model, (keep, every(1)))
    changes = []
    for before, after in itertools.pairwise(kept):
        changes.append(sum(number(((after[path] - before[path]) ** 2).sum()) for path in after))
    return {'changes': changes}
