"""Two lines buy captured steps: Chainer's own updaters, evaluators and predictions become ours.

Where a `CSRConverter` meets one of them, its class is changed, as `sparsify` changes a model's: a
StandardUpdater becomes a `GraphUpdater`, an evaluator its captured form, and ``predict`` of Chainer
Chemistry replays. Anything that cannot be captured runs as it did, with one warning on a GPU.
Subclasses are left alone, and so is everything while ``chainer.config.bspmm_capture`` is False.

Where a swapped model meets one of them without such a converter, the error says so.
"""

import functools

import chainer
from chainer.dataset.convert import concat_examples
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction.base import BaseForwardModel

from chainer_bspmm.compat.user_code import is_user_code
from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.models.forgotten_converter import expect_sparse_batches, explain

# The loops that are replaced, unless other code has replaced them.
_LOOPS = {StandardUpdater: StandardUpdater.update_core, Evaluator: Evaluator.evaluate}


def _is_ours(converter):
    return type(converter) is CSRConverter and chainer.config.bspmm_capture


def _can_adopt(updater):
    if type(updater) is not StandardUpdater:
        return False
    optimizer = updater.get_all_optimizers().get('main')
    # Not several ranks: captured, they end where one of them cannot go on.
    return (
        _is_ours(updater.converter)
        and StandardUpdater.update_core is _LOOPS[StandardUpdater]
        and hasattr(optimizer, 'target')
        and getattr(optimizer, 'communicator', None) is None
    )


def _adopting_updaters(init):
    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        kind = type(self)
        # A subclass may set another converter yet, and a loop may make sparse batches.
        if not (is_user_code(kind.__module__) or is_user_code(kind.update_core.__module__)):
            expect_sparse_batches(kind.__name__, self.converter, _function_of(self))
        if _can_adopt(self):
            # Imported where it is needed: it would make the first import of the package longer.
            from chainer_bspmm.training.graph_updater import adopt

            adopt(self)

    return __init__


def _function_of(updater):
    """Return what an updater calls with its batches."""
    loss_func = getattr(updater, 'loss_func', None)  # a subclass may be made in its own way
    if loss_func is not None:
        return loss_func
    return getattr(getattr(updater, '_optimizers', {}).get('main'), 'target', None)


def _explaining_updates(update):
    @functools.wraps(update)
    def explained(self):
        try:
            update(self)
        except ValueError as error:
            converter = getattr(self, 'converter', None)
            explain(error, type(self).__name__, converter, _function_of(self))
            raise

    return explained


def _adopting_evaluators(call):
    @functools.wraps(call)
    def __call__(self, trainer=None):
        converter = getattr(self, 'converter', None)
        function = getattr(self, 'eval_func', None)
        if function is None:
            function = getattr(self, '_targets', {}).get('main')
        if not is_user_code(type(self).evaluate.__module__):
            expect_sparse_batches(type(self).__name__, converter, function)
        if _is_ours(converter) and Evaluator.evaluate is _LOOPS[Evaluator]:
            from chainer_bspmm.training.captured_evaluators import capture_evaluator

            kind = type(self)
            capture_evaluator(self)
            if type(self) is not kind:
                return self(trainer)
        try:
            return call(self, trainer)
        except ValueError as error:
            explain(error, type(self).__name__, converter, function)
            raise

    return __call__


def _replaying(forward):
    @functools.wraps(forward)
    def _forward(self, data, fn, batchsize=16, *args, **kwargs):
        converter, *rest = args or (kwargs.get('converter', concat_examples),)
        if len(rest) < 2 and kwargs.get('preprocess_fn') is None:
            expect_sparse_batches('predict', converter, fn)
        if _is_ours(converter):
            from chainer_bspmm.training.captured_predict import replayed

            options = {name: value for name, value in kwargs.items() if name != 'converter'}
            result = replayed(self, data, fn, batchsize, converter, *rest, **options)
            if result is not None:
                return result
        try:
            return forward(self, data, fn, batchsize, *args, **kwargs)
        except ValueError as error:
            explain(error, 'predict', converter, fn)
            raise

    return _forward


_is_installed = False


def install() -> None:
    """Adopt from now on, unless that was done before."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for name in ('bspmm_capture', 'bspmm_check_swap'):
        vars(chainer.global_config).setdefault(name, True)
    StandardUpdater.__init__ = _adopting_updaters(StandardUpdater.__init__)
    StandardUpdater.update = _explaining_updates(StandardUpdater.update)
    Evaluator.__call__ = _adopting_evaluators(Evaluator.__call__)
    BaseForwardModel._forward = _replaying(BaseForwardModel._forward)
