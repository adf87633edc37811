"""Two lines buy captured steps: Chainer's own updaters, evaluators and predictions become ours.

Where a `CSRConverter` meets one of them, its class is changed, as `sparsify` changes a model's: a
StandardUpdater becomes a `GraphUpdater`, an evaluator its captured form, and ``predict`` of Chainer
Chemistry replays. What cannot be captured runs as it did, with one warning on a GPU. Subclasses are
left alone, and so is everything while ``chainer.config.bspmm_capture`` is False.
"""

import functools

import chainer
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction.base import BaseForwardModel

from chainer_bspmm.dataset.converters import CSRConverter


def _is_ours(converter):
    return type(converter) is CSRConverter and chainer.config.bspmm_capture


def _adopting_updaters(init):
    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        optimizers = self.get_all_optimizers()
        if type(self) is StandardUpdater and _is_ours(self.converter) and 'main' in optimizers:
            # Imported where it is needed: it would make the first import of the package longer.
            from chainer_bspmm.training.graph_updater import adopt

            adopt(self)

    return __init__


def _adopting_evaluators(call):
    @functools.wraps(call)
    def __call__(self, trainer=None):
        if _is_ours(self.converter):
            from chainer_bspmm.training.captured_evaluators import capture_evaluator

            capture_evaluator(self)
        return call(self, trainer)

    return __call__


def _replaying(forward):
    @functools.wraps(forward)
    def _forward(self, data, fn, batchsize=16, converter=None, *args, **kwargs):
        if _is_ours(converter):
            from chainer_bspmm.training.forward import replayed

            result = replayed(self, data, fn, batchsize, converter, *args, **kwargs)
            if result is not None:
                return result
        given = {} if converter is None else {'converter': converter}
        return forward(self, data, fn, batchsize, *args, **given, **kwargs)

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
