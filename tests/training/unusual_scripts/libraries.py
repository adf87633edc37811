"""Scripts whose state lies in objects of libraries: Python's own, NumPy's and Chainer's.

Such an object is followed like a user's. If a trial would leave it changed, a warning names that as
the reason why steps are not captured, and why there is no check on a GPU.
"""

import concurrent.futures
import functools
import logging
import multiprocessing
import optparse
import random
import threading
import types
import weakref
from typing import Any

import numpy
import scipy.sparse

import chainer
from chainer import distributions, function_hooks, functions as F, initializers
from chainer.datasets import ConcatenatedDataset, DictDataset
from chainer.datasets import SubDataset, TransformDataset, TupleDataset
from chainer.training import extensions, triggers
from chainer_chemistry.models.prediction import Regressor

from tests.training.unusual_scripts.bench import (
    at,
    changed_by,
    every,
    number,
    script,
    Script,
    Squares,
    warm,
    Weighted,
)

SCRIPTS: dict[str, Script] = {}


class Normalised(Squares):
    """Model whose loss is divided by the mean of all losses so far."""

    def weighed(self, loss):
        self.summary.add(loss.array)
        return loss / float(self.summary.compute_mean())


@script(SCRIPTS, quick=True, told=r'changes the attribute _n of Summary')
def a_summary_of_chainer(bench):
    model = Normalised(bench, summary=chainer.reporter.Summary())
    bench.train(model)
    return {'n': model.summary._n}


class WithNoise(Weighted):
    def factor(self):
        return 1 + 0.1 * self.rng.spawn(1)[0].normal()


@script(SCRIPTS, told=r'a check would leave children of the attribute rng of WithNoise')
def children_of_a_generator(bench):
    model = WithNoise(bench, rng=numpy.random.default_rng(3))
    bench.train(model)
    return {'spawned': model.rng.bit_generator.seed_seq.n_children_spawned}


class OfEntropy(Weighted):
    def factor(self):
        return 1.0 if self.rng is None else 0.5


@script(SCRIPTS, n_captures=1)
def a_generator_of_the_system(bench):
    """The generator has no state, so it does not prevent a capture."""
    bench.train(OfEntropy(bench, rng=random.SystemRandom()))


FACTORS = numpy.linspace(0.1, 1, 4000).flat


class ByFlatIterator(Weighted):
    def factor(self):
        return float(next(FACTORS))


@script(SCRIPTS, told=r'a check would leave changes in FACTORS of .* \(flatiter\)')
def an_iterator_of_numpy(bench):
    bench.train(ByFlatIterator(bench))
    return {'index': FACTORS.index}


RECORD = numpy.zeros(1, dtype=[('n', 'i4'), ('sum', 'f8')])


class ByRecord(Weighted):
    def factor(self):
        RECORD['n'] += 1
        return warm(int(RECORD['n'][0]))


@script(SCRIPTS)
def a_structured_array(bench):
    bench.train(ByRecord(bench))
    return {'n': RECORD.tolist()}


MASKED = numpy.ma.array([1.0, 100.0, 2.0], mask=[0, 1, 0])


class OfMasked(Weighted):
    def factor(self):
        return float(MASKED.mean())


@script(SCRIPTS, quick=True, told=r'a check would leave changes in MASKED of .* \(MaskedArray\)')
def a_masked_array(bench):
    bench.train(OfMasked(bench))
    return {'mask': MASKED.mask.tolist()}


@script(SCRIPTS, told=r'a check would leave changes in the attribute table of Squares')
def a_masked_array_that_no_code_reads(bench):
    model = Squares(bench, table=numpy.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]))
    bench.train(model)
    return {'table': str(model.table)}


class OfMatrix(Weighted):
    def factor(self):
        return float(self.matrix[0, 0] * self.weights[0])


@script(SCRIPTS, told=r'a check would leave changes in the attribute matrix of OfMatrix')
def a_matrix_of_numpy(bench):
    matrix = scipy.sparse.eye(3).todense()
    bench.train(OfMatrix(bench, matrix=matrix, weights=numpy.ones(2)))


class Cell:
    def __init__(self):
        self.n = 0


GRID = numpy.array([[Cell(), Cell()]], dtype=object)


class ByGrid(Weighted):
    def factor(self):
        GRID[0, 1].n += 1
        return warm(GRID[0, 1].n)


