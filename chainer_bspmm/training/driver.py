"""`Driver`: which program runs a batch, for training, evaluations and predictions alike."""

from __future__ import annotations

import contextlib

import chainer
from chainer.backends import cuda

from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.training.batches import batch_of, NoSparseBatch, Resident
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.iterators import Examples
from chainer_bspmm.training.program import Program
from chainer_bspmm.training.programs import Programs
from chainer_bspmm.training.session import CHECK_EVERY, Session
from chainer_bspmm.training.snapshot import ParameterMissing
from chainer_bspmm.training.work import Work
from chainer_bspmm.compat.user_code import warn


def is_on_gpu(device):
    return device is not None and device.xp is cuda.cupy


class Driver:
    """Choose the program of each batch: a new one for a new form, otherwise the captured one."""

    name = 'step'  # of what a program does, in messages
    who = 'GraphUpdater trains'
    seed = 0
    check_every = CHECK_EVERY
    knows_sizes = True  # False: buffers have room for larger molecules than those of a first batch

    target: chainer.Link  # that is trained, or predicts
    optimizer: chainer.Optimizer | None = None  # of the target

    def __init__(self, device: chainer.backend.Device | None):
        self.device = device
        self.examples = Examples()
        self.programs = Programs(self.name)
        self.session: Session | None = None  # from the first batch on
        self.resident: Resident | None = None
        # What the next batch's key has of Python; None once other code may have run.
        self.watched: tuple | None = None
        self.reason: str | None = None  # why nothing can be captured any more
        self._key: tuple = ()  # of the last batch
        self._warned: set[str] = set()

    def program(self, examples, converter, dataset, function, counter=0) -> tuple:
        """Return (reason, program, batch) of a batch; counter: the number of the step.

        Without a program the batch is to be run eagerly: for a reason (str) that is said, or None.
        A program that is not captured runs the batch, and then :meth:`keep` is called.
        """
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
            capacity = self.programs.capacity(form, self._need(examples, batch), dataset)
            self._key = (form, batch.source, capacity, *self.watched)
            program = self.programs.find(self._key)
            if program is None:
                program = self._make(batch, capacity, counter)
            elif not program.is_captured:
                self._capture(program, batch, counter)
                self.programs.move(self._key_now(), program)  # outputs are watched no longer
        except ParameterMissing:
            self.watched = None
            return None, None, None
        except (NoSparseBatch, CannotCapture, MemoryError) as error:  # CuPy's is one of these
            return self.give_up(str(error)), None, None
        # What runs eagerly may change it.
        may_change = not program.is_captured or program.is_check_due()
        if may_change or self.session.guards.reach.reads_training:
            self.watched = None
        return None, program, batch

    def keep(self, program):
        """Keep the program of the last batch, which it has run.

        It is captured where a batch finds Python as this one has found it, or has left it.
        """
        self.programs.add(self._key, program)
        self.programs.add(self._key_now(), program)

    def _need(self, examples, batch):
        need = batch.need
        if not self.knows_sizes and (
            not isinstance(examples, Selection) or batch.form.layout == 'padded'
        ):
            return need._replace(
                max_rows=1 << need.max_rows.bit_length(),
                max_entries=1 << need.max_entries.bit_length(),
            )
        return need

    def _look(self, function):
        """Return the guards' key, of another session if the last one is over."""
        key = None if self.session is None else self.session.key(self.target, function)
        if key is not None:
            return key
        self.forget()
        session = self._begin(function)
        self.session = session  # last: there may be an interrupt before
        return session.guards.key()

    def _begin(self, function) -> Session:
        """Begin a session; CannotCapture if that fails."""
        return Session(
            self.device, self.target, function, self.optimizer, self.seed, self.check_every
        )

    def _why_not_now(self):
        """Return what (str or None) rules out replays at this moment."""
        return self.session.guards.blocking_hook()

    def _watch(self, key) -> tuple:
        """Return what a program's key has apart from the batch; the guards' key comes last."""
        return (key,)

    def _key_now(self):
        """Return the key of the last batch with what Python has now."""
        of_batch = self._key[:3]
        return *of_batch, *self._watch(self.session.guards.key())

    def _work(self, batch) -> Work:
        """Return what a new program does with batches like this one."""
        raise NotImplementedError

    def _make(self, batch, capacity, counter):
        """Return a new program."""
        program = Program(self.session, self._work(batch), batch, capacity)
        program.rehearse(batch, counter)
        if not self.programs:  # the kernels of others are mostly the same
            program.compile_kernels(batch)
        self._try_out(program, batch)
        return program

    def _try_out(self, program, batch):
        """Try a program out now, if that is worth the time before the form comes again."""
        with self.session.capturer.ordered(), contextlib.suppress(ParameterMissing):
            program.try_out(batch)

    def _capture(self, program, batch, counter):
        """Capture a program, tried out on a batch if it was not before."""
        program.rehearse(batch, counter)
        with self.session.capturer.ordered():
            program.try_out(batch)
            program.capture()

    def forget(self):
        """Drop the programs and their session, which frees their memory."""
        self.watched = None
        self._key = ()  # it holds what it was made of, the copy of the data set included
        self.programs.clear()
        self.session = None

    def end(self):
        """Let go what was made of dense examples: another training makes it again."""
        if self.examples.close():
            self.drop()

    def drop(self):
        """Drop the programs, and the copy of the data set."""
        self.forget()
        self.resident = None

    def give_up(self, reason):
        """Capture no more, and return the reason."""
        self.drop()
        self.reason = reason
        return reason

    def warn(self, reason):
        """Warn, once per reason, that batches are run eagerly."""
        self.warn_once('%s eagerly: %s' % (self.who, reason))

    def warn_once(self, text):
        if text not in self._warned:
            self._warned.add(text)
            warn(text)
