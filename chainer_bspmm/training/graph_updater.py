"""`GraphUpdater`: Chainer's StandardUpdater with one launch of a CUDA graph per training step."""

from typing import Any, Callable

import numpy

import chainer
from chainer.iterators import SerialIterator, ShuffleOrderSampler
from chainer.training.updaters import StandardUpdater

from chainer_bspmm.dataset import concat_mols
from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.training.batches import Conversion
from chainer_bspmm.training.between_steps import BetweenSteps
from chainer_bspmm.training.calls import is_noting, noting
from chainer_bspmm.training.cuda_graphs import CannotCapture, using
from chainer_bspmm.training.driver import is_on_gpu
from chainer_bspmm.training.check_rows import check_first_step
from chainer_bspmm.training.program import StepDiffers
from chainer_bspmm.training.session import CHECK_EVERY
from chainer_bspmm.training.training_driver import seed_of, TrainingDriver


class GraphUpdater(StandardUpdater):
    """Train on a GPU with forward, backward and update as one launch.

    It replaces ``chainer.training.updaters.StandardUpdater``, with the same arguments; Trainer,
    extensions, optimizers and snapshots work unchanged. A StandardUpdater with a `CSRConverter`
    becomes a GraphUpdater.

    The first batch of a form (number of molecules, and one of a few buffer sizes) trains eagerly,
    the second is captured in a CUDA graph, and all others replay it. A step is captured again when
    a watched value that it reads from Python changes (`guards.Guards`). Replays 1, 2, 4, ..., 1,024
    of a form, and multiples of `check_every`, are compared bit for bit with the same step run
    eagerly. A step that cannot be captured trains eagerly, with one warning that names the cause.
    docs/captured_training.md has the details, docs/several_gpus.md the details of several ranks.

    Args:
        iterator (Iterator or dict): iterator of the training set.
        optimizer (Optimizer or dict): optimizer that was set up with the model.
        converter (callable): makes sparse batches. Batches of a ``SparseDataset`` that fits on the
            GPU are gathered there, unless padded (see `batches.Resident`).
        device (device specifier): the GPU.
        loss_func (callable or None): None means the optimizer's target.
        seed (int or None): seed of the random numbers, at least 0, below 2**63. None derives it
            from the state of NumPy's generator, which does not change. Snapshots contain it.
        check_every (int): number of replays from one regular check to the next.
        on_difference (str): action if a checked replay differs. ``'warn'``: keep the result of the
            eager step, and train eagerly from then on. ``'raise'``: raise StepDiffers.
        *args, **kwargs: as in StandardUpdater.

    Raises:
        TypeError, ValueError: `seed`, `check_every` or `on_difference` has another type or value;
            no optimizer is named 'main'.
        StepDiffers (RuntimeError): a checked replay differs, and `on_difference` is ``'raise'``.
        RuntimeError (by `update`): this rank cannot continue with captured steps, but others do.
        FloatingPointError (by `update`): the loss of a rank was not finite in an earlier step.

    Note:
        A snapshot of a StandardUpdater can be resumed with this updater, and vice versa.
        Captured steps copy nothing to the host: reported values are device arrays until they are
        read.
    """

    _driver: TrainingDriver
    _is_asked_for = True  # False if a StandardUpdater was adopted
    _loop: Callable | None = None  # StandardUpdater.update_core when it was adopted
    _between_steps: BetweenSteps | None = None
    _epoch_detail: tuple[Any, Any] = None, None  # the iterator's state, and its epoch_detail then

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
        """Number of epochs done (float), as in StandardUpdater."""
        iterator = self._iterators['main']
        if type(iterator) is not SerialIterator:
            return iterator.epoch_detail
        if self._epoch_detail[0] is not iterator._state:
            # It is computed once a step, because the trigger of every extension asks for it.
            self._epoch_detail = iterator._state, iterator.epoch_detail
        return self._epoch_detail[1]

    @property
    def graph_nbytes(self) -> int:
        """Bytes on the GPU (int) that captured steps take, which CuPy's own pool does not count."""
        session = self._driver.session
        return 0 if session is None else session.capturer.nbytes

    @property
    def seed(self) -> int:
        """Seed of the random numbers (int). It can be assigned, with the constructor's errors."""
        return self._driver.seed

    @seed.setter
    def seed(self, seed):
        seed = seed_of(seed)
        if seed != self._driver.seed:
            self._driver.seed = seed
            self._driver.forget()  # captured steps use the old seed

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != '_between_steps'}

    def update_core(self) -> None:
        """Train with the next batch, by a captured step if possible."""
        # Other code may have replaced the method since this updater was adopted.
        if self._loop not in (None, StandardUpdater.update_core):
            self._driver.watched = None
            if is_on_gpu(self._driver.device):
                self._driver.warn('StandardUpdater.update_core was replaced')
            super().update_core()
            return
        between = self._between_steps
        iterator = self._iterators['main']
        is_known = between is not None and between.had_no_effect(self)
        if self._optimizers['main'] is not self._driver.given:  # it was replaced
            self._driver = TrainingDriver(*self._driver.options(self._optimizers['main']))
        driver = self._driver
        if not is_known:
            driver.watched = None
        # The sparse form of dense examples may only be kept with a Trainer, because nothing else
        # tells when the training ends.
        examples = driver.examples.next(
            iterator, self.converter, between is not None, driver.watched is not None
        )
        # A user's code may have made a list, or the order of a new epoch.
        if type(examples) is not Selection or iterator.is_new_epoch and _has_own_order(iterator):
            driver.watched = None
        with using(self.input_device):  # all work is on the device's current stream
            self._train(examples)
        if self.auto_new_epoch and iterator.is_new_epoch:
            self._optimizers['main'].new_epoch(auto=True)

    def _check_rows(self, program, batch):
        """Check the first step, which a program has run; train eagerly if spare rows change it."""
        driver = self._driver
        # With several ranks there is no check, because one rank cannot compute sums over all ranks
        # alone. If the step's calls are being noted, they are known only after it: the next step is
        # checked.
        if (
            not chainer.config.bspmm_check_swap
            or hasattr(driver.given, 'communicator')
            or is_noting()
        ):
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
        conversion = Conversion(examples, self.converter, self.input_device)
        if driver.together is not None and driver.do_all_capture is None:
            conversion.on_host()  # so that the converter is called once for both forms
            args, kwargs = conversion.arguments()
            # This makes all parameters, and gives all ranks the same state.
            driver.together.start(loss_func, *args, **kwargs)
        if driver.needs_notes(loss_func):
            with noting(target):
                self._step(conversion, loss_func)
            driver.forget()  # so that the next session also watches the noted functions
        else:
            self._step(conversion, loss_func)

    def _step(self, conversion, loss_func):
        driver = self._driver
        dataset = getattr(self._iterators['main'], 'dataset', None)
        reason, program, batch = driver.program(conversion, dataset, loss_func, self.iteration)
        if driver.together is not None:
            reason = driver.agree(reason)
        if reason is not None or program is None:
            if reason is not None and (self._is_asked_for or is_on_gpu(driver.device)):
                driver.warn(reason)
            self._train_eagerly(conversion)
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
        except StepDiffers as error:  # the eager step was done, and counted
            difference = error
            reported = error.reported
        except BaseException as error:
            # If the update was done, the step counts, whatever happened after it.
            update.recount(n_before, program.work.is_done)
            if not isinstance(error, CannotCapture):
                raise
            driver.warn(driver.give_up(str(error)))
            self._train_eagerly(conversion)
            return
        reporters = chainer.reporter._get_reporters()
        if reporters:
            reported = program.work.as_reported(reported)
            if program.is_captured and type(reporters[-1]) is chainer.Reporter:
                # The variables are new, so Chainer's report, which copies them, is not needed.
                reporters[-1].observation.update(reported)
            else:
                reporters[-1].report(reported)
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

    def _train_eagerly(self, conversion):
        if self._driver.session is not None:  # the last step may still run on another stream
            self._driver.session.capturer.join()
        args, kwargs = conversion.arguments()
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
            pass  # it is a snapshot of a StandardUpdater
        if isinstance(serializer, chainer.Deserializer):
            driver.forget()  # a snapshot may replace anything that captured steps use


def _has_own_order(iterator):
    """Return whether a user's code may decide the order of the examples in an epoch."""
    return type(iterator.order_sampler) not in (ShuffleOrderSampler, type(None))


def adopt(updater: StandardUpdater) -> None:
    """Turn a StandardUpdater that has an optimizer named 'main' into a GraphUpdater, in place."""
    driver = TrainingDriver(updater.get_optimizer('main'), updater.input_device)
    vars(updater).update(_driver=driver, _is_asked_for=False, _loop=StandardUpdater.update_core)
    updater.__class__ = GraphUpdater
