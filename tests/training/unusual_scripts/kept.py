"""Scripts that keep values of a step without a copy: later steps must leave them alone.

An eager step makes new arrays, and new dicts and lists around them. So what a script keeps from a
step stays as it was, and what it does to a dict or a list of one step is gone after the next one.
"""

import collections
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import chainer
from chainer import functions as F
from chainer.backends import cuda
from chainer_chemistry.models.prediction import Classifier, Regressor

from tests.training.unusual_scripts.bench import (
    at,
    Bench,
    every,
    N_LABELS,
    N_STEPS,
    number,
    script,
    Script,
    Squares,
    UsersExamples,
)

SCRIPTS: dict[str, Script] = {}

AT = at(5, 20, 25, 30, 40)  # eager, and captured
UNTIL_BEST = 33  # the best of so many steps is a captured one, and others follow


def digest(value: Any) -> dict[str, Any]:
    """Return the shape and the norm of a variable or an array."""
    array = cuda.to_cpu(getattr(value, 'array', value))
    return {'shape': list(array.shape), 'norm': float(numpy.linalg.norm(array))}


def of_steps(bench, model, get, trigger, **options) -> list:
    """Train, and return a list of ``get(model)`` of steps, which an extension keeps."""
    kept: list[Any] = []
    bench.train(model, ((lambda trainer: kept.append(get(model))), trigger), **options)
    return kept


def of_every_step(bench, model, get, **options) -> list:
    return of_steps(bench, model, get, every(1), **options)


def of_best_step(bench, model, get, *extended, **options) -> dict[str, Any]:
    """Train briefly, and return the least loss, its step, and ``get(model)`` of that step."""
    best: dict[str, Any] = {'loss': float('inf')}

    def keep(trainer):
        loss = number(trainer.observation['main/loss'])
        if loss < best['loss']:
            best.update(loss=loss, step=trainer.updater.iteration, value=get(model))

    bench.train(model, *extended, (keep, every(1)), n_steps=UNTIL_BEST, **options)
    return best


