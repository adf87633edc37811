"""`Driver`: choice of the program that runs a batch, in training, evaluation and prediction."""

from __future__ import annotations


import chainer
from chainer.backends import cuda

from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.training.batches import batch_of, Conversion, NoSparseBatch, Resident
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

    name = 'step'  # word for a run of a program, in messages
    who = 'GraphUpdater trains'
    seed = 0
    check_every = CHECK_EVERY
    knows_sizes = True  # if False, buffers get room for larger molecules than the first batch has

    target: chainer.Link  # the link that is trained or predicts
    optimizer: chainer.Optimizer | None = None  # the target's, in training

    def __init__(self, device: chainer.backend.Device | None):
        self.device = device
        self.examples = Examples()
        self.programs = Programs(self.name)
        self.session: Session | None = None  # made for the first batch
        self.resident: Resident | None = None
        # The part of the next batch's key that depends on Python, or None if other code may have
        # run since it was made.
        self.watched: tuple | None = None
        self.reason: str | None = None  # why nothing can be captured any more
        self._key: tuple = ()  # key of the last batch
        self._last: Program | None = None  # the program of the last batch, if it was captured
        self._warned: set[str] = set()

    def program(self, conversion: Conversion, dataset, function, counter=0) -> tuple:
        """Return (reason, program, batch) for a batch; `counter`: the number of the step.

        If the program is None, the batch must be run eagerly, and `reason` (str) is the warning, or
        None for no warning. After a program that is not captured has run the batch, call
        :meth:`keep`.
        """
        if self.reason is not None:
            return self.reason, None, None
        last, self._last = self._last, None
        if self.watched is None or conversion.is_of_user:
            last = None  # other code runs between the last replay and the next
        try:
            reason = self._look(function) if self.watched is None else None
            if reason is None:
                if self.resident is None:
                    self.resident = Resident(dataset, self.device)
                batch = batch_of(conversion, self.resident)
                if conversion.is_of_user:  # its code may have changed what the step reads
                    reason = self._look(function)
            if reason is not None:
                return reason, None, None
            form = batch.form
            need = self._need(conversion.examples, batch)
            capacity = self.programs.capacity(form, need, dataset)
            self._key = (form, batch.source, capacity, *self.watched)
            program = self.programs.find(self._key)
            if program is not None and program.would_overwrite(is_untouched=program is last):
                # The programs are dropped; their memory stays as it is for as long as anything
                # refers to it. New programs give copies of their arrays.
                self.session.gives_copies = True
                self.programs.clear()
                program = None
            if program is None:
                program = self._make(batch, capacity, counter)
            elif not program.is_captured:
                self._capture(program, batch, counter)
                # The capture has found outputs that need not be watched, which changes the key.
                self.programs.move(self._key_now(), program)
        except ParameterMissing:
            self.watched = None
            return None, None, None
        except (NoSparseBatch, CannotCapture, MemoryError) as error:  # also CuPy's OutOfMemoryError
            return self.give_up(str(error)), None, None
        # An eager run may change Python's values.
        may_change = not program.is_captured or program.is_check_due()
        if may_change or self.session.guards.reach.reads_training:
            self.watched = None
        if program.is_captured:
            self._last = program
        return None, program, batch

    def keep(self, program):
        """Keep the program of the last batch, after it has run the batch.

        It is kept under two keys: with Python's values before the run, and after it. The next batch
        with either key is captured.
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
        """Set `watched`, or return the reason (str or None) that rules out replays now.

        A new session begins if the last one is over.
        """
        self.watched = None
        key = None if self.session is None else self.session.key(self.target, function)
        if key is None:
            self.forget()
            session = self._begin(function)
            self.session = session  # set at the end, because an interrupt may come before
            key = session.guards.key()
        reason = self._why_not_now()
        if reason is None:
            self.watched = self._watch(key)
        return reason

    def _begin(self, function) -> Session:
        """Begin a session, or raise CannotCapture."""
        return Session(
            self.device, self.target, function, self.optimizer, self.seed, self.check_every
        )

    def _why_not_now(self):
        """Return the reason (str or None) that rules out replays at this moment."""
        return self.session.guards.blocking_hook()

    def _watch(self, key) -> tuple:
        """Return the part of a program's key that does not depend on the batch.

        The guards' key comes last.
        """
        return (key,)

    def _key_now(self):
        """Return the key of the last batch with Python's present values."""
        of_batch = self._key[:3]
        return *of_batch, *self._watch(self.session.guards.key())

    def _work(self, batch) -> Work:
        """Return the `Work` of a new program for batches of this form."""
        raise NotImplementedError

    def _make(self, batch, capacity, counter):
        """Return a new program, with its kernels compiled, and maybe tried out."""
        program = Program(self.session, self._work(batch), batch, capacity)
        program.rehearse(batch, counter)
        if not self.programs:  # later programs mostly need the same kernels
            program.compile_kernels(batch)
        self._try_out(program, batch)
        return program

    def _try_out(self, program, batch):
        """Try a new program out; predictions leave that to the capture."""
        with self.session.capturer.ordered():
            program.try_out(batch)

    def _capture(self, program, batch, counter):
        """Capture a program, after trying it out on the batch if that was not done before."""
        program.rehearse(batch, counter)
        with self.session.capturer.ordered():
            program.try_out(batch)
            program.capture()

    def forget(self):
        """Drop the programs and their session, which frees their memory."""
        self.watched = self._last = None
        self._key = ()  # it holds references, also to the copy of the data set
        self.programs.clear()
        self.session = None

    def end(self):
        """Release the sparse form of dense examples; another training makes it again."""
        if self.examples.close():
            self.drop()

    def drop(self):
        """Drop the programs, and the copy of the data set."""
        self.forget()
        self.resident = None

    def give_up(self, reason):
        """Capture nothing from now on; return the reason."""
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
