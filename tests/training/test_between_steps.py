"""`BetweenSteps`: whether a Trainer may have changed state that a step reads."""

import contextlib
import functools
import types

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import optimizers, training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.triggers import EarlyStoppingTrigger, ManualScheduleTrigger, OnceTrigger
from chainer.training.triggers import TimeTrigger
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.training.extensions.auto_print_report import AutoPrintReport

from chainer_bspmm.training import GraphUpdater, update
from chainer_bspmm.training.program import Program
from chainer_bspmm.training.training_driver import TrainingDriver
from chainer_bspmm.training.between_steps import BetweenSteps
from tests.support import assert_close_arrays
from tests.support.training import make_updater, parameters, run, same_molecules, small_model
from tests.support.training import three_columns, without_dropout

PER_EPOCH = 4  # steps


class Updater(training.Updater):
    """An updater that records the answer of `BetweenSteps` before each step."""

    def __init__(self):
        self.iteration = 0
        self.told = []

    def connect_trainer(self, trainer):
        self.between = BetweenSteps(trainer, Updater)

    def update(self):
        self.told.append(self.between.had_no_effect(self))
        chainer.report({'loss': 1.0})
        self.iteration += 1

    @property
    def epoch(self):
        return self.iteration // PER_EPOCH

    epoch_detail = property(lambda self: self.iteration / PER_EPOCH)
    previous_epoch_detail = property(lambda self: (self.iteration - 1) / PER_EPOCH)
    is_new_epoch = property(lambda self: self.iteration % PER_EPOCH == 0)

    def finalize(self):
        pass

    def get_all_optimizers(self):
        return {}


def make_trainer(updater, out, n_steps=10, kind=training.Trainer):
    return kind(updater, (n_steps, 'iteration'), out=str(out))


def run_with(out, *given, n_steps=10, updater=None, kind=training.Trainer):
    """Train; return the indices of the steps before which the guards need not look."""
    updater = updater or Updater()
    trainer = make_trainer(updater, out, n_steps, kind)
    for extension, trigger in given:
        trainer.extend(extension, trigger=trigger)
    trainer.run()
    return [i for i, told in enumerate(updater.told) if told]


def a_users(trainer):
    pass


def test_extensions_that_only_report(tmp_path):
    another = extensions.LogReport(trigger=(1, 'epoch'), filename='log_2')
    harmless = [
        (extensions.LogReport(trigger=(3, 'iteration')), None),
        (another, ManualScheduleTrigger([2], 'iteration')),
        (extensions.PrintReport(['loss']), (1, 'epoch')),
        *((extension, None) for extension in (AutoPrintReport(), extensions.ProgressBar())),
    ]
    assert run_with(tmp_path, *harmless) == list(range(2, 10))


LOOKS = [((3, 'iteration'), {3, 6, 9}), ((1, 'epoch'), {4, 8})]
LOOKS += [((2, 'epoch'), {4, 8})]  # once more than it is called
ALWAYS = [(1, 'iteration'), (0.5, 'epoch'), (float('inf'), 'epoch'), lambda trainer: False]
ALWAYS += [ManualScheduleTrigger([5], 'iteration')]


@pytest.mark.parametrize('trigger, looks', [*LOOKS, *((of, {*range(10)}) for of in ALWAYS)])
def test_another_extension(tmp_path, trigger, looks):
    actual = run_with(tmp_path, (extensions.LogReport(), None), (a_users, trigger))
    assert actual == sorted(set(range(2, 10)) - looks)


def test_an_extension_that_is_never_called(tmp_path):
    updater = Updater()
    trainer = make_trainer(updater, tmp_path)
    trainer.extend(a_users)
    trainer._extensions['a_users'].trigger = training.get_trigger(None)
    trainer.run()
    assert updater.told == [False] * 2 + [True] * 8


@pytest.mark.parametrize(
    'of', [lambda log: log, lambda log: extensions.PrintReport(['loss'], log), AutoPrintReport]
)
def test_functions_of_users(tmp_path, of):
    log = extensions.LogReport(postprocess=a_users)
    assert run_with(tmp_path, (of(log), None)) == []
    own = type('OfUser', (extensions.LogReport,), {})
    assert run_with(tmp_path, (own(), None)) == []