class Keeping(Squares):
    """Model whose loss calls `keep`, which assigns values of the step to attributes."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t)
        self.keep(y, loss, t)
        chainer.report({'loss': loss}, self)
        return loss

    def keep(self, y, loss, t):
        raise NotImplementedError


# The dict that a stock model makes at every step.


def mean_square(y, t):
    return F.mean(y**2)


def make_regressor(bench):
    metrics = {'mae': F.mean_absolute_error, 'mean square': mean_square}
    model = Regressor(bench.predictor(), lossfun=F.mean_squared_error, metrics_fun=metrics)
    return model, bench.molecules()


def make_classifier(bench):
    metrics = {'accuracy': F.binary_accuracy, 'mean square': mean_square}
    model = Classifier(bench.predictor(), lossfun=F.sigmoid_cross_entropy, metrics_fun=metrics)
    data = [(atoms, adj, (labels > 1).astype('i')) for atoms, adj, labels in bench.molecules()]
    return model, data


def numbers(metrics):
    return {name: number(value) for name, value in metrics.items()}


def of_the_best_step(bench, make):
    model, data = make(bench)
    best = of_best_step(bench, model, lambda model: model.metrics, data=data)
    return {**best, 'value': numbers(best['value'])}


def in_a_history(bench, make):
    model, data = make(bench)
    history = of_every_step(bench, model, lambda model: model.metrics, data=data)
    return [numbers(metrics) for metrics in history]


def in_a_history_of_ones_own_loop(bench, make):
    model, data = make(bench)
    updater = bench.updater(model, data=data)
    history = []
    for _ in range(N_STEPS):
        bench.step(updater)
        history.append(model.metrics)
    return [numbers(metrics) for metrics in history]


def with_an_entry_that_is_popped(bench, make):
    model, data = make(bench)
    first = next(iter(model.metrics_fun))
    popped = of_every_step(bench, model, lambda model: model.metrics.pop(first), data=data)
    return {'popped': list(map(number, popped)), 'left': list(model.metrics)}


def with_an_entry_that_is_popped_at_times(bench, make):
    """The entry is there again after the next step."""
    model, data = make(bench)
    names: list[list] = []

    def pop(trainer):
        names.append(list(model.metrics))
        if trainer.updater.iteration % 4 == 0:
            del model.metrics['mean square']

    bench.train(model, (pop, every(1)), data=data)
    return names


def with_an_entry_that_is_added(bench, make):
    """The entry is not there after the next step."""
    model, data = make(bench)
    first_epochs = []

    def add(trainer):
        first_epochs.append(model.metrics.setdefault('epoch', trainer.updater.epoch))

    bench.train(model, (add, every(1)), data=data)
    return {'epochs': first_epochs, 'names': list(model.metrics)}


def with_an_entry_that_is_added_at_times(bench, make):
    model, data = make(bench)
    names: list[list] = []

    def add(trainer):
        names.append(list(model.metrics))
        if trainer.updater.iteration % 4 == 0:
            model.metrics['epoch'] = trainer.updater.epoch

    bench.train(model, (add, every(1)), data=data)
    return names


def with_an_entry_that_is_scaled(bench, make):
    model, data = make(bench)
    scaled = []

    def scale(trainer):
        model.metrics['mean square'] *= 100
        scaled.append(number(model.metrics['mean square']))

    bench.train(model, (scale, every(1)), data=data)
    return scaled


def that_are_cleared(bench, make):
    model, data = make(bench)
    n = []

    def clear(trainer):
        n.append(len(model.metrics))
        model.metrics.clear()

    bench.train(model, (clear, every(1)), data=data)
    return n


OF_METRICS = (
    *(of_the_best_step, in_a_history, in_a_history_of_ones_own_loop),
    *(with_an_entry_that_is_popped, with_an_entry_that_is_popped_at_times),
    *(with_an_entry_that_is_added, with_an_entry_that_is_added_at_times),
    *(with_an_entry_that_is_scaled, that_are_cleared),
)
QUICK = of_the_best_step, with_an_entry_that_is_added
FUSED = of_the_best_step, with_an_entry_that_is_popped_at_times
for kind, make in {'regressor': make_regressor, 'classifier': make_classifier}.items():
    for run in OF_METRICS:
        SCRIPTS['metrics_of_a_%s_%s' % (kind, run.__name__)] = Script(
            functools.partial(run, make=make),
            quick=kind == 'regressor' and run in QUICK,
            fused=run in FUSED,
        )


@script(SCRIPTS)
def metrics_that_are_switched_off_at_times(bench):
    """A step without metrics leaves None, also after a step that was captured with metrics."""
    model, data = make_regressor(bench)
    kept = []

    def switch(trainer):
        kept.append(model.metrics and numbers(model.metrics))
        model.compute_metrics = trainer.updater.iteration % 10 < 5

    bench.train(model, (switch, every(1)), data=data)
    return kept


# Containers that a user's loss makes at every step.


class KeepsDict(Keeping):
    def keep(self, y, loss, t):
        self.parts = {'y': y, 'loss': loss}


class KeepsList(Keeping):
    def keep(self, y, loss, t):
        self.parts = [y.array, loss.array]


class KeepsTuple(Keeping):
    def keep(self, y, loss, t):
        self.parts = y, loss


class KeepsNested(Keeping):
    def keep(self, y, loss, t):
        self.parts = {'outputs': [y, {'array': y.array}], 'losses': (loss,)}


class KeepsOrderedDict(Keeping):
    def keep(self, y, loss, t):
        self.parts = collections.OrderedDict(y=y, loss=loss)


class KeepsDefaultDict(Keeping):
    def keep(self, y, loss, t):
        self.parts = collections.defaultdict(list)
        self.parts['outputs'].append(y)
        self.parts['losses'].append(loss)


class Output(NamedTuple):
    y: chainer.Variable
    loss: chainer.Variable


class KeepsNamedTuple(Keeping):
    def keep(self, y, loss, t):
        self.parts = Output(y, loss)


class KeepsDeque(Keeping):
    def keep(self, y, loss, t):
        self.parts = collections.deque([y, loss], maxlen=2)


@dataclasses.dataclass
class Result:
    y: chainer.Variable
    loss: Any


class KeepsDataclass(Keeping):
    def keep(self, y, loss, t):
        self.parts = Result(y, loss.array)


class KeepsObjectInDict(Keeping):
    def keep(self, y, loss, t):
        self.parts = {'result': Result(y, loss.array)}


class KeepsDistribution(Keeping):
    def keep(self, y, loss, t):
        self.parts = chainer.distributions.Normal(y, scale=F.exp(y))


class Parts(dict):
    """A user's dict with a title."""

    title = 'parts'


