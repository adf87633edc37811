"""Replacement of Chainer's updaters, evaluators and predictions by their captured forms.

The class of an updater or evaluator with a `CSRConverter` is replaced in place, as `sparsify`
replaces the class of a model: a StandardUpdater becomes a `GraphUpdater`, and an evaluator its
captured form. ``predict`` of Chainer Chemistry, called with a `CSRConverter`, replays. Anything
that cannot be captured runs as before, with one warning on a GPU. Subclasses are left alone, and so
is everything while ``chainer.config.bspmm_capture`` is False.

If a dense converter is left where a swapped model needs sparse batches, an error asks for a
`CSRConverter`.

The first step of every optimizer with a sparse batch is checked as well (`check_rows`), in any loop
that calls ``optimizer.update(loss, ...)``. ``chainer.config.bspmm_check_swap = False`` turns that
off.
"""

import contextlib
import functools
import sys
import threading

import chainer
from chainer.dataset.convert import concat_examples
from chainer.training.extensions import Evaluator
from chainer.training.updaters import StandardUpdater
from chainer.utils.type_check import InvalidType
from chainer_chemistry.models.prediction.base import BaseForwardModel

from chainer_bspmm.compat.user_code import is_user_code, warn
from chainer_bspmm.cuda import step
from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.models.forgotten_converter import expect_sparse_batches, explain
from chainer_bspmm.sparse import BatchedCSR

# The loops that are replaced, unless other code has replaced them.
_LOOPS = {StandardUpdater: StandardUpdater.update_core, Evaluator: Evaluator.evaluate}


def _is_ours(converter):
    return type(converter) is CSRConverter and chainer.config.bspmm_capture


def _can_adopt(updater):
    if type(updater) is not StandardUpdater:
        return False
    optimizer = updater.get_all_optimizers().get('main')
    # Updaters of several ranks are not adopted: with captured steps all ranks end if one of them
    # cannot continue.
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
        # A user's subclass may set another converter later, and its loop may make sparse batches.
        if not (is_user_code(kind.__module__) or is_user_code(kind.update_core.__module__)):
            expect_sparse_batches(kind.__name__, self.converter, _function_of(self))
        if _can_adopt(self):
            # Imported only here, because it would make the first import of the package longer.
            from chainer_bspmm.training.graph_updater import adopt

            adopt(self)

    return __init__


def _function_of(updater):
    """Return the function or model that an updater calls with its batches, or None."""
    loss_func = getattr(updater, 'loss_func', None)  # a subclass may skip the base's __init__
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


def _expecting_sparse_batches(initialize):
    """Wrap what a Trainer calls before its first step: an evaluation may come hours later.

    A user's subclass is checked when it is called, as it may set another converter or model there.
    """

    @functools.wraps(initialize)
    def checked(self, trainer):
        if not is_user_code(type(self).__module__):
            _check_evaluator(self)
        initialize(self, trainer)

    return checked


def _check_evaluator(evaluator):
    """Return converter and function of an evaluator, or raise TypeError if they do not fit."""
    converter = getattr(evaluator, 'converter', None)
    function = getattr(evaluator, 'eval_func', None)
    if function is None:
        function = getattr(evaluator, '_targets', {}).get('main')
    if not is_user_code(type(evaluator).evaluate.__module__):
        expect_sparse_batches(type(evaluator).__name__, converter, function)
    return converter, function


def _adopting_evaluators(call):
    @functools.wraps(call)
    def __call__(self, trainer=None):
        converter, function = _check_evaluator(self)
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


_updating = threading.local()  # it has an attribute while this thread runs an optimizer's loss

MAX_ITEMS = 16  # longer tuples, lists and dicts among the arguments of a loss are not searched

# Errors that code may raise if it takes the arrays of a sparse batch for padded ones.
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


def _is_checked(optimizer):
    """Return whether the first step of an optimizer was checked, without importing the check."""
    check_rows = sys.modules.get('chainer_bspmm.training.check_rows')
    return check_rows is not None and check_rows.is_checked(optimizer)


def _checking_first_steps(update):
    def checked_update(self, lossfun, *args, **kwds):
        if _is_checked(self) or not chainer.config.bspmm_check_swap or chainer.is_debug():
            return update(self, lossfun, *args, **kwds)
        adj = _batch_in((*args, *kwds.values()))
        if adj is None:
            return update(self, lossfun, *args, **kwds)
        from chainer_bspmm.training.calls import is_noting, noting
        from chainer_bspmm.training.check_rows import check_first_step

        is_checked_later = is_noting()  # GraphUpdater checks the next step
        around = contextlib.nullcontext() if is_checked_later else noting(self.target)
        try:
            with around:
                result = update(self, lossfun, *args, **kwds)
        except _OF_SHAPES as error:
            _explain(error, adj)
            raise
        if is_checked_later:
            return result
        text = check_first_step(self, lossfun, args, kwds).text
        if text:
            warn(text)
        return result

    @functools.wraps(update)
    def outer_update(self, lossfun=None, *args, **kwds):
        if (
            # Without a loss the gradients are there already, as with ChainerMN. There an error or a
            # delay of one rank would also stop the others.
            lossfun is None
            or vars(_updating)  # this update is part of the loss of another optimizer
            or step.current() is not None  # it is inside of a captured step
        ):
            return update(self, lossfun, *args, **kwds)
        _updating.optimizer = self
        try:
            return checked_update(self, lossfun, *args, **kwds)
        finally:
            del _updating.optimizer

    return outer_update


def _explain(error, adj):
    """Add the likely cause and the remedies to an error that a loss raised on a sparse batch."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = traceback.tb_frame.f_globals.get('__name__') or ''
    if name.partition('.')[0] == 'chainer_bspmm':  # our own errors say what they expect
        return
    if name == 'chainer.optimizer':  # the error is about the result of the loss
        return
    if isinstance(error, InvalidType) and 'dtype' in error.expect:  # no layout changes a dtype
        return
    text = (
        'This batch is sparse: the atoms of %d molecules are %d rows, and adj is a BatchedCSR. '
        'If the code runs on a dense batch, it expects padded arrays: adj.to_dense() returns the '
        "padded adjacency, CSRConverter('padded') keeps atoms padded, and parts outside of "
        'init_scope must be swapped separately.'
    ) % (adj.n_graphs, adj.n_rows)
    if name.startswith('chainer.') and type(adj).__name__ in str(error):
        text += (
            ' adj is not an array, and the converter sends it to its device: leave out '
            'chainer.Variable(adj) and cuda.to_gpu(adj), and let a function that you give to '
            'F.forget close over adj.'
        )
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
    """Adopt updaters, evaluators and predictions from now on; a second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for name in ('bspmm_capture', 'bspmm_check_swap'):
        vars(chainer.global_config).setdefault(name, True)
    StandardUpdater.__init__ = _adopting_updaters(StandardUpdater.__init__)
    StandardUpdater.update = _explaining_updates(StandardUpdater.update)
    Evaluator.__call__ = _adopting_evaluators(Evaluator.__call__)
    Evaluator.initialize = _expecting_sparse_batches(Evaluator.initialize)
    BaseForwardModel._forward = _replaying(BaseForwardModel._forward)
    chainer.GradientMethod.update = _checking_first_steps(chainer.GradientMethod.update)
