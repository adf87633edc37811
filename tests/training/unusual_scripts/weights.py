"""Scripts that change a value of the loss, in every place where Python can keep one.

An extension, or the user's own loop, changes a weight between two steps. It does so late, because
more of the first replays are checked, and once for a single step.
"""

import argparse
import collections
import configparser
import dataclasses
import enum
import functools
import operator
import os
import sys
import types
from typing import Any, NamedTuple

import numpy

import chainer
from chainer import functions as F, optimizers, training
from chainer.training import extensions
from chainer_chemistry.models.prediction import Regressor

from tests.training.unusual_scripts.bench import (
    at,
    changed_by,
    CHANGES,
    every,
    number,
    script,
    Script,
    Squares,
    Weighted,
)

SCRIPTS: dict[str, Script] = {}


class OfAttribute(Weighted):
    def factor(self):
        return self.weight


@script(SCRIPTS)
def an_attribute(bench):
    model = OfAttribute(bench, weight=1.0)
    bench.train(model, changed_by(lambda weight: setattr(model, 'weight', weight)))
    return {'weight': model.weight}


class Reporting(Weighted):
    """Model that reports its weight, which is a number, beside the loss."""

    def factor(self):
        chainer.report({'weight': self.weight, 'is_large': self.weight > 0.5}, self)
        return self.weight


@script(SCRIPTS, n_captures=4)
def an_attribute_that_is_reported(bench):
    model = Reporting(bench, weight=1.0)
    bench.train(model, changed_by(lambda weight: setattr(model, 'weight', weight)))


class ReportingRate(Squares):
    """Model that reports the learning rate of its optimizer."""

    def weighed(self, loss):
        chainer.report({'lr': self.optimizer.lr}, self)
        return loss


@script(SCRIPTS, fused=True)
def a_learning_rate_that_is_reported(bench):
    optimizer = optimizers.SGD(0.05)
    model = ReportingRate(bench, optimizer=optimizer)
    bench.train(model, (extensions.ExponentialShift('lr', 0.5), at(21, 37)), optimizer=optimizer)


class OfDict(Weighted):
    def factor(self):
        return self.weights['mse']


@script(SCRIPTS)
def a_dict_in_an_attribute(bench):
    model = OfDict(bench, weights={'mse': 1.0})
    bench.train(model, changed_by(lambda weight: model.weights.update(mse=weight)))
    return model.weights


class OfList(Weighted):
    def factor(self):
        return self.weights[0]


@script(SCRIPTS)
def a_list_in_an_attribute(bench):
    model = OfList(bench, weights=[1.0, 2.0])
    bench.train(model, changed_by(lambda weight: model.weights.__setitem__(0, weight)))
    return {'weights': model.weights}


CONFIG = {'weight': 1.0, 'mode': 'mse'}


class OfGlobalDict(Weighted):
    def factor(self):
        return CONFIG['weight']


@script(SCRIPTS)
def a_global_dict(bench):
    bench.train(OfGlobalDict(bench), changed_by(lambda weight: CONFIG.update(weight=weight)))
    return CONFIG


WEIGHT = 1.0


def set_weight(weight):
    global WEIGHT
    WEIGHT = weight


class OfGlobal(Weighted):
    def factor(self):
        return WEIGHT


@script(SCRIPTS)
def a_global_that_a_method_names(bench):
    bench.train(OfGlobal(bench), changed_by(set_weight))
    return {'weight': WEIGHT}


def lossfun_of_global(y, t):
    return F.mean_squared_error(y, t) * WEIGHT


@script(SCRIPTS)
def a_global_that_lossfun_names(bench):
    bench.train(Regressor(bench.predictor(), lossfun=lossfun_of_global), changed_by(set_weight))
    return {'weight': WEIGHT}


def innermost():
    return WEIGHT


def inner():
    return innermost()


class ByHelpers(Weighted):
    def factor(self):
        return inner()


@script(SCRIPTS)
def a_global_that_a_function_of_a_function_names(bench):
    bench.train(ByHelpers(bench), changed_by(set_weight))
    return {'weight': WEIGHT}


class OfClass(Weighted):
    weight = 1.0

    def factor(self):
        return self.weight


@script(SCRIPTS)
def a_class_attribute(bench):
    bench.train(OfClass(bench), changed_by(lambda weight: setattr(OfClass, 'weight', weight)))
    return {'weight': OfClass.weight}


class Settings:
    weight = 1.0