class KeepsSubclassOfDict(Keeping):
    def keep(self, y, loss, t):
        self.parts = Parts(y=y.array, loss=loss.array)


class Rows(list):
    """A user's list that knows the norm of all rows together."""

    def norm(self):
        return sum(float((row**2).sum()) for row in self) ** 0.5


class KeepsSubclassOfList(Keeping):
    def keep(self, y, loss, t):
        self.parts = Rows(y.array)


def shown(value):
    """Return a digest of a kept container, of its kind."""
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [shown(each) for each in value]
    if isinstance(value, Result):
        return shown(vars(value))
    if isinstance(value, chainer.distributions.Normal):
        return shown((value.loc, value.scale))
    return digest(value)


def kept_of_all_steps(bench, kind):
    kept = of_every_step(bench, kind(bench), lambda model: model.parts)
    return {'kinds': sorted({type(parts).__name__ for parts in kept}), 'kept': shown(kept)}


def kept_of_the_best_step(bench, kind):
    best = of_best_step(bench, kind(bench), lambda model: model.parts)
    return {**best, 'value': shown(best['value'])}


CONTAINERS = {
    'a_dict': KeepsDict,
    'a_list': KeepsList,
    'a_tuple': KeepsTuple,
    'a_nested_dict': KeepsNested,
    'an_ordered_dict': KeepsOrderedDict,
    'a_default_dict': KeepsDefaultDict,
    'a_named_tuple': KeepsNamedTuple,
    'a_deque': KeepsDeque,
    'a_dataclass': KeepsDataclass,
    'an_object_in_a_dict': KeepsObjectInDict,
    'a_distribution': KeepsDistribution,
    'a_dict_of_ones_own_class': KeepsSubclassOfDict,
    'a_list_of_ones_own_class': KeepsSubclassOfList,
}
for container, kind in CONTAINERS.items():
    for run in (kept_of_all_steps, kept_of_the_best_step):
        SCRIPTS['%s_%s' % (container, run.__name__)] = Script(
            functools.partial(run, kind=kind),
            quick=kind is KeepsDict and run is kept_of_the_best_step,
            fused=run is kept_of_the_best_step,
        )


def of_field(kind: type, get: Callable) -> Script:
    """Return a script that keeps a field of a container of every step."""

    def run(bench):
        return shown(of_every_step(bench, kind(bench), get))

    return Script(run)


FIELDS = {
    'a_value_of_a_dict': (KeepsDict, lambda model: model.parts['y']),
    'an_item_of_a_list': (KeepsList, lambda model: model.parts[0]),
    'an_item_of_a_tuple': (KeepsTuple, lambda model: model.parts[0]),
    'a_value_of_an_ordered_dict': (KeepsOrderedDict, lambda model: model.parts['y']),
    'a_value_of_a_default_dict': (KeepsDefaultDict, lambda model: model.parts['outputs']),
    'a_field_of_a_named_tuple': (KeepsNamedTuple, lambda model: model.parts.y),
    'a_field_of_a_dataclass': (KeepsDataclass, lambda model: model.parts.y),
    'an_item_of_a_deque': (KeepsDeque, lambda model: model.parts[0]),
    'the_array_of_a_field_of_a_named_tuple': (KeepsNamedTuple, lambda model: model.parts.y.array),
    'a_value_of_a_dict_of_ones_own_class': (KeepsSubclassOfDict, lambda model: model.parts['y']),
    'an_item_of_a_list_of_ones_own_class': (KeepsSubclassOfList, lambda model: model.parts[0]),
}
for name, (kind, get) in FIELDS.items():
    SCRIPTS[name + '_kept'] = of_field(kind, get)


class Size:
    step: int

    def __init__(self, n):
        self.n = n


class KeepsSize(Keeping):
    def keep(self, y, loss, t):
        self.size = Size(len(t))


@script(SCRIPTS)
def objects_of_the_steps_without_arrays_that_are_marked(bench):
    model = KeepsSize(bench)
    kept = []

    def mark(trainer):
        kept.append((model.size, hasattr(model.size, 'step')))
        model.size.step = trainer.updater.iteration

    bench.train(model, (mark, every(1)))
    return [(size.step, was_marked) for size, was_marked in kept]


class ChoosesLog(Keeping):
    """Model that chooses one of its lists, which were there before."""

    def keep(self, y, loss, t):
        self.log = self.logs[0]