@script(SCRIPTS, told=r'a check would leave changes in GRID of .* \(ndarray\)')
def an_array_of_objects(bench):
    bench.train(ByGrid(bench))
    return {'n': GRID[0, 1].n}


class CountingArray(numpy.ndarray):
    """Array of a user's class that counts how often it is written."""

    n_writes = 0

    def __setitem__(self, index, value):
        CountingArray.n_writes += 1
        super().__setitem__(index, value)


WRITTEN = numpy.ones(3, 'f').view(CountingArray)


class OfCountingArray(Weighted):
    def factor(self):
        return float(WRITTEN[0])


@script(SCRIPTS, told=r'a check would leave changes in WRITTEN of .* \(CountingArray\)')
def an_array_of_a_users_class(bench):
    bench.train(OfCountingArray(bench))
    return {'n': CountingArray.n_writes}


class CountsInTexts(Weighted):
    def factor(self):
        self.texts[0] += 'x'
        return warm(len(self.texts[0]))


@script(SCRIPTS)
def an_array_of_texts_that_the_step_writes(bench):
    model = CountsInTexts(bench, texts=numpy.array([''], 'U80'))
    bench.train(model)
    return {'texts': model.texts.tolist()}


SCALE = 1.0
scaled = numpy.vectorize(lambda x: x * SCALE)


class ByVectorized(Weighted):
    def factor(self):
        return float(scaled(1.0))


@script(SCRIPTS)
def a_vectorized_function(bench):
    def change(weight):
        global SCALE
        SCALE = weight

    bench.train(ByVectorized(bench), changed_by(change))


class Weight:
    """Descriptor that keeps a value for each object, by the well-known recipe."""

    def __init__(self):
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind=None):
        return self if owner is None else self.values.get(owner, 1.0)

    def __set__(self, owner, value):
        self.values[owner] = value


class Task:
    weight = Weight()


class OfTask(Weighted):
    def factor(self):
        return self.task.weight


@script(SCRIPTS, told=r'a check would keep alive what the attribute values of Weight refers')
def weak_keys(bench):
    model = OfTask(bench, task=Task())
    bench.train(model, changed_by(lambda weight: setattr(model.task, 'weight', weight)))
    return {'weight': model.task.weight}


class ByProxy(Weighted):
    def factor(self):
        self.task.n += 1
        return warm(self.task.n)


@script(SCRIPTS, told=r'a check would keep alive what the attribute task of ByProxy refers')
def behind_a_weak_proxy(bench):
    task: Any = Task()
    task.n = 0
    bench.train(ByProxy(bench, task=weakref.proxy(task)))
    return {'n': task.n}


IS_FULL = threading.Event()


class OfEvent(Weighted):
    def factor(self):
        return 0.25 if IS_FULL.is_set() else 1.0


@script(SCRIPTS)
def an_event_of_threads(bench):
    bench.train(
        OfEvent(bench), changed_by(lambda weight: [IS_FULL.clear, IS_FULL.set][weight < 1]())
    )
    return {'is full': IS_FULL.is_set()}


class ByThread(Weighted):
    def factor(self):
        return self.pool.submit(self.advanced).result()

    def advanced(self):
        self.local.n = getattr(self.local, 'n', 0) + 1
        return warm(self.local.n)


@script(SCRIPTS)
def a_variable_of_another_thread(bench):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        model = ByThread(bench, pool=pool, local=threading.local())
        bench.train(model)
        return {'n': pool.submit(lambda: model.local.n).result()}


parser = optparse.OptionParser()
parser.add_option('--weight', type=float, default=1.0)
options, _ = parser.parse_args([])


class OfOptions(Weighted):
    def factor(self):
        return options.weight


@script(SCRIPTS)
def options_of_the_command_line(bench):
    bench.train(OfOptions(bench), changed_by(lambda weight: setattr(options, 'weight', weight)))


SHARED = multiprocessing.Value('i', 0)


class ByShared(Weighted):
    def factor(self):
        with SHARED.get_lock():
            SHARED.value += 1
        return warm(SHARED.value)


@script(SCRIPTS, told=r'a check would leave changes in the attribute _obj of Synchronized')
def a_number_of_several_processes(bench):
    bench.train(ByShared(bench))
    return {'n': SHARED.value}


noise = numpy.random.RandomState(5)
seen: list[float] = []


def augmented(x):
    seen.append(x)
    return x + 0.1 * noise.normal()