class OfSettings(Weighted):
    def factor(self):
        return Settings.weight


@script(SCRIPTS)
def an_attribute_of_a_class_of_settings(bench):
    bench.train(OfSettings(bench), changed_by(lambda weight: setattr(Settings, 'weight', weight)))
    return {'weight': Settings.weight}


def weighed_by(bench, factor, change):
    """Train a Regressor whose loss function multiplies by the result of `factor`."""

    def lossfun(y, t):
        return F.mean_squared_error(y, t) * factor()

    bench.train(Regressor(bench.predictor(), lossfun=lossfun), changed_by(change))


@script(SCRIPTS)
def an_object_in_a_closure(bench):
    settings = types.SimpleNamespace(weight=1.0)
    weighed_by(bench, lambda: settings.weight, lambda w: setattr(settings, 'weight', w))
    return vars(settings)


args = argparse.Namespace(weight=1.0)


class OfArguments(Weighted):
    def factor(self):
        return args.weight


@script(SCRIPTS)
def a_global_namespace_of_arguments(bench):
    bench.train(OfArguments(bench), changed_by(lambda weight: setattr(args, 'weight', weight)))
    return vars(args)


@dataclasses.dataclass
class Config:
    weight: float = 1.0
    name: str = 'mse'


@script(SCRIPTS)
def a_dataclass(bench):
    made = Config()
    weighed_by(bench, lambda: made.weight, lambda weight: setattr(made, 'weight', weight))
    return dataclasses.asdict(made)


class Slotted:
    __slots__ = ('weight',)
    weight: float


@script(SCRIPTS)
def slots(bench):
    slotted = Slotted()
    slotted.weight = 1.0
    weighed_by(bench, lambda: slotted.weight, lambda weight: setattr(slotted, 'weight', weight))
    return {'weight': slotted.weight}


class Weights(NamedTuple):
    mse: float
    mae: float


class OfNamedTuple(Weighted):
    def factor(self):
        return self.weights.mse


@script(SCRIPTS)
def a_named_tuple_that_is_replaced(bench):
    model = OfNamedTuple(bench, weights=Weights(1.0, 0.0))

    def change(weight):
        model.weights = model.weights._replace(mse=weight)

    bench.train(model, changed_by(change))
    return model.weights._asdict()


@script(SCRIPTS)
def a_variable_of_a_closure(bench):
    weight = 1.0

    def change(value):
        nonlocal weight
        weight = value

    weighed_by(bench, lambda: weight, change)
    return {'weight': weight}


config: Any = types.ModuleType('weights_of_a_user')
config.weight = 1.0


class OfModule(Weighted):
    def factor(self):
        return config.weight


@script(SCRIPTS)
def a_module_of_settings(bench):
    sys.modules['weights_of_a_user'] = config
    try:
        bench.train(OfModule(bench), changed_by(lambda weight: setattr(config, 'weight', weight)))
    finally:
        del sys.modules['weights_of_a_user']
    return {'weight': config.weight}


@script(SCRIPTS)
def a_list_in_dicts(bench):
    nested = {'loss': {'weights': [1.0, 0.5]}}

    def change(weight):
        nested['loss']['weights'][0] = weight

    weighed_by(bench, lambda: nested['loss']['weights'][0], change)
    return nested


@script(SCRIPTS, outside='a replay of the captured step differs from an eager one in .*')
def an_environment_variable(bench):
    os.environ['WEIGHT_OF_A_USER'] = '1.0'
    try:
        weighed_by(
            bench,
            lambda: float(os.environ['WEIGHT_OF_A_USER']),
            lambda weight: os.environ.update(WEIGHT_OF_A_USER=str(weight)),
        )
        return {'weight': os.environ['WEIGHT_OF_A_USER']}
    finally:
        del os.environ['WEIGHT_OF_A_USER']


class OfArray(Squares):
    def weighed(self, loss):
        return loss * self.weight


@script(SCRIPTS)
def an_array_written_in_place(bench):
    model = OfArray(bench, weight=bench.xp.ones((), 'f'))
    bench.train(model, changed_by(model.weight.fill))
    return {'weight': number(model.weight)}


@script(SCRIPTS)
def an_array_that_is_replaced(bench):
    model = OfArray(bench, weight=bench.xp.ones((), 'f'))

    def change(weight):
        model.weight = bench.xp.full((), weight, 'f')

    bench.train(model, changed_by(change))
    return {'weight': number(model.weight)}