@script(SCRIPTS)
def a_list_that_each_step_chooses_and_the_script_forgets(bench):
    model = ChoosesLog(bench, logs=([], []), log=None)

    def write(trainer):
        if trainer.updater.iteration % 8 == 0:
            model.log.append(trainer.updater.iteration)
        assert model.log is model.logs[0]
        model.log = None

    bench.train(model, (write, every(1)))
    return model.logs


class KeepsAtTimes(Keeping):
    def keep(self, y, loss, t):
        self.y = y if self.is_wanted else None


@script(SCRIPTS)
def an_output_of_some_steps_and_none_of_others(bench):
    model = KeepsAtTimes(bench, is_wanted=True, y=None)
    kept = []

    def choose(trainer):
        kept.append(None if model.y is None else digest(model.y))
        model.is_wanted = trainer.updater.iteration % 4 < 2

    bench.train(model, (choose, every(1)))
    return kept


class KeepsRows(Keeping):
    """Model that makes a list of the mean squared errors of its labels."""

    def keep(self, y, loss, t):
        self.rows = [F.mean((y[:, i] - t[:, i]) ** 2).array for i in range(t.shape[1])]


@script(SCRIPTS)
def a_list_of_the_step_that_is_extended_and_sorted(bench):
    model = KeepsRows(bench)
    kept = []

    def extend(trainer):
        model.rows.append(sum(model.rows))
        model.rows.sort(key=float, reverse=True)
        kept.append([number(row) for row in model.rows])

    bench.train(model, (extend, every(1)))
    return kept


@script(SCRIPTS)
def a_list_of_the_step_that_is_extended_at_times(bench):
    model = KeepsRows(bench)
    lengths = []

    def extend(trainer):
        lengths.append(len(model.rows))
        if trainer.updater.iteration % 4 == 0:
            model.rows.append(sum(model.rows))

    bench.train(model, (extend, every(1)))
    return lengths


@script(SCRIPTS)
def a_list_of_the_step_that_is_sorted_in_place(bench):
    model = KeepsRows(bench)
    kept = []

    def sort(trainer):
        before = [number(row) for row in model.rows]
        model.rows.sort(key=float)
        kept.append([before, [number(row) for row in model.rows]])

    bench.train(model, (sort, every(1)))
    return kept


@script(SCRIPTS)
def a_dict_of_the_step_with_an_entry_that_is_added(bench):
    model = KeepsDict(bench)
    names = []

    def add(trainer):
        names.append(sorted(model.parts))
        model.parts['epoch'] = trainer.updater.epoch

    bench.train(model, (add, every(1)))
    return names


class FillsDict(Keeping):
    """Model with one dict, which each step fills anew."""

    def keep(self, y, loss, t):
        self.parts.update(y=y, loss=loss)


@script(SCRIPTS)
def a_dict_that_stays_and_is_kept(bench):
    """All that is kept is the same dict, in Chainer's loop as well."""
    model = FillsDict(bench, parts={})
    kept = of_every_step(bench, model, lambda model: model.parts)
    return {'n': len(set(map(id, kept))), 'last': shown(kept[-1])}


@script(SCRIPTS)
def copies_of_a_dict_that_stays(bench):
    """A shallow copy has the arrays of its step."""
    model = FillsDict(bench, parts={})
    return shown(of_every_step(bench, model, lambda model: dict(model.parts)))


class KeepsNode(Keeping):
    def keep(self, y, loss, t):
        self.node = y.node


@script(SCRIPTS)
def the_node_of_an_output(bench):
    kept = of_every_step(bench, KeepsNode(bench), lambda model: model.node)
    return [digest(node.data) for node in kept]


@script(SCRIPTS)
def the_node_of_an_output_of_some_steps(bench):
    kept = of_steps(bench, KeepsNode(bench), lambda model: model.node, AT)
    return [digest(node.data) for node in kept]


# The batch itself.


class KeepsLabels(Keeping):
    def keep(self, y, loss, t):
        self.t = t


class KeepsLabelsInDict(Keeping):
    def keep(self, y, loss, t):
        self.t = {'labels': t}


class KeepsVariableOfLabels(Keeping):
    def keep(self, y, loss, t):
        self.t = chainer.Variable(t)


class KeepsViewOfLabels(Keeping):
    def keep(self, y, loss, t):
        self.t = t[:1]


class KeepsLabelsAndOutputs(Keeping):
    def keep(self, y, loss, t):
        self.t = y, t