class OfDataset(Weighted):
    def factor(self):
        return float(self.factors[len(seen) % 3])


@script(SCRIPTS, told=r'changes (noise|seen) of')
def a_dataset_with_a_transform(bench):
    bench.train(OfDataset(bench, factors=TransformDataset([1.0, 0.9, 0.8], augmented)))
    return {'seen': seen, 'next': noise.normal()}


@functools.lru_cache(maxsize=None)
def settings():
    return types.SimpleNamespace(weight=1.0)


class OfSettings(Weighted):
    def factor(self):
        return settings().weight


@script(SCRIPTS)
def a_single_object_in_a_cache(bench):
    settings()
    bench.train(OfSettings(bench), changed_by(lambda weight: setattr(settings(), 'weight', weight)))
    return vars(settings())


n_made = 0


@functools.lru_cache(maxsize=None)
def reciprocal(n):
    global n_made
    n_made += 1
    return 1 / n


def lossfun_of_cache(y, t, factor=functools.partial(reciprocal, 2)):  # NOQA: B008
    return F.mean_squared_error(y, t) * factor()


@script(SCRIPTS, told=r'a check would leave results in the cache of a default of lossfun_of_cache')
def a_partial_of_a_cached_function(bench):
    bench.train(Regressor(bench.predictor(), lossfun=lossfun_of_cache))
    return {'made': n_made}


class OfConfiguration(Weighted):
    def factor(self):
        return chainer.config.of_a_user.weight


@script(SCRIPTS)
def an_object_in_the_configuration_of_chainer(bench):
    own = types.SimpleNamespace(weight=1.0)
    with chainer.using_config('of_a_user', own):
        bench.train(
            OfConfiguration(bench), changed_by(lambda weight: setattr(own, 'weight', weight))
        )
    return vars(own)


class CountsInConfiguration(Weighted):
    def factor(self):
        chainer.config.of_a_user['n'] += 1
        return warm(chainer.config.of_a_user['n'])


@script(SCRIPTS, told=r"changes 'n' in the attribute of_a_user of chainer\.config")
def a_dict_in_the_configuration_of_chainer(bench):
    own = {'n': 0}
    with chainer.using_config('of_a_user', own):
        bench.train(CountsInConfiguration(bench))
    return own


def lossfun_of_class(y, t):
    Regressor.n_of_a_user += 1
    return F.mean_squared_error(y, t) * warm(Regressor.n_of_a_user)


@script(SCRIPTS, quick=True, told=r'changes n_of_a_user of class Regressor')
def an_attribute_of_a_librarys_class(bench):
    Regressor.n_of_a_user = 0
    try:
        bench.train(Regressor(bench.predictor(), lossfun=lossfun_of_class))
        return {'n': Regressor.n_of_a_user}
    finally:
        del Regressor.n_of_a_user


class Decayed(Squares):
    """Model with a penalty for each parameter that has a user's attribute."""

    def weighed(self, loss):
        for param in self.params():
            if hasattr(param, 'decay'):
                loss += param.decay * F.sum(param**2)
        return loss


@script(SCRIPTS)
def an_attribute_of_a_parameter(bench):
    model = Decayed(bench)
    embedded = model.predictor.graph_conv.embed.W
    embedded.decay = 0.1
    bench.train(model, changed_by(lambda weight: setattr(embedded, 'decay', weight / 100)))


class OfVariable(Squares):
    def weighed(self, loss):
        return loss * self.scale


class OfArrayOfVariable(Squares):
    def weighed(self, loss):
        return loss * self.scale.array


def scalar(bench, value):
    return bench.xp.array(value, 'f')


@script(SCRIPTS)
def a_variable_that_is_replaced(bench):
    model = OfVariable(bench, scale=chainer.Variable(scalar(bench, 1)))

    def change(weight):
        model.scale = chainer.Variable(scalar(bench, weight))

    bench.train(model, changed_by(change))


@script(SCRIPTS)
def the_array_of_a_variable_that_is_replaced(bench):
    model = OfArrayOfVariable(bench, scale=chainer.Variable(scalar(bench, 1)))

    def change(weight):
        model.scale.array = scalar(bench, weight)

    bench.train(model, changed_by(change))


class WithMean(Squares):
    """Model that divides by the moving average of its losses, in a variable."""

    def weighed(self, loss):
        mean = self.mean.array
        mean *= 0.9
        mean += 0.1 * loss.array
        return loss / (mean + 0.1)