class OfArrayInDict(Squares):
    def weighed(self, loss):
        return loss * self.weights['mse']


@script(SCRIPTS)
def an_array_in_a_dict_that_is_replaced(bench):
    model = OfArrayInDict(bench, weights={'mse': bench.xp.ones((), 'f')})

    def change(weight):
        model.weights['mse'] = bench.xp.full((), weight, 'f')

    bench.train(model, changed_by(change))
    return {'weight': number(model.weights['mse'])}


class ByTable(Weighted):
    """Model with weights of tasks in an array on the host."""

    def factor(self):
        return float(self.table[0])


@script(SCRIPTS)
def an_array_of_the_host_written_in_place(bench):
    model = ByTable(bench, table=numpy.ones(3))
    bench.train(model, changed_by(model.table.fill))
    return {'table': model.table.tolist()}


class ByProperty(Weighted):
    @property
    def weight(self):
        return self.options['base'] * 2

    def factor(self):
        return self.weight


@script(SCRIPTS)
def a_property_of_a_dict(bench):
    model = ByProperty(bench, options={'base': 0.5})
    bench.train(model, changed_by(lambda weight: model.options.update(base=weight)))
    return model.options


class Annealed(Weighted):
    """Model with KL annealing, for which an extension writes `beta` after each step."""

    def factor(self):
        return self.beta


@script(SCRIPTS)
def annealing_at_every_step(bench):
    model = Annealed(bench, beta=0.0)

    def anneal(trainer):
        model.beta = min(1.0, trainer.updater.iteration / 30)

    bench.train(model, (anneal, every(1)))
    return {'beta': model.beta}


@script(SCRIPTS)
def annealing_in_a_dict_at_every_step(bench):
    model = OfDict(bench, weights={'mse': 0.0})

    def anneal(trainer):
        model.weights['mse'] = min(1.0, trainer.updater.iteration / 30)

    bench.train(model, (anneal, every(1)))
    return model.weights


class Curriculum(Weighted):
    """Model that reads the iteration of an updater, which is assigned later."""

    updater: Any = None

    def factor(self):
        return 1.0 if self.updater.iteration < 21 else 0.3


@script(SCRIPTS)
def the_iteration_of_the_updater(bench):
    model = Curriculum(bench)
    model.updater = bench.updater(model)
    bench.run(model.updater)


class OfEpoch(Weighted):
    iterator: Any = None

    def factor(self):
        return 1 / (1 + self.iterator.epoch)


@script(SCRIPTS)
def the_epoch_of_the_iterator(bench):
    model = OfEpoch(bench)
    updater = bench.updater(model)
    model.iterator = updater.get_iterator('main')
    bench.run(updater)


@script(SCRIPTS)
def the_epoch_of_the_updater_in_a_lambda(bench):
    holder: dict[str, Any] = {}

    def lossfun(y, t):
        return F.mean_squared_error(y, t) * (0.5 if holder['updater'].epoch > 5 else 1.0)

    updater = bench.updater(Regressor(bench.predictor(), lossfun=lossfun))
    holder['updater'] = updater
    bench.run(updater)


@script(SCRIPTS)
def the_rate_of_the_optimizer(bench):
    optimizer = optimizers.SGD(0.1)

    def lossfun(y, t):
        return F.mean_squared_error(y, t) * (10 * optimizer.lr)

    def change(trainer):
        optimizer.lr *= 0.5

    bench.train(
        Regressor(bench.predictor(), lossfun=lossfun), (change, at(19)), optimizer=optimizer
    )
    return {'lr': optimizer.lr}


@script(SCRIPTS)
def the_count_of_the_optimizer(bench):
    optimizer = optimizers.SGD(0.1)

    def lossfun(y, t):
        return F.mean_squared_error(y, t) * (1 - 0.5 ** (optimizer.t + 1))

    bench.train(Regressor(bench.predictor(), lossfun=lossfun), optimizer=optimizer)
    return {'t': optimizer.t}


class OfConfiguration(Weighted):
    def factor(self):
        return chainer.config.weight_of_a_user


@script(SCRIPTS)
def the_configuration_of_chainer(bench):
    configuration: Any = chainer.global_config
    configuration.weight_of_a_user = 1.0
    try:
        change = functools.partial(setattr, configuration, 'weight_of_a_user')
        bench.train(OfConfiguration(bench), changed_by(change))
    finally:
        del configuration.weight_of_a_user


def weight_of(n):
    return 1.0