def labels_of_all_steps(bench, kind, make):
    return shown(of_every_step(bench, kind(bench), lambda model: model.t, data=make(bench)))


def labels_of_some_steps(bench, kind, make):
    return shown(of_steps(bench, kind(bench), lambda model: model.t, AT, data=make(bench)))


def labels_in_ones_own_loop(bench, kind, make):
    model = kind(bench)
    updater = bench.updater(model, data=make(bench))
    kept = []
    for _ in range(N_STEPS):
        bench.step(updater)
        kept.append(model.t)
    return shown(kept)


LABELS = {
    'kept_by_reference': KeepsLabels,
    'kept_in_a_dict': KeepsLabelsInDict,
    'kept_as_a_variable': KeepsVariableOfLabels,
    'kept_as_a_view': KeepsViewOfLabels,
    'kept_with_outputs': KeepsLabelsAndOutputs,
}
OF_LABELS = labels_of_all_steps, labels_of_some_steps, labels_in_ones_own_loop
for name, kind in LABELS.items():
    for how in OF_LABELS:
        SCRIPTS['%s_%s' % (how.__name__, name)] = Script(
            functools.partial(how, kind=kind, make=Bench.molecules),
            quick=kind is KeepsLabels and how is labels_of_all_steps,
        )
for how in OF_LABELS:
    SCRIPTS[how.__name__ + '_of_a_data_set_of_the_users'] = Script(
        functools.partial(
            how, kind=KeepsLabels, make=lambda bench: UsersExamples(bench.molecules())
        )
    )


class ReportsLabels(Keeping):
    def keep(self, y, loss, t):
        chainer.report({'t': t}, self)


@script(SCRIPTS)
def labels_that_are_reported(bench):
    kept = []
    bench.train(
        ReportsLabels(bench), (lambda trainer: kept.append(trainer.observation['main/t']), every(1))
    )
    return shown(kept)


class KeepsBatch(Squares):
    """Model that assigns its inputs, and features of the atoms."""

    def __call__(self, atoms, adj, t):
        self.atoms, self.adj = atoms, adj
        self.h = self.predictor.graph_conv.embed(atoms)
        return super().__call__(atoms, adj, t)


def of_batch(read: Callable) -> Script:
    """Return a script that reads an input right after each step, of batches of many sizes."""

    def run(bench):
        read_of_all = of_every_step(bench, KeepsBatch(bench), read)
        return [value if isinstance(value, int) else shown(value) for value in read_of_all]

    return Script(run)


READ = {
    'the_number_of_atoms': lambda model: len(model.atoms),
    'the_number_of_molecules': lambda model: model.adj.n_graphs,
    'the_atoms': lambda model: model.atoms.copy(),
    'the_adjacency': lambda model: model.adj.to_dense(),
    'features_of_atoms': lambda model: model.h.array.copy(),
}
for name, read in READ.items():
    SCRIPTS[name + '_of_a_batch_read_after_each_step'] = of_batch(read)


@script(SCRIPTS)
def atoms_and_their_features_kept_by_reference(bench):
    return shown(of_every_step(bench, KeepsBatch(bench), lambda model: (model.atoms, model.h)))


@script(SCRIPTS)
def adjacencies_kept_by_reference(bench):
    kept = of_every_step(bench, KeepsBatch(bench), lambda model: model.adj)
    return [digest(adj.to_dense()) for adj in kept]


class KeepsAtoms(Squares):
    def __call__(self, atoms, adj, t):
        self.atoms = atoms
        return super().__call__(atoms, adj, t)


@script(SCRIPTS)
def only_the_atoms_read_after_each_step(bench):
    return of_every_step(bench, KeepsAtoms(bench), lambda model: model.atoms.tolist())


class KeepsAdjacency(Squares):
    def __call__(self, atoms, adj, t):
        self.adj = adj
        return super().__call__(atoms, adj, t)


@script(SCRIPTS)
def only_the_adjacency_read_after_each_step(bench):
    model = KeepsAdjacency(bench)
    dense = of_every_step(bench, model, lambda model: (model.adj.n_graphs, model.adj.to_dense()))
    return [{'n': n_graphs, **digest(matrices)} for n_graphs, matrices in dense]


class KeepsFeatures(Squares):
    def __call__(self, atoms, adj, t):
        self.h = self.predictor.graph_conv.embed(atoms)
        return super().__call__(atoms, adj, t)


