"""Code that a Trainer runs between two steps: usually nothing that affects a step."""

import weakref

import chainer
from chainer import training
from chainer.training import extensions, util
from chainer.training.triggers import EarlyStoppingTrigger, IntervalTrigger
from chainer.training.triggers import ManualScheduleTrigger, OnceTrigger, TimeTrigger
from chainer_chemistry.training.extensions.auto_print_report import AutoPrintReport

from chainer_bspmm.training.kinds import is_of_user

# These extensions change at most numbers of the optimizer, which are sent with every batch.
# Subclasses do not count, because they may have a user's methods.
_HARMLESS = (
    AutoPrintReport,
    extensions.ExponentialShift,
    extensions.InverseShift,
    extensions.LinearShift,
    extensions.LogReport,
    extensions.MultistepShift,
    extensions.PlotReport,
    extensions.PolynomialShift,
    extensions.PrintReport,
    extensions.ProgressBar,
    extensions.StepShift,
    extensions.WarmupShift,
)


class BetweenSteps:
    """Decide whether the guards can skip this step.

    They can be skipped in Trainer's own loop, if only Chainer's reporting extensions were due since
    the last step. Trainer also asks the triggers of all other extensions, but that changes nothing.
    The updater must be exactly of class `kind`.
    """

    def __init__(self, trainer, kind):
        self._trainer = weakref.ref(trainer)
        self._kind = kind
        self._last_run = None  # start of the Trainer's run that had the last step
        self._n_steps = None  # the updater's iteration after the last step
        self._is_known = False  # whether all code between the steps of this run is known
        self._periods = []  # periods, in iterations, of the extensions that may change anything
        self._at_epochs = False  # whether such extensions are also called at the end of epochs

    def had_no_effect(self, updater):
        """Return whether the guards can skip this step; called before every step."""
        trainer = self._trainer()
        reporters = chainer.reporter._get_reporters()
        if (
            trainer is None
            or not reporters
            or reporters[-1] is not trainer.reporter  # this call is outside of the loop
            or trainer.observation  # this is not the first step of this iteration
        ):
            self._last_run = None
            self._n_steps = None
            return False
        if self._last_run != trainer._start_at:
            # A trigger that was loaded from a snapshot may be due after this step, whatever its
            # period is.
            self._last_run = trainer._start_at
            self._n_steps = None
            self._look(trainer, updater)
            return False
        iteration = updater.iteration
        n_steps = self._n_steps
        self._n_steps = iteration + 1
        return (
            self._is_known
            and n_steps == iteration
            and not (self._at_epochs and updater.is_new_epoch)
            and all(iteration % period for period in self._periods)
        )

    def _look(self, trainer, updater):
        self._periods = []
        self._at_epochs = False
        self._is_known = (
            type(trainer) is training.Trainer
            and trainer.updater is updater
            and type(updater) is self._kind
            and vars(updater).keys().isdisjoint(('update', 'update_core'))
            and _only_counts(trainer.stop_trigger)
            and all([self._knows(entry, updater) for entry in trainer._extensions.values()])
        )

    def _knows(self, entry, updater):
        """Note when an extension may change anything; return False if that is not known."""
        extension, trigger = entry.extension, entry.trigger
        if not _only_counts(trigger):
            return False
        if type(extension) in _HARMLESS and not _calls_users(extension):
            target = getattr(extension, '_optimizer', None)  # a shift may change any object
            if target is None or target in updater.get_all_optimizers().values():
                return True
        if trigger is util._never_fire_trigger:
            return True
        # The remainder of an infinite period is NaN, which is true.
        if type(trigger) is not IntervalTrigger or trigger.period % 1:
            return False
        if trigger.unit == 'epoch':
            self._at_epochs = True
        else:
            self._periods.append(int(trigger.period))
        return True


def _only_counts(trigger):
    """Return whether a trigger is Chainer's own: it reads counters, time and reported values."""
    if type(trigger) is EarlyStoppingTrigger:
        return all(map(_only_counts, (trigger._max_trigger, trigger._interval_trigger)))
    known = IntervalTrigger, ManualScheduleTrigger, OnceTrigger, TimeTrigger
    return type(trigger) in known or trigger is util._never_fire_trigger


def _calls_users(extension):
    """Return whether an extension calls another extension, or a user's object or function."""
    # For example, PrintReport calls methods of its file, which may be of a user's class.
    if any(is_of_user(type(part).__module__) for part in vars(extension).values()):
        return True
    others = (getattr(extension, name, None) for name in ('_postprocess', '_log_report'))
    trigger = getattr(extension, '_trigger', None)  # LogReport's own
    return not (
        all(other is None or isinstance(other, str) for other in others)
        and (trigger is None or _only_counts(trigger))
    )