class ByFunction(Weighted):
    def factor(self):
        return weight_of(1)


@script(SCRIPTS)
def a_global_function_that_is_replaced(bench):
    def change(weight):
        globals()['weight_of'] = lambda n: weight

    bench.train(ByFunction(bench), changed_by(change))
    return {'weight': weight_of(1)}


class Patched(Weighted):
    pass


@script(SCRIPTS)
def a_method_of_a_class_that_is_replaced(bench):
    def change(weight):
        Patched.factor = lambda self: weight

    bench.train(Patched(bench), changed_by(change))


@script(SCRIPTS)
def a_method_of_one_object_that_is_replaced(bench):
    model = Patched(bench)

    def change(weight):
        model.factor = lambda: weight

    bench.train(model, changed_by(change))


@script(SCRIPTS)
def functions_by_name_in_a_dict(bench):
    functions = {'mse': F.mean_squared_error, 'mae': F.mean_absolute_error}
    settings = {'kind': 'mse'}

    def lossfun(y, t):
        return functions[settings['kind']](y, t)

    def change(weight):
        settings['kind'] = 'mae' if weight < 1 else 'mse'

    bench.train(Regressor(bench.predictor(), lossfun=lossfun), changed_by(change))
    return settings


class Mode(enum.Enum):
    HALF = 0.5
    FULL = 1.0


class OfMode(Weighted):
    mode = Mode.FULL

    def factor(self):
        return self.mode.value


@script(SCRIPTS)
def a_member_of_an_enum(bench):
    model = OfMode(bench)

    def change(weight):
        model.mode = Mode.HALF if weight < 1 else Mode.FULL

    bench.train(model, changed_by(change))


is_warm = False


class OfFlag(Weighted):
    def factor(self):
        return 1.0 if is_warm else 0.25


@script(SCRIPTS)
def a_global_flag_that_is_set_for_one_step(bench):
    def change(weight):
        global is_warm
        is_warm = weight == 2.0

    bench.train(OfFlag(bench), changed_by(change))


@script(SCRIPTS)
def a_set_of_tasks(bench):
    tasks = {'energy'}

    def lossfun(y, t):
        loss = F.mean_squared_error(y[:, :1], t[:, :1])
        if 'gap' in tasks:
            loss += F.mean_squared_error(y[:, 1:], t[:, 1:])
        return loss

    def change(weight):
        tasks.symmetric_difference_update(['gap'])

    bench.train(Regressor(bench.predictor(), lossfun=lossfun), changed_by(change))
    return {'tasks': sorted(tasks)}


class OfTasks(Squares):
    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        losses = [F.mean_squared_error(y[:, i], t[:, i]) for i in range(2)]
        loss = sum(weight * loss for weight, loss in zip(self.weights, losses))
        chainer.report({'loss': loss, 'first': losses[0], 'second': losses[1]}, self)
        return loss


@script(SCRIPTS)
def weights_of_tasks_in_a_list(bench):
    model = OfTasks(bench, weights=[0.5, 0.5])

    def change(weight):
        model.weights[:] = weight, 1 - weight

    bench.train(model, changed_by(change))
    return {'weights': model.weights}


@script(SCRIPTS)
def weights_of_tasks_by_their_losses(bench):
    """An extension reads the reported losses, and gives less weight to tasks that are learned."""
    model = OfTasks(bench, weights=[0.5, 0.5])

    def balance(trainer):
        first, second = (number(trainer.observation['main/' + n]) for n in ('first', 'second'))
        model.weights = [first / (first + second), second / (first + second)]

    bench.train(model, (balance, every(7)))
    return {'weights': model.weights}


class ByName(Weighted):
    def factor(self):
        return getattr(self.options, 'w_%d' % 0)


@script(SCRIPTS)
def an_attribute_by_getattr(bench):
    model = ByName(bench, options=types.SimpleNamespace(w_0=1.0))
    bench.train(model, changed_by(lambda weight: setattr(model.options, 'w_0', weight)))
    return vars(model.options)


class ByVars(Weighted):
    def factor(self):
        return vars(self.options)['weight']


@script(SCRIPTS)
def an_attribute_by_vars(bench):
    model = ByVars(bench, options=types.SimpleNamespace(weight=1.0))
    bench.train(model, changed_by(lambda weight: setattr(model.options, 'weight', weight)))
    return vars(model.options)


