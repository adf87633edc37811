"""`Driver`: which program runs a batch, for training, evaluations and predictions alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
from chainer.backends import cuda

from chainer_bspmm.compat.user_code import warn
from chainer_bspmm.cuda import gemm
from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.training.batches import batch_of, NoSparseBatch, Resident
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.examples import Examples
from chainer_bspmm.training.guards import Guards
from chainer_bspmm.training.programs import CannotCapture, CHECK_EVERY, Program, Programs


def is_on_gpu(device):
    return device is not None and device.xp is cuda.cupy


class Driver:
    """Choose the program of each batch: a new one for a new layout, otherwise the captured one."""

    # For messages.
    what = 'step'
    who = 'GraphUpdater trains'
    seed = 0
    check_every = CHECK_EVERY
    knows_sizes = True  # False: buffers have room for larger molecules than those of a first batch

    target: chainer.Link  # that is trained, or predicts
    optimizer: chainer.Optimizer | None = None  # of the target
    function: Callable  # what runs on the arrays of a batch
    blas: Any = None
    guards: Guards

    def __init__(self, device: chainer.backend.Device | None):
        self.device = device
        self.examples = Examples()
        self.programs = Programs(self.what)
        self.capturer: Capturer | None = None  # with function, blas and guards at the first batch
        self.resident: Resident | None = None
        # Guard state that the next batch may reuse; None once user code may have run.
        self.watched: tuple | None = None
        self.reason: str | None = None  # why nothing can be captured any more
        self._made_for: list = []  # rules, hooks, function and target, what is shared
        self._warned: set[str] = set()

    def program(self, examples, converter, dataset, function, counter=0):
        """Return why a batch is to be run eagerly (str or None), its program, and the batch."""
        # `dataset` is what the examples are from, `counter` the number of the step.
        if self.reason is not None:
            return self.reason, None, None
        try:
            if self.watched is None:
                key = self._look(function)
                reason = self._why_not_now()
                if reason is not None:
                    return reason, None, None
                if self.resident is None:
                    self.resident = Resident(dataset, self.device)
                self.watched = self._watch(key)
            batch = batch_of(examples, converter, self.device, self.resident)
            form = batch.form
            need = batch.need
            if not self.knows_sizes and (
                not isinstance(examples, Selection) or form.layout == 'padded'
            ):
                need = need._replace(
                    max_rows=1 << need.max_rows.bit_length(),
                    max_entries=1 << need.max_entries.bit_length(),
                )
            capacity = self.programs.capacity(form, need, dataset)
            layout = form, batch.source, capacity
            program = self.programs.find((*layout, *self.watched))
            if program is None:
                program = self._new(batch, capacity, counter)
                # Parameters and states may have been made.
                self.watched = self._watch(self.guards.key())
                self.programs.add((*layout, *self.watched), program)
            elif not program.is_captured:
                self._capture(program, batch, examples)
        except (NoSparseBatch, CannotCapture, MemoryError) as error:  # CuPy's is one of these
            return self.give_up(str(error)), None, None
        if not program.is_captured or program.is_check_due():
            self.watched = None  # what runs eagerly may change it
        return None, program, batch

    def _look(self, function):
        """Return the guards' key; start anew where function, target, rules or hooks are others."""
        if self.capturer is not None:
            key = self.guards.key()
            if [*key.update, function, self.target] == self._made_for:
                return key
        self._prepare(function)
        return self.guards.key()

    def _prepare(self, function):
        """Make what all programs share, discarding the old one; raise CannotCapture if it fails."""
        self.forget()
        self.blas = self.capturer = None
        capturer = Capturer(self.device)
        try:
            with chainer.using_device(self.device), capturer.stream:
                self.blas = gemm.Blas()
                self.blas.use(capturer.stream)
        except Exception as error:
            text = 'no cuBLAS handle could be made with the library that CuPy has loaded: %r'
            raise CannotCapture(text % error) from error
        self.function = function
        self._make()
        self.guards = Guards(self.target, function, self.optimizer)
        self._made_for = [*self.guards.key().update, function, self.target]
        self.capturer = capturer  # last: there may be an interrupt before

    def _make(self):
        """Make what else they share."""

    def _why_not_now(self):
        """Return the reason (str or None) that rules out replays at this moment."""
        return self.guards.blocking_hook()

    def _watch(self, key):
        """Return the part (tuple) of a program's key that does not depend on the batch."""
        # The guards' key comes last.
        return (key,)

    def _new(self, batch, capacity, counter) -> Program:
        """Return the program for a batch of a new layout."""
        raise NotImplementedError

    def _capture(self, program, batch, examples):
        program.capture()

    def forget(self):
        """Drop the programs."""
        self.watched = None
        self.programs.clear()

    def end(self):
        """Let go what was made of dense examples: another training makes it again."""
        if self.examples.close():
            self.forget()
            self.resident = None

    def give_up(self, reason):
        """Capture no more, and return the reason."""
        self.forget()
        self.reason = reason
        return reason

    def warn(self, reason):
        """Warn, once per reason, that steps are eager from now on."""
        self.warn_once('%s eagerly: %s' % (self.who, reason))

    def warn_once(self, text):
        if text not in self._warned:
            self._warned.add(text)
            warn(text)