@script(SCRIPTS)
def only_features_of_atoms_read_after_each_step(bench):
    return of_every_step(bench, KeepsFeatures(bench), lambda model: digest(model.h))


class KeepsOutput(Keeping):
    def keep(self, y, loss, t):
        self.y = y


def calibration(bench, kind, get):
    """Train a scale of the outputs on graphs of the last four steps."""
    model = kind(bench)
    scale = chainer.Parameter(bench.xp.ones((1, N_LABELS), 'f'))
    sums: list[chainer.Variable] = []
    gradients = []

    def calibrate(trainer):
        y = get(model)
        sums.append(F.sum(y * F.broadcast_to(scale, y.shape)))
        if trainer.updater.iteration % 4 == 0:
            scale.cleargrad()
            F.sum(F.stack(sums)).backward()
            gradients.append(digest(scale.grad))
            sums.clear()

    bench.train(model, (calibrate, every(1)))
    return gradients


OUTPUTS = {
    'outputs': (KeepsOutput, lambda model: model.y),
    'outputs_in_dicts': (KeepsDict, lambda model: model.parts['y']),
}
for name, (kind, get) in OUTPUTS.items():
    SCRIPTS['graphs_of_%s_of_several_steps' % name] = Script(
        functools.partial(calibration, kind=kind, get=get)
    )


# Variables that are inputs of the loss, and get a gradient.


class Noisy(Squares):
    """Model whose step adds a new variable to the outputs."""

    def __call__(self, atoms, adj, t):
        self.x = chainer.Variable(t * 0, name='noise')
        loss = F.mean_squared_error(self.predictor(atoms, adj) + self.x, t)
        chainer.report({'loss': loss}, self)
        return loss


class NoisyInDict(Noisy):
    def __call__(self, atoms, adj, t):
        loss = super().__call__(atoms, adj, t)
        self.inputs = {'x': self.x}
        del self.x
        return loss


def with_gradient(x):
    return {'name': x.name, 'x': digest(x), 'gradient': digest(x.grad)}


INPUTS = {
    'an_input': (Noisy, lambda model: model.x),
    'an_input_in_a_dict': (NoisyInDict, lambda model: model.inputs['x']),
}
for name, (kind, get) in INPUTS.items():
    for how, trigger in {'read': every(1), 'kept': AT, 'always_kept': every(1)}.items():

        def run(bench, kind=kind, get=get, is_read=how == 'read', trigger=trigger):
            read = with_gradient if is_read else (lambda x: x)
            kept = of_steps(bench, kind(bench), lambda model: read(get(model)), trigger)
            return kept if is_read else list(map(with_gradient, kept))

        SCRIPTS['%s_and_its_gradient_%s' % (name, how)] = Script(run)


@script(SCRIPTS)
def a_gradient_of_an_input_of_the_best_step(bench):
    best = of_best_step(bench, Noisy(bench), lambda model: model.x.grad)
    return {**best, 'value': digest(best['value'])}


@script(SCRIPTS)
def a_gradient_of_an_input_kept_as_a_variable(bench):
    return shown(of_steps(bench, Noisy(bench), lambda model: model.x.grad_var, AT))


class Scaled(Squares):
    """Model with a variable that no optimizer trains, and whose gradient nobody clears."""

    def __call__(self, atoms, adj, t):
        scale = F.broadcast_to(self.scale, t.shape)
        loss = F.mean_squared_error(self.predictor(atoms, adj) * scale, t)
        chainer.report({'loss': loss}, self)
        return loss


class ScaledAndCleared(Scaled):
    def __call__(self, atoms, adj, t):
        self.scale.cleargrad()
        return super().__call__(atoms, adj, t)


def make_scale(bench):
    return chainer.Variable(bench.xp.ones((1, N_LABELS), 'f'))


@script(SCRIPTS)
def a_gradient_of_a_variable_that_adds_up(bench):
    model = Scaled(bench, scale=make_scale(bench))
    return of_every_step(bench, model, lambda model: digest(model.scale.grad))


@script(SCRIPTS)
def a_gradient_of_a_variable_that_the_script_clears(bench):
    model = Scaled(bench, scale=make_scale(bench))
    read = []

    def clear(trainer):
        read.append(digest(model.scale.grad))
        model.scale.cleargrad()

    bench.train(model, (clear, every(1)))
    return read


@script(SCRIPTS)
def a_gradient_of_a_variable_that_the_step_clears(bench):
    model = ScaledAndCleared(bench, scale=make_scale(bench))
    kept = of_steps(bench, model, lambda model: model.scale.grad, AT)
    return shown(kept)