@script(SCRIPTS)
def a_default_argument(bench):
    def lossfun(y, t, weights={'mse': 1.0}):  # noqa: B006
        return F.mean_squared_error(y, t) * weights['mse']

    model = Regressor(bench.predictor(), lossfun=lossfun)
    bench.train(model, changed_by(lambda weight: lossfun.__defaults__[0].update(mse=weight)))


@script(SCRIPTS)
def defaults_that_are_replaced(bench):
    def lossfun(y, t, weight=1.0):
        return F.mean_squared_error(y, t) * weight

    def change(weight):
        lossfun.__defaults__ = (weight,)

    bench.train(Regressor(bench.predictor(), lossfun=lossfun), changed_by(change))


@script(SCRIPTS)
def keyword_defaults_that_are_changed_in_place(bench):
    def lossfun(y, t, *, weight=1.0):
        return F.mean_squared_error(y, t) * weight

    def change(weight):
        lossfun.__kwdefaults__['weight'] = weight

    bench.train(Regressor(bench.predictor(), lossfun=lossfun), changed_by(change))


HALF, FULL = object(), object()


class OfSentinel(Weighted):
    """Model that compares sentinels, objects with nothing but an identity."""

    size = FULL

    def factor(self):
        return 0.5 if self.size is HALF else 1.0


@script(SCRIPTS)
def a_sentinel_that_is_replaced(bench):
    model = OfSentinel(bench)

    def change(weight):
        model.size = HALF if weight < 1 else FULL

    bench.train(model, changed_by(change))


def of_partial(y, t, weight):
    return F.mean_squared_error(y, t) * weight


@script(SCRIPTS)
def keywords_of_a_partial(bench):
    lossfun = functools.partial(of_partial, weight=1.0)
    model = Regressor(bench.predictor(), lossfun=lossfun)
    bench.train(model, changed_by(lambda weight: lossfun.keywords.update(weight=weight)))
    return lossfun.keywords


class Trained:
    def __init__(self, predictor):
        self.predictor = predictor
        self.options = {'weight': 1.0}

    def loss(self, atoms, adj, t):
        loss = F.mean_squared_error(self.predictor(atoms, adj), t) * self.options['weight']
        chainer.report({'loss': loss}, self.predictor)
        return loss


@script(SCRIPTS)
def a_dict_of_the_object_whose_method_is_the_loss(bench):
    trained = Trained(bench.predictor())
    change = changed_by(lambda weight: trained.options.update(weight=weight))
    bench.train(trained.predictor, change, loss_func=trained.loss)
    return trained.options