@script(SCRIPTS)
def a_variable_that_the_loss_writes(bench):
    model = WithMean(bench, mean=chainer.Variable(scalar(bench, 0)))
    bench.train(model)
    return {'mean': number(model.mean)}


class Spectral(Squares):
    """Model with a penalty for the largest singular value, by power iteration."""

    def weighed(self, loss):
        weight = self.predictor.mlp.l_out.W.array
        left = self.left['out'].array
        right = (weight * left[:, None]).sum(axis=0)
        right /= self.xp.sqrt((right**2).sum())
        product = (weight * right).sum(axis=1)
        norm = self.xp.sqrt((product**2).sum())
        left[...] = product / norm
        return loss * (1 + 0.1 * norm)


@script(SCRIPTS)
def a_variable_in_a_dict_that_the_loss_writes(bench):
    left = chainer.Variable(bench.xp.array([1, 0], 'f'))
    bench.train(Spectral(bench, left={'out': left}))
    return {'left': [float(value) for value in left.array]}


class WithPrior(Squares):
    def weighed(self, loss):
        return loss - self.prior.log_prob(self.one) * loss


@script(SCRIPTS)
def a_distribution_that_is_replaced(bench):
    def prior(scale):
        return distributions.Normal(loc=scalar(bench, 0), scale=scalar(bench, scale))

    model = WithPrior(bench, prior=prior(1), one=scalar(bench, 1))
    bench.train(model, changed_by(lambda weight: setattr(model, 'prior', prior(1 + weight))))


class ByReport(Weighted):
    def factor(self):
        log = self.report.log
        return min(1.0, float(log[-1]['main/loss'])) if log else 1.0


@script(SCRIPTS)
def the_last_entry_of_a_report(bench):
    report = extensions.LogReport(trigger=every(5), log_name=None)
    bench.train(ByReport(bench, report=report), (report, every(1)))
    return {'n': len(report.log)}


class Observer:
    alive: weakref.WeakSet = weakref.WeakSet()

    def __init__(self, weight):
        self.weight = weight
        Observer.alive.add(self)


class OfObservers(Weighted):
    def factor(self):
        return sum(observer.weight for observer in Observer.alive)


@script(SCRIPTS, told=r'a check would keep alive what alive of class Observer refers to weakly')
def a_set_of_weak_references(bench):
    held = [Observer(0.5), Observer(0.5)]
    bench.train(
        OfObservers(bench),
        (lambda trainer: held.append(Observer(1.0)), at(10)),
        (lambda trainer: held.pop(0), at(21)),
    )
    return {'alive': len(Observer.alive)}


class Taught(Squares):
    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t)
        teacher = self.teacher()
        if teacher is not None:
            with chainer.no_backprop_mode():
                taught = teacher(atoms, adj)
            loss += 0.5 * F.mean_squared_error(y, taught)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, told=r'a check would keep alive what the attribute teacher of Taught')
def a_teacher_that_is_dropped(bench):
    model = Taught(bench)
    held = [model.predictor.copy('copy')]
    model.teacher = weakref.ref(held[0])
    if bench.device.xp is not numpy:
        held[0].to_device(bench.device)
    bench.train(model, (lambda trainer: held.clear(), at(21)))
    return {'is_alive': model.teacher() is not None}


class Reporting(Squares):
    """Model with a reporter of its own, to which it reports the loss before it is weighed."""

    def __init__(self, bench):
        super().__init__(bench)
        self.reporter = chainer.Reporter()
        self.reporter.add_observer('parts', self)

    def weighed(self, loss):
        with self.reporter:
            chainer.report({'squares': loss}, self)
        return loss * 0.5


@script(SCRIPTS)
def a_reporter_of_the_models_own(bench):
    model = Reporting(bench)
    parts = []

    def keep(trainer):
        parts.append(number(model.reporter.observation['parts/squares']))

    bench.train(model, (keep, every(1)))
    return {'parts': parts}


class ReportingToTrainer(Squares):
    """Model that reports to the Trainer's reporter by a reference of its own."""

    def weighed(self, loss):
        if self.reporter is not None:
            self.reporter.report({'squares': loss}, self)
        return loss * 0.5