@script(SCRIPTS)
def a_variable_that_the_script_trains(bench):
    model = ScaledAndCleared(bench, scale=make_scale(bench))
    read = []

    def descend(trainer):
        model.scale.array -= 0.1 * model.scale.grad
        read.append(digest(model.scale))

    bench.train(model, (descend, every(1)))
    return read


class KeepsLossGradient(Squares):
    """Model that keeps the gradient of its output, of an additional backward pass."""

    def __call__(self, atoms, adj, t):
        self.y = self.predictor(atoms, adj)
        F.mean_squared_error(self.y, t).backward(retain_grad=True)
        loss = F.mean_absolute_error(self.y, t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def a_retained_gradient_of_an_output(bench):
    return shown(of_every_step(bench, KeepsLossGradient(bench), lambda model: model.y.grad))


@script(SCRIPTS)
def a_retained_gradient_of_an_output_of_some_steps(bench):
    return shown(of_steps(bench, KeepsLossGradient(bench), lambda model: model.y.grad, AT))


class Logits(chainer.Variable):
    """A user's variable."""


class KeepsLogits(Keeping):
    def keep(self, y, loss, t):
        self.y = Logits(y.array)


class KeepsLogitsInList(Keeping):
    def keep(self, y, loss, t):
        self.y = [Logits(y.array)]


def kinds_and_values(bench, kind):
    kept = of_steps(bench, kind(bench), lambda model: model.y, AT)
    return [[type(y).__name__ for y in kept], shown(kept)]


SCRIPTS['variables_of_ones_own_class'] = Script(
    functools.partial(kinds_and_values, kind=KeepsLogits)
)
SCRIPTS['variables_of_ones_own_class_in_lists'] = Script(
    functools.partial(kinds_and_values, kind=KeepsLogitsInList)
)


# Outputs that cyclic garbage of a step refers to, too.


class LeavesFunction(Keeping):
    """Model whose step has a function that refers to itself, and to the output."""

    def keep(self, y, loss, t):
        def countdown(n):
            return y.array if n == 0 else countdown(n - 1)

        self.y = countdown(2)


class LeavesDict(Keeping):
    """Model whose step has a dict that refers to itself, and to the output."""

    def keep(self, y, loss, t):
        context: dict[str, Any] = {'y': y.array}
        context['self'] = context
        self.y = context['y']


class LeavesError(Keeping):
    """Model whose step keeps an error, whose frame refers to the error and the output."""

    def keep(self, y, loss, t):
        array = y.array
        try:
            raise ValueError
        except ValueError as error:
            kept = error
        self.y = array if kept.args == () else None


def collect(trainer):
    gc.collect()


class Collector:
    """Context in which garbage is collected only on demand."""

    def __enter__(self):
        gc.collect()
        gc.disable()

    def __exit__(self, *error):
        gc.enable()


def best_output_with_the_collector_off(bench, kind):
    with Collector():
        best = of_best_step(bench, kind(bench), lambda model: model.y, (collect, every(4)))
    return {**best, 'value': shown(best['value'])}


def some_outputs_with_the_collector_off(bench, kind):
    """Garbage is collected just after an output is kept, so that the count of references falls."""
    model = kind(bench)
    kept = []

    def keep(trainer):
        kept.append(model.y)
        gc.collect()

    with Collector():
        bench.train(model, (keep, AT))
    return shown(kept)


def outputs_without_any_collection(bench, kind):
    with Collector():
        kept = of_every_step(bench, kind(bench), lambda model: model.y)
    return shown(kept)


GARBAGE = {'a_function': LeavesFunction, 'a_dict': LeavesDict, 'an_error': LeavesError}
for name, kind in GARBAGE.items():
    for run in (
        best_output_with_the_collector_off,
        some_outputs_with_the_collector_off,
        outputs_without_any_collection,
    ):
        SCRIPTS['%s_and_garbage_of_%s' % (run.__name__, name)] = Script(
            functools.partial(run, kind=kind)
        )


@script(SCRIPTS)
def outputs_kept_while_the_collector_often_runs(bench):
    before = gc.get_threshold()
    gc.set_threshold(200, 2, 2)
    try:
        kept = of_steps(bench, LeavesDict(bench), lambda model: model.y, AT)
    finally:
        gc.set_threshold(*before)
    return shown(kept)