class ByAttributeAccess(dict):
    """A dict with its items as attributes, as in configuration libraries."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class OfAttributeAccess(Weighted):
    def factor(self):
        return self.cfg.loss.weight


@script(SCRIPTS)
def a_dict_with_attributes(bench):
    cfg = ByAttributeAccess(loss=ByAttributeAccess(weight=1.0))
    model = OfAttributeAccess(bench, cfg=cfg)
    bench.train(model, changed_by(lambda weight: setattr(cfg.loss, 'weight', weight)))
    return dict(cfg.loss)


class Dynamic:
    def __init__(self, values):
        object.__setattr__(self, '_values', values)

    def __getattr__(self, name):
        return object.__getattribute__(self, '_values')[name]


@script(SCRIPTS)
def an_object_with_getattr_of_its_own(bench):
    values = {'weight': 1.0}
    settings = Dynamic(values)
    weighed_by(bench, lambda: settings.weight, lambda weight: values.update(weight=weight))
    return values


@script(SCRIPTS)
def a_configparser(bench):
    parser = configparser.ConfigParser()
    parser['loss'] = {'weight': '1.0'}
    weighed_by(
        bench,
        lambda: parser.getfloat('loss', 'weight'),
        lambda weight: parser.set('loss', 'weight', str(weight)),
    )
    return dict(parser['loss'])


@script(SCRIPTS)
def a_chain_map_and_a_user_dict(bench):
    chosen = collections.UserDict(weight=1.0)
    both = collections.ChainMap({}, chosen, {'weight': 9.0})
    weighed_by(bench, lambda: both['weight'], lambda weight: chosen.update(weight=weight))
    return dict(chosen)


class Descriptor:
    values: dict[int, float] = {}

    def __get__(self, owner, kind=None):
        return self if owner is None else self.values.get(id(owner), 1.0)

    def __set__(self, owner, value):
        self.values[id(owner)] = value


class OfDescriptor(Weighted):
    weight = Descriptor()

    def factor(self):
        return self.weight


@script(SCRIPTS)
def a_descriptor(bench):
    model = OfDescriptor(bench)
    bench.train(model, changed_by(lambda weight: setattr(model, 'weight', weight)))
    return {'weight': model.weight}


class OfFunctionInAttribute(Weighted):
    def factor(self):
        return self.schedule(1.0)


@script(SCRIPTS)
def a_lambda_in_an_attribute_that_is_replaced(bench):
    model = OfFunctionInAttribute(bench, schedule=lambda x: x)

    def change(weight):
        model.schedule = lambda x: x * weight

    bench.train(model, changed_by(change))


class ByTrainer(Weighted):
    trainer: Any = None

    def factor(self):
        return 1.0 if self.trainer.updater.iteration % 10 < 5 else 0.5


class Connect(training.Extension):
    """Extension that gives the trainer to a model before the first step."""

    def __init__(self, model):
        self.model = model

    def initialize(self, trainer):
        self.model.trainer = trainer

    def __call__(self, trainer):
        pass


@script(SCRIPTS)
def the_iteration_by_the_trainer(bench):
    model = ByTrainer(bench)
    bench.train(model, (Connect(model), at(47)))


class OfAttributeOfLibrary(Weighted):
    def factor(self):
        return self.predictor.mlp.weight_of_a_user


@script(SCRIPTS)
def an_attribute_on_a_link_of_a_library(bench):
    model = OfAttributeOfLibrary(bench)
    model.predictor.mlp.weight_of_a_user = 1.0

    def change(weight):
        model.predictor.mlp.weight_of_a_user = weight

    bench.train(model, changed_by(change))


class OfString(Weighted):
    def factor(self):
        return float(self.text.partition('=')[2])


@script(SCRIPTS)
def a_string_that_is_parsed(bench):
    model = OfString(bench, text='weight=1.0')
    bench.train(model, changed_by(lambda weight: setattr(model, 'text', 'weight=%s' % weight)))
    return {'text': model.text}


@script(SCRIPTS)
def a_loop_of_ones_own(bench):
    model = OfDict(bench, weights={'mse': 1.0})
    updater = bench.updater(model)
    for i in range(1, 49):
        bench.step(updater)
        if i in CHANGES:
            model.weights['mse'] = CHANGES[i]
    return model.weights


class OfLongList(Weighted):
    def factor(self):
        return self.table[700]


@script(SCRIPTS)
def an_item_of_a_long_list(bench):
    model = OfLongList(bench, table=[1.0] * 1000)
    bench.train(model, changed_by(lambda weight: model.table.__setitem__(700, weight)))


factors = {0: 1.0, 1: 0.25}


class Stage(enum.IntEnum):
    WARM = 0
    FULL = 1

    def factor(self):
        return factors[int(self)]


class OfStage(Weighted):
    def factor(self):
        return self.stage.factor()


@script(SCRIPTS)
def a_method_of_a_number_of_an_enum(bench):
    model = OfStage(bench, stage=Stage.WARM)
    bench.train(model, changed_by(lambda weight: factors.update({0: weight})))


@dataclasses.dataclass(eq=False, repr=False)
class ByIdentity:
    """Dataclass of which no code names a field."""

    coefficient: float = 1.0


by_identity = ByIdentity()


class OfFieldsByIdentity(Weighted):
    def factor(self):
        return sum(dataclasses.asdict(by_identity).values())


@script(SCRIPTS)
def fields_of_a_dataclass_without_methods(bench):
    bench.train(
        OfFieldsByIdentity(bench),
        changed_by(lambda weight: setattr(by_identity, 'coefficient', weight)),
    )


nested = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0))
weight_in = operator.attrgetter('loss.weight')


class ByGetter(Weighted):
    def factor(self):
        return weight_in(nested)


@script(SCRIPTS)
def an_attrgetter(bench):
    bench.train(ByGetter(bench), changed_by(lambda weight: setattr(nested.loss, 'weight', weight)))


class OfText(Weighted):
    def factor(self):
        return float('{0.weight}'.format(nested.loss))  # NOQA: UP032


@script(SCRIPTS)
def a_field_of_a_format(bench):
    bench.train(OfText(bench), changed_by(lambda weight: setattr(nested.loss, 'weight', weight)))


class Full:
    def factor(self):
        return 1.0


class Quarter:
    def factor(self):
        return 0.25


class OfObject(Weighted):
    def factor(self):
        return self.stage.factor()


@script(SCRIPTS, quick=True)
def the_class_of_an_object(bench):
    model = OfObject(bench, stage=Full())

    def change(weight):
        model.stage.__class__ = Quarter if weight < 1 else Full

    bench.train(model, changed_by(change))


class Parameters:
    """Settings that are read from a file."""

    def __init__(self, **given):
        self.__dict__ = given


parameters: Any = Parameters(weight=1.0)


class OfParameters(Weighted):
    def factor(self):
        return parameters.weight


@script(SCRIPTS)
def the_dict_of_an_object_that_is_replaced(bench):
    def change(weight):
        parameters.__dict__ = {'weight': weight}

    bench.train(OfParameters(bench), changed_by(change))


class OfTwo(Squares):
    """Model that keeps its output in one namespace, and reads an array of that name in another."""

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        self.last.weight = y.array
        loss = F.mean_squared_error(y, t) * self.given.weight[0]
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, quick=True)
def two_namespaces_with_equal_names(bench):
    last = types.SimpleNamespace(weight=None)
    given = types.SimpleNamespace(weight=bench.xp.ones(2, 'f'))

    def change(weight):
        given.weight = bench.xp.full(2, weight, 'f')

    bench.train(OfTwo(bench, last=last, given=given), changed_by(change))


class Group:
    def __init__(self):
        self.settings = [types.SimpleNamespace(weight=1.0) for _ in range(200)]


class OfGroups(Weighted):
    def factor(self):
        return self.groups[3].settings[-1].weight


@script(SCRIPTS)
def the_last_of_800_objects(bench):
    model = OfGroups(bench, groups=[Group() for _ in range(4)])
    changed = model.groups[3].settings[-1]
    bench.train(model, changed_by(lambda weight: setattr(changed, 'weight', weight)))


class Named:
    kind = 'warm'

    def __str__(self):
        return self.kind


class ByString(Weighted):
    def factor(self):
        return {'warm': 1.0, 'full': 0.25}[str(self.named)]


@script(SCRIPTS)
def an_object_that_is_made_a_string(bench):
    model = ByString(bench, named=Named())

    def change(weight):
        model.named.kind = 'full' if weight < 1 else 'warm'

    bench.train(model, changed_by(change))


LATE_FACTOR: float  # an extension assigns it


def factor_of_late_global():
    try:
        return LATE_FACTOR
    except NameError:
        return 1.0


class OfLateGlobal(Weighted):
    def factor(self):
        return factor_of_late_global()


@script(SCRIPTS)
def a_global_that_is_made_later(bench):
    def change(weight):
        global LATE_FACTOR
        LATE_FACTOR = weight

    bench.train(OfLateGlobal(bench), changed_by(change))


class OfNamespace(Weighted):
    def factor(self):
        return 1.0 if 'is_full' in ARGUMENTS else 0.25


ARGUMENTS = argparse.Namespace(is_full=True)


@script(SCRIPTS)
def a_namespace_that_is_searched(bench):
    def change(weight):
        vars(ARGUMENTS).pop('is_full', None)
        if weight > 0.5:
            ARGUMENTS.is_full = True

    bench.train(OfNamespace(bench), changed_by(change))


class OfModuleByText(Weighted):
    key = 'WEIGHT'

    def factor(self):
        return getattr(settings_by_text, self.key)


settings_by_text: Any = types.ModuleType('settings_of_a_user')
settings_by_text.WEIGHT = 1.0


@script(SCRIPTS)
def a_module_that_is_read_by_text(bench):
    bench.train(
        OfModuleByText(bench),
        changed_by(lambda weight: setattr(settings_by_text, 'WEIGHT', weight)),
    )


class OfRate(Weighted):
    def factor(self):
        rule: Any = next(self.params()).update_rule
        return 20 * rule.hyperparam.lr


@script(SCRIPTS)
def the_rate_of_an_update_rule(bench):
    updater = bench.updater(OfRate(bench))
    optimizer = updater.get_optimizer('main')
    bench.run(updater, changed_by(lambda weight: setattr(optimizer, 'lr', 0.05 * weight)))


def inverse(n):
    return 1.0 / n


table: Any = functools.lru_cache(maxsize=None)(inverse)
table.weight = 1.0


class OfCachedFunction(Weighted):
    def factor(self):
        return table(2) * table.weight


@script(SCRIPTS)
def an_attribute_of_a_cached_function(bench):
    bench.train(
        OfCachedFunction(bench), changed_by(lambda weight: setattr(table, 'weight', weight))
    )


class Heads(Weighted):
    def __init__(self, bench):
        super().__init__(bench)
        with self.init_scope():
            self.heads = chainer.ChainList(chainer.links.Linear(2, 2), chainer.links.Linear(2, 2))

    def __call__(self, atoms, adj, t):
        loss = F.mean_squared_error(self.heads[0](self.predictor(atoms, adj)), t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS)
def heads_that_change_places(bench):
    model = Heads(bench)
    bench.train(model, (lambda trainer: model.heads._children.reverse(), at(21, 30)))


class Term:
    weight = 0.0


class Absolute(Term):
    weight = 0.5


class Huber(Term):
    weight = 0.5


class OfTerms(Weighted):
    def factor(self):
        return sum(kind.weight for kind in Term.__subclasses__())


@script(SCRIPTS)
def classes_found_by_their_base(bench):
    bench.train(OfTerms(bench), changed_by(lambda weight: setattr(Huber, 'weight', weight)))
    return {'weight': Huber.weight}


class Plugin:
    weight = 1.0


PLUGINS = []


class OfPlugins(Weighted):
    def factor(self):
        return 1 + sum(kind.weight for kind in Plugin.__subclasses__())


@script(SCRIPTS, n_captures=2)
def a_class_that_is_defined_later(bench):
    def define(trainer):
        class Late(Plugin):
            pass

        PLUGINS.append(Late)

    bench.train(OfPlugins(bench), (define, at(21)))


class Replaced(Full):
    pass


@script(SCRIPTS, n_captures=2)
def a_base_class_that_is_replaced(bench):
    bench.train(
        OfObject(bench, stage=Replaced()),
        (lambda trainer: setattr(Replaced, '__bases__', (Quarter,)), at(21)),
    )


class BySquares(Squares):
    def __call__(self, atoms, adj, t):
        loss = F.mean_squared_error(self.predictor(atoms, adj), t)
        chainer.report({'loss': loss}, self)
        return loss


@script(SCRIPTS, n_captures=2)
def a_function_of_chainer_that_is_replaced(bench):
    original = F.mean_squared_error

    def replace(trainer):
        F.mean_squared_error = F.mean_absolute_error

    try:
        bench.train(BySquares(bench), (replace, at(21)))
    finally:
        F.mean_squared_error = original


CHAINER: Any = chainer


@script(SCRIPTS)
def the_report_of_chainer_that_is_replaced(bench):
    report = chainer.report

    def replace(trainer):
        chainer.report = lambda values, observer=None: report(
            {'own_' + name: value for name, value in values.items()}, observer
        )

    try:
        bench.train(Squares(bench), (replace, at(21)))
    finally:
        chainer.report = report
    return list(bench.reports[-1])


class OfChainer(Weighted):
    def factor(self):
        return CHAINER.weight_of_a_user


@script(SCRIPTS, n_captures=4)
def a_variable_in_the_module_of_chainer(bench):
    CHAINER.weight_of_a_user = 1.0
    try:
        change = changed_by(lambda weight: setattr(chainer, 'weight_of_a_user', weight))
        bench.train(OfChainer(bench), change)
        return {'weight': CHAINER.weight_of_a_user}
    finally:
        del CHAINER.weight_of_a_user


class OfLinks(Weighted):
    def factor(self):
        return self.weight_of_a_user


@script(SCRIPTS, n_captures=4)
def an_attribute_of_the_class_link(bench):
    CHAINER.Link.weight_of_a_user = 1.0
    try:
        change = changed_by(lambda weight: setattr(chainer.Link, 'weight_of_a_user', weight))
        bench.train(OfLinks(bench), change)
        return {'weight': CHAINER.Link.weight_of_a_user}
    finally:
        del CHAINER.Link.weight_of_a_user


READ = {'weight': 1.0}


@functools.lru_cache(maxsize=None)
def settings():
    return {name: value for name, value in READ.items()}


class OfReadSettings(Weighted):
    def factor(self):
        return settings()['weight']


@script(SCRIPTS, n_captures=3)
def a_cache_that_is_cleared(bench):
    """The first change is not read, because the cache still has the old settings."""
    bench.train(
        OfReadSettings(bench),
        (lambda trainer: READ.update(weight=0.5), at(15)),
        (lambda trainer: settings.cache_clear(), at(30)),
    )
    return settings()
