"""Two lines buy captured steps: Chainer's own updaters, evaluators and predictions become ours.

Where a `CSRConverter` meets one of them, its class is changed, as `sparsify` changes a model's: a
StandardUpdater becomes a `GraphUpdater`, an evaluator its captured form, and ``predict`` of Chainer
Chemistry replays. Anything that cannot be captured runs as it did, with one warning on a GPU.
Subclasses are left alone, and so is everything while ``chainer.config.bspmm_capture`` is False.

The first step of every optimizer is checked as well, whoever calls ``optimizer.update(loss, ...)``
with a sparse batch (`check_rows`). ``chainer.config.bspmm_check_swap = False`` turns that off.
"""

import functools
import weakref

import chainer
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater
from chainer.utils.type_check import InvalidType
from chainer_chemistry.models.prediction.base import BaseForwardModel

from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.compat.user_code import warn

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


MAX_ITEMS = 16  # of a tuple, list or dict among the arguments of a loss, that are looked at

# Errors of code that takes the arrays of a sparse batch for padded ones.
_OF_SHAPES = (TypeError, ValueError, IndexError, AttributeError, AssertionError, InvalidType)


def _batch_in(values):
    """Return a BatchedCSR among the arguments of a loss, or None."""
    for value in values:
        if isinstance(value, BatchedCSR):
            return value
        if isinstance(value, (tuple, list, dict)) and len(value) <= MAX_ITEMS:
            adj = _batch_in(value.values() if isinstance(value, dict) else value)
            if adj is not None:
                return adj
    return None


def _checking_first_steps(update):
    checked = weakref.WeakSet()  # optimizers, which are not to be pickled with a mark

    @functools.wraps(update)
    def checked_update(self, lossfun=None, *args, **kwds):
        if (
            lossfun is None  # ranks of ChainerMN bring gradients, and wait for each other
            or self in checked
            or not chainer.config.bspmm_check_swap
            or chainer.is_debug()
        ):
            return update(self, lossfun, *args, **kwds)
        adj = _batch_in((*args, *kwds.values()))
        if adj is None:
            return update(self, lossfun, *args, **kwds)
        try:
            result = update(self, lossfun, *args, **kwds)
        except _OF_SHAPES as error:
            _explain(error, adj)
            raise
        from chainer_bspmm.training.check_rows import check_first_step

        checked.add(self)
        text = check_first_step(self, lossfun, args, kwds).text
        if text:
            warn(text)
        return result

    return checked_update


def _explain(error, adj):
    """Add to an error that a loss raised on a sparse batch: to what it is due, and the remedies."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = traceback.tb_frame.f_globals.get('__name__') or ''
    if name.partition('.')[0] == 'chainer_bspmm':  # which says itself what it expects
        return
    if name == 'chainer.optimizer':  # of what the loss returned
        return
    text = (
        'This batch is sparse: atoms are %d rows of %d molecules, and adj is a BatchedCSR. If a '
        'dense batch runs, the code expects padded arrays: adj.to_dense() gives those of adj, '
        "CSRConverter('padded') keeps atoms padded, and parts outside of init_scope are to be "
        'swapped by themselves.'
    ) % (adj.n_rows, adj.n_graphs)
    if adj.n_node_columns:
        text += (
            ' %d of the labels have a row for each atom, too; if they belong to molecules, give '
            'CSRConverter(n_node_columns=0).' % adj.n_node_columns
        )
    text += ' See docs/migration.md, "A Chain of your own".'
    if hasattr(error, 'add_note'):  # from Python 3.11 on
        error.add_note(text)
    else:
        warn(text)


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
    chainer.GradientMethod.update = _checking_first_steps(chainer.GradientMethod.update)