class File:
    """A user's file object, whose methods may change anything."""

    def write(self, text):
        pass


@pytest.mark.parametrize('kind', [AutoPrintReport, functools.partial(extensions.PrintReport, [])])
def test_a_file_of_the_users(tmp_path, kind):
    log = extensions.LogReport(trigger=(5, 'iteration'), log_name=None)
    assert run_with(tmp_path, (log, None), (kind(out=File()), (7, 'iteration'))) == [
        *(2, 3, 4, 5, 6, 8, 9)
    ]


def never(trainer):
    return False


def test_a_trigger_of_the_users_in_a_report(tmp_path):
    assert run_with(tmp_path, (extensions.LogReport(trigger=never), None)) == []


def test_a_trigger_of_the_users_at_a_report(tmp_path):
    assert run_with(tmp_path, (extensions.PrintReport(['loss']), never)) == []


STOPS = {
    'ManualScheduleTrigger': ManualScheduleTrigger([10], 'iteration'),
    'OnceTrigger': OnceTrigger(),
    'TimeTrigger': TimeTrigger(1000),
    'EarlyStoppingTrigger': EarlyStoppingTrigger((4, 'iteration'), 'loss'),
    'of a user': never,
    'EarlyStoppingTrigger that asks one of a user': EarlyStoppingTrigger(never, 'loss'),
}


@pytest.mark.parametrize('name', STOPS)
def test_triggers_that_stop(tmp_path, name):
    """Chainer's triggers only read reported values; a user's may change anything."""
    updater = Updater()
    trainer = make_trainer(updater, tmp_path)
    trainer.stop_trigger = STOPS[name]
    between = BetweenSteps(trainer, Updater)
    between._look(trainer, updater)
    assert between._is_known is ('user' not in name)


def test_another_loop(tmp_path):
    other_trainer, other_updater = (type('Of', (of,), {}) for of in (training.Trainer, Updater))
    for updater, kind in ((Updater(), other_trainer), (other_updater(), training.Trainer)):
        assert run_with(tmp_path, updater=updater, kind=kind) == []
    updater = Updater()
    update = updater.update
    updater.update = lambda: update()
    assert run_with(tmp_path, updater=updater) == []


def test_an_updater_inside_another(tmp_path):
    class Outer(Updater):
        def connect_trainer(self, trainer):
            self.inner = Updater()
            self.inner.connect_trainer(trainer)

        def update(self):
            self.inner.update()
            self.iteration += 1

    outer = Outer()
    make_trainer(outer, tmp_path).run()
    assert outer.inner.told == [False] * 10


@pytest.mark.parametrize('is_main', [False, True])
def test_a_shift_of_an_attribute(tmp_path, is_main):
    """ExponentialShift may shift an attribute of an object that is not a main optimizer."""
    updater = Updater()
    shifted = types.SimpleNamespace(rate=1.0, target=chainer.Link())
    updater.get_all_optimizers = lambda: {'main': shifted} if is_main else {}
    shift = extensions.ExponentialShift('rate', 0.9, optimizer=shifted)
    quiet = run_with(tmp_path, (shift, (3, 'iteration')), updater=updater)
    assert quiet == ([*range(2, 10)] if is_main else [2, 4, 5, 7, 8])


def test_steps_outside_of_the_loop(tmp_path):
    updater = Updater()
    trainer = make_trainer(updater, tmp_path)
    for _ in range(3):
        updater.update()
    with chainer.Reporter().scope({}):
        updater.update()
    trainer.run()
    updater.update()
    assert updater.told == [False] * 6 + [True] * 4 + [False]


def test_a_step_inside_an_extension(tmp_path):
    updater = Updater()
    trainer = make_trainer(updater, tmp_path)

    def two_more(trainer):
        updater.update()
        updater.update()

    trainer.extend(two_more, trigger=(5, 'iteration'))
    trainer.run()
    # Steps 6, 7, 11 and 12 run inside the extension. Steps 8 and 9 come after such steps, and
    # count as the first ones of a run.
    assert [i for i, told in enumerate(updater.told, 1) if told] == [3, 4, 5, 10]
    assert len(updater.told) == 12


