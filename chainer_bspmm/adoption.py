"""Two lines buy captured steps: Chainer's own updaters, evaluators and predictions become ours.

Where a `CSRConverter` meets one of them, its class is changed, as `sparsify` changes a model's: a
StandardUpdater becomes a `GraphUpdater`, an evaluator its captured form, and ``predict`` of Chainer
Chemistry replays. Anything that cannot be captured runs as it did, with one warning on a GPU.
Subclasses are left alone, and so is everything while ``chainer.config.bspmm_capture`` is False.
"""

import functools

import chainer
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction.base import BaseForwardModel

from chainer_bspmm.dataset.converters import CSRConverter

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
        if _can_adopt(self):
            # Imported where it is needed: it would make the first import of the package longer.
            from chainer_bspmm.training.graph_updater import adopt

            adopt(self)

    return __init__


def _adopting_evaluators(call):
    @functools.wraps(call)
    def __call__(self, trainer=None):
        if _is_ours(getattr(self, 'converter', None)) and Evaluator.evaluate is _LOOPS[Evaluator]:
            from chainer_bspmm.training.captured_evaluators import capture_evaluator

            kind = type(self)
            capture_evaluator(self)
            if type(self) is not kind:
                return self(trainer)
        return call(self, trainer)

    return __call__


def _replaying(forward):
    @functools.wraps(forward)
    def _forward(self, data, fn, batchsize=16, *args, **kwargs):
        converter, *rest = args or (kwargs.get('converter'),)
        if _is_ours(converter):
            from chainer_bspmm.training.captured_predict import replayed

            options = {name: value for name, value in kwargs.items() if name != 'converter'}
            result = replayed(self, data, fn, batchsize, converter, *rest, **options)
            if result is not None:
                return result
        return forward(self, data, fn, batchsize, *args, **kwargs)

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
    Evaluator.__call__ = _adopting_evaluators(Evaluator.__call__)
    BaseForwardModel._forward = _replaying(BaseForwardModel._forward)
