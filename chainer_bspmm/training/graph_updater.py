"""`GraphUpdater`: Chainer's StandardUpdater, each training step one launch of a CUDA graph."""

from typing import Any, Callable

import numpy

import chainer
from chainer.dataset import convert
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.training.between_steps import BetweenSteps
from chainer_bspmm.training.cuda_graphs import CannotCapture, using
from chainer_bspmm.training.driver import is_on_gpu
from chainer_bspmm.training.check_rows import check_first_step
from chainer_bspmm.training.program import StepDiffers
from chainer_bspmm.training.session import CHECK_EVERY
from chainer_bspmm.training.training_driver import TrainingDriver


class GraphUpdater(StandardUpdater):
    """Train on a GPU with forward, backward and update as one launch.

    Replaces ``chainer.training.updaters.StandardUpdater``: same arguments; Trainer, extensions,
    optimizers and snapshots work unchanged. A StandardUpdater with a `CSRConverter` becomes one.

    The first batch of a form (number of molecules, and one of a few buffer sizes) trains eagerly,
    the second is captured in a CUDA graph, all others replay it. A step is captured again when
    something that it reads from Python and that is watched changes (`guards.Guards`). Replays 1, 2,
    4, ..., 1,024 of a form, and multiples of `check_every`, are compared with the same step run
    eagerly, bit for bit. What cannot be captured trains eagerly, with one warning that names the
    cause. docs/captured_training.md has the details, and docs/several_gpus.md those of several
    ranks.

    Args:
        iterator (Iterator or dict): of the training set.
        optimizer (Optimizer or dict): set up with the model.
        converter (callable): makes sparse batches. Those of a ``SparseDataset`` that fits are
            gathered on the GPU, unless padded (see `batches.Resident`).
        device (device specifier): the GPU.
        loss_func (callable or None): None means the optimizer's target.
        seed (int or None): of the random numbers, at least 0, below 2**63; None draws it from
            NumPy's generator. Kept in snapshots.
        check_every (int): replays from one regular check to the next.
        on_difference (str): what to do if a checked replay differs. ``'warn'``: keep the result of
            the eager step, and train eagerly from then on. ``'raise'``: raise StepDiffers.
        *args, **kwargs: as StandardUpdater has them.

    Raises:
        TypeError, ValueError: `seed`, `check_every` or `on_difference` is not one of these; no
            optimizer is named 'main'.
        StepDiffers (RuntimeError): a checked replay differs, and `on_difference` is ``'raise'``.
        RuntimeError (by `update`): this rank cannot go on with captured steps, as the others do.
        FloatingPointError (by `update`): the loss of a rank was not finite in an earlier step.

    Note:
        A snapshot of a StandardUpdater can be resumed with this updater, and the other way round.
        Parameters' ``grad`` arrays are overwritten by the next step. Captured steps copy nothing
        to the host: reported values are device arrays until they are read.
    """

    _driver: TrainingDriver
    _is_asked_for = True  # or was adopted
    _between_steps: BetweenSteps | None = None
    _epoch_detail: tuple[Any, Any] = None, None  # an iterator's state, and the epoch at that

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        converter: Callable = concat_mols,
        device: Any = None,
        loss_func: Callable | None = None,
        *args: Any,
        seed: int | None = None,
        check_every: int = CHECK_EVERY,
        on_difference: str = 'warn',
        **kwargs: Any,
    ) -> None:
        super().__init__(iterator, optimizer, converter, device, loss_func, *args, **kwargs)
        if 'main' not in self._optimizers:
            names = ', '.join(self._optimizers)
            raise ValueError("optimizer: expected one named 'main', got %s" % names)
        self._driver = TrainingDriver(
            self._optimizers['main'], self.input_device, seed, check_every, on_difference
        )

    def connect_trainer(self, trainer: Any) -> None:
        super().connect_trainer(trainer)
        self._between_steps = BetweenSteps(trainer, GraphUpdater)

    @property
    def epoch_detail(self) -> float:
        """Epochs done (float), as StandardUpdater has it."""
        iterator = self._iterators['main']
        if type(iterator) is not SerialIterator:
            return iterator.epoch_detail
        if self._epoch_detail[0] is not iterator._state:
            # Once a step: the trigger of every extension asks.
            self._epoch_detail = iterator._state, iterator.epoch_detail
        return self._epoch_detail[1]

    @property
    def graph_nbytes(self) -> int:
        """Bytes on the GPU (int) that captured steps take, which CuPy's own pool does not count."""
        session = self._driver.session
        return 0 if session is None else session.capturer.nbytes

    @property
    def seed(self) -> int:
        """Of the random numbers (int)."""
        return self._driver.seed

    @seed.setter
    def seed(self, seed):
        if seed != self._driver.seed:
            self._driver.seed = seed
            self._driver.forget()  # captured steps have the old one

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != '_between_steps'}

    def update_core(self) -> None:
        between = self._between_steps
        iterator = self._iterators['main']
        is_known = between is not None and between.had_no_effect(self)
        if self._optimizers['main'] is not self._driver.given:  # replaced
            self._driver = TrainingDriver(*self._driver.options(self._optimizers['main']))
        driver = self._driver
        if not is_known:
            driver.watched = None
        # Without a Trainer it may never be known when the training ends.
        examples = driver.examples.next(
            iterator, self.converter, between is not None, driver.watched is not None
        )
        if type(examples) is not Selection:  # a list may come from a user's code
            driver.watched = None
        with using(self.input_device):  # its current stream is used throughout
            self._train(examples)
        if self.auto_new_epoch and iterator.is_new_epoch:
            self._optimizers['main'].new_epoch(auto=True)

    def _check_rows(self, program, batch):
        """Check the first step, that a program has run, and train eagerly if rows change it."""
        driver = self._driver
        # A rank by itself may not sum with others.
        if not chainer.config.bspmm_check_swap or hasattr(driver.given, 'communicator'):
            return
        check = check_first_step(
            driver.optimizer,
            self.loss_func or driver.target,
            batch.arrays_on(driver.device),
            {},
            program.under_way,
        )
        if check.is_right is False:
            driver.warn(driver.give_up(check.text))
        elif check.text:
            driver.warn_once(check.text)

    def _train(self, examples):
        driver = self._driver
        target = driver.target = driver.optimizer.target
        loss_func = self.loss_func or target
        if driver.together is not None and driver.do_all_capture is None:
            args, kwargs = self._arguments(examples)
            driver.together.start(loss_func, *args, **kwargs)  # all alike, all parameters made
        dataset = getattr(self._iterators['main'], 'dataset', None)
        reason, program, batch = driver.program(
            examples, self.converter, dataset, loss_func, self.iteration
        )
        if driver.together is not None:
            reason = driver.agree(reason)
        if reason is not None or program is None:
            if reason is not None and (self._is_asked_for or is_on_gpu(driver.device)):
                driver.warn(reason)
            self._train_eagerly(examples)
            return
        optimizer = driver.optimizer
        update = driver.session.update
        difference = None
        n_before = optimizer.t
        program.work.is_done = False
        try:
            numbers = update.advance()
            program.stage(batch, self.iteration, numbers)
            reported = program.replay() if program.is_captured else program.run(batch)
        except StepDiffers as error:  # after the eager step was done, and counted
            difference = error
            reported = error.reported
        except BaseException as error:
            # A step that was done counts, whatever came after it.
            update.recount(n_before, program.work.is_done)
            if not isinstance(error, CannotCapture):
                raise
            driver.warn(driver.give_up(str(error)))
            self._train_eagerly(examples)
            return
        reporters = chainer.reporter._get_reporters()
        if reporters:
            if program.is_captured and type(reporters[-1]) is chainer.Reporter:
                reporters[-1].observation.update(reported)  # arrays: there is no variable to copy
            else:
                chainer.report(reported)
        if update.finish():
            driver.watched = None  # the update may have changed anything
        if not program.is_captured:
            driver.keep(program)
            self._check_rows(program, batch)
        if difference is not None:
            reason = driver.give_up(str(difference))
            if driver.on_difference == 'raise':
                raise difference
            driver.warn(reason)

    def _arguments(self, examples):
        """Return the arguments of the loss function, (tuple, dict)."""
        in_arrays = convert._call_converter(self.converter, examples, self.input_device)
        if isinstance(in_arrays, tuple):
            return in_arrays, {}
        return ((), in_arrays) if isinstance(in_arrays, dict) else ((in_arrays,), {})

    def _train_eagerly(self, examples):
        if self._driver.session is not None:  # other steps are captured, maybe on another stream
            self._driver.session.capturer.join()
        args, kwargs = self._arguments(examples)
        optimizer = self._optimizers['main']
        optimizer.update(self.loss_func or optimizer.target, *args, **kwargs)

    def finalize(self) -> None:
        try:
            self._driver.raise_if_not_finite()
        finally:
            self._driver.end()
            super().finalize()

    def serialize(self, serializer: Any) -> None:
        driver = self._driver
        if not isinstance(serializer, chainer.Deserializer):
            driver.raise_if_not_finite()
        super().serialize(serializer)
        try:
            self.seed = int(serializer('seed', numpy.int64(self.seed)))
        except KeyError:
            pass  # a snapshot of a StandardUpdater
        if isinstance(serializer, chainer.Deserializer):
            driver.forget()  # captured steps have the old seed


def adopt(updater: StandardUpdater) -> None:
    """Make a GraphUpdater of a StandardUpdater that has an optimizer named 'main'."""
    driver = TrainingDriver(updater.get_optimizer('main'), updater.input_device)
    vars(updater).update(_driver=driver, _is_asked_for=False)
    updater.__class__ = GraphUpdater