def test_a_run_that_was_interrupted(tmp_path):
    updater = Updater()
    trainer = make_trainer(updater, tmp_path)

    def interrupt(trainer):
        if updater.iteration == 4 and len(updater.told) == 4:
            raise KeyboardInterrupt

    trainer.extend(interrupt, trigger=(4, 'iteration'))
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.run()
    assert updater.told == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False, True]


@pytest.fixture
def looks(noted):
    """Indices of the steps at which the guards looked."""
    return noted(TrainingDriver, '_look', of=lambda driver, _: driver.optimizer.t)


def trained(kind, device, out, change, make_dataset=chainer_bspmm.dataset.to_sparse):
    def doubled(link, *batch):
        return three_columns(link, *batch) * (1.0 + link.counter)

    examples = make_dataset(same_molecules())
    model = without_dropout(small_model(doubled))
    updater = make_updater(kind, device, model, examples, optimizers.SGD(0.01))
    trainer = make_trainer(updater, out, 60)
    trainer.extend(extensions.LogReport(trigger=(7, 'iteration')))
    trainer.extend(change, trigger=(25, 'iteration'))
    trainer.run()
    return updater, trainer.get_extension('LogReport').log


def test_guards_look_when_needed(device, graphs, no_causes, tmp_path, monkeypatch, looks, is_fused):
    if not is_fused:
        monkeypatch.setattr(update, 'why_unsupported', lambda optimizer: 'this is a test')

    def change(trainer):
        trainer.updater.get_optimizer('main').target.predictor.counter = 1

    with pytest.warns(UserWarning) if not is_fused else contextlib.nullcontext():
        updater, log = trained(GraphUpdater, device, tmp_path, change)
    # The first batch of a form, and replays 1, 2, 4, ... 32, run eagerly; the guards look before
    # the next step. The extension changes something after step 25, and might after step 50.
    eager = {0, 1, 2, 4, 8, 16, 25, 26, 27, 29, 33, 41, 57}
    if is_fused:
        assert looks == sorted({0, 25, 50} | {step + 1 for step in eager})
    else:
        assert looks == list(range(60))
    theirs, expected = trained(StandardUpdater, device, tmp_path, change)
    assert_close_arrays(parameters(updater), parameters(theirs))
    found, losses = ([entry['main/loss'] for entry in entries] for entries in (log, expected))
    numpy.testing.assert_allclose(found, losses, 1e-5)


def test_where_guards_look_at_every_step(device, graphs, no_causes, tmp_path, fused, looks):
    """Guards look at every step if a user's class holds the examples, or without a Trainer."""
    trained(GraphUpdater, device, tmp_path, a_users, type('OfUser', (list,), {}))
    assert looks == list(range(60))
    del looks[:]
    updater = make_updater(GraphUpdater, device, optimizer=optimizers.SGD())
    run(updater, 30)
    assert looks == list(range(30))


@pytest.fixture
def untouched(noted):
    """Whether nobody can keep arrays of the last replay, for each replay of an earlier program."""
    return noted(Program, 'would_overwrite', of=lambda program, is_untouched: is_untouched)


def test_references_are_counted_where_guards_look(
    device, graphs, no_causes, tmp_path, fused, looks, untouched
):
    trained(GraphUpdater, device, tmp_path, a_users)
    assert untouched.count(True) == 60 - len(looks) > 40
    del untouched[:]
    updater = make_updater(GraphUpdater, device, optimizer=optimizers.SGD())
    run(updater, 30)
    assert len(untouched) > 20 and not any(untouched)


def test_references_are_counted_where_two_programs_take_turns(
    device, graphs, no_causes, tmp_path, fused, looks, untouched
):
    """Code that ran before another program's replay may keep arrays of this one."""
    symmetric = same_molecules()
    others = [(atoms, numpy.triu(adj), label) for atoms, adj, label in symmetric]
    dataset = chainer_bspmm.dataset.to_sparse([*symmetric, *others])
    iterator = SerialIterator(dataset, len(symmetric), shuffle=False)
    optimizer = optimizers.SGD().setup(small_model())
    updater = GraphUpdater(iterator, optimizer, converter=chainer_bspmm.concat_mols, device=device)
    make_trainer(updater, tmp_path, 60).run()
    assert len(looks) < 60 - 20 and len(untouched) > 40 and not any(untouched)