@script(SCRIPTS, n_captures=1)
def the_reporter_of_the_trainer(bench):
    model = ReportingToTrainer(bench, reporter=None)
    squares = []

    def keep(trainer):
        model.reporter = trainer.reporter
        squares.append(number(trainer.observation.get('main/squares', 0.0)))

    bench.train(model, (keep, every(1)))
    return {'squares': squares}


class Timed(Squares):
    def weighed(self, loss):
        with self.timer:
            return loss * 0.5


@script(SCRIPTS, told=r'the step changes the attribute call_history of TimerHook at every run')
def a_hook_around_part_of_the_loss(bench):
    model = Timed(bench, timer=function_hooks.TimerHook())
    bench.train(model)
    return {'calls': len(model.timer.call_history)}


class OfInitializer(Weighted):
    def factor(self):
        return self.constant.fill_value


@script(SCRIPTS, n_captures=4)
def a_value_of_an_initializer(bench):
    model = OfInitializer(bench, constant=initializers.Constant(1.0))
    bench.train(model, changed_by(lambda weight: setattr(model.constant, 'fill_value', weight)))


class OfNode(Squares):
    def weighed(self, loss):
        return loss * self.node.slope


@script(SCRIPTS, n_captures=4)
def a_value_of_a_function(bench):
    model = OfNode(bench, node=F.activation.leaky_relu.LeakyReLU(slope=1.0))
    bench.train(model, changed_by(lambda weight: setattr(model.node, 'slope', weight)))


class OfCreator(Squares):
    """Model that keeps the function of its loss, which leads to the graph of the step."""

    def weighed(self, loss):
        loss = F.leaky_relu(loss, self.slope)
        self.node = loss.creator
        return loss * self.node.slope + loss


@script(SCRIPTS, told=r'the step changes the attribute node of OfCreator at every run')
def a_function_of_each_step(bench):
    model = OfCreator(bench, slope=1.0)
    bench.train(model, changed_by(lambda weight: setattr(model, 'slope', weight)))
    return {'slope': model.node.slope}


class OfExample(Weighted):
    def factor(self):
        return self.examples[0]


@script(SCRIPTS, n_captures=4)
def an_example_of_a_part(bench):
    weights = [1.0, 0.0]
    bench.train(
        OfExample(bench, examples=SubDataset(weights, 0, 1)),
        changed_by(lambda weight: weights.__setitem__(0, weight)),
    )


@script(SCRIPTS, n_captures=4)
def an_example_of_joined_parts(bench):
    weights = [1.0]
    bench.train(
        OfExample(bench, examples=ConcatenatedDataset(weights, [0.0])),
        changed_by(lambda weight: weights.__setitem__(0, weight)),
    )


class OfField(Weighted):
    def factor(self):
        return self.examples[0][self.field]


@script(SCRIPTS, n_captures=4)
def a_field_of_an_example(bench):
    weights = [1.0]
    bench.train(
        OfField(bench, examples=TupleDataset([0.0], weights), field=1),
        changed_by(lambda weight: weights.__setitem__(0, weight)),
    )


@script(SCRIPTS, n_captures=4)
def a_field_with_a_name(bench):
    weights = [1.0]
    bench.train(
        OfField(bench, examples=DictDataset(weight=weights), field='weight'),
        changed_by(lambda weight: weights.__setitem__(0, weight)),
    )


class OfBest(Weighted):
    def factor(self):
        best = self.trigger._best_value
        return 1.0 if best is None else 1 / (1 + best)


@script(SCRIPTS)
def the_best_value_of_a_trigger(bench):
    """The trigger changes at every step, because it adds up the reported values."""
    trigger = triggers.MinValueTrigger('main/loss', every(10))
    model = OfBest(bench, trigger=trigger)
    best = []
    bench.train(model, (lambda trainer: best.append(trigger._best_value), trigger))
    return {'best': best}


logger = logging.getLogger('libraries_of_a_user')


class Verbose(Weighted):
    def factor(self):
        return 0.5 if logger.isEnabledFor(logging.INFO) else 1.0


@script(SCRIPTS, n_captures=2)
def logging_that_is_disabled(bench):
    logger.setLevel(logging.INFO)
    try:
        bench.train(
            Verbose(bench),
            (lambda trainer: logging.disable(logging.CRITICAL), at(21)),
            (lambda trainer: logging.disable(logging.NOTSET), at(33)),
        )
    finally:
        logging.disable(logging.NOTSET)
