"""`check_rows`: check that a loss does not take the rows of a sparse batch for molecules."""

import contextlib
import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import chainer
from chainer_chemistry.models.prediction import Classifier, GraphConvPredictor, Regressor

from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.training.forked import cannot_fork, described, Failed, NoResult, run_forked
from chainer_bspmm.training.outcome import beyond_rounding, dtype_of, errors, in_short, LOSS
from chainer_bspmm.training.outcome import outcome
from chainer_bspmm.training.outside import reaches_outside
from chainer_bspmm.training.reach import Reach
from chainer_bspmm.training.snapshot import ParameterMissing, Snapshot
from chainer_bspmm.training.work import spare_tolerance
from chainer_bspmm.compat.user_code import is_user_code

PAGE = 'docs/migration.md, "A Chain of your own"'
# Relative error up to which results count as equal if only the contents of spare rows differ.
SAME = 1e-6
_TYPES = Regressor, Classifier, GraphConvPredictor  # Chainer Chemistry's, whose losses are known


class RowsCheck(NamedTuple):
    """Result of `check_rows`.

    Attributes:
        is_right (bool or None): whether rows that belong to no molecule change nothing; None if
            that cannot be told.
        text (str): the value that they change and the likely cause, or the reason why that cannot
            be told.
    """

    is_right: bool | None
    text: str = ''


class _CannotTell(Exception):
    """The check has no result; the message is the reason, for the user."""


# Optimizer whose first step was checked -> weak reference to the target that it had: an optimizer
# may be set up again with another one. A mark on the optimizer itself would be pickled with it.
_checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# It has an attribute in threads that are inside of a check. A loss that is run there may do steps
# of other optimizers, which are not checked.
_checking = threading.local()


def is_checked(optimizer: chainer.Optimizer) -> bool:
    """Return whether :func:`check_first_step` was called for a step of the optimizer's target."""
    target = _checked.get(optimizer)
    return target is not None and target() is optimizer.target


def check_first_step(
    optimizer: chainer.Optimizer,
    function: Callable,
    args: Any,
    kwargs: Any,
    around: Callable = contextlib.nullcontext,
) -> RowsCheck:
    """Call :func:`check_rows` after a step, if it was the first step of an optimizer.

    The `text` of the result is the warning for the user. It is empty if all is well, and if the
    check has no result for a model of Chainer Chemistry without a user's code. It is also empty
    without a check: for a model on the host if processes cannot be forked.
    """
    if vars(_checking) or is_checked(optimizer):
        return RowsCheck(None)
    target = optimizer.target
    _checked[optimizer] = weakref.ref(target)
    links = [*target.links(), *_links_of(function)]
    if not any(isinstance(link, Sparse) for link in links):
        return RowsCheck(None)
    if _is_on_host(links) and cannot_fork():
        return RowsCheck(None)
    _checking.target = target
    try:
        check = check_rows(target, function, args, kwargs, around)
    finally:
        del _checking.target
    if check.is_right is None:
        is_known = function is target and isinstance(target, _TYPES)
        if is_known and not any(is_user_code(type(link).__module__) for link in links):
            return RowsCheck(None)
        text = (
            'chainer_bspmm could not check the loss of %s: %s; compare with '
            'chainer_bspmm.check_swap(model, examples)'
        )
        return RowsCheck(None, text % (type(target).__name__, check.text))
    return check


def _links_of(function):
    owner = getattr(function, '__self__', function)
    return owner.links() if isinstance(owner, chainer.Link) else ()


def _is_on_host(links):
    return all(link.xp is numpy for link in links)


def check_rows(
    target: chainer.Link,
    function: Callable,
    args: Any,
    kwargs: Any,
    around: Callable = contextlib.nullcontext,
) -> RowsCheck:
    """Run a loss on a batch, and on the batch with twice as many rows; the new ones are spare.

    Spare rows belong to no molecule, so they must not change the loss, reported values or
    gradients, beyond rounding. All runs are in test mode. If there is a difference, a few more runs
    find the cause.

    On the host each run is in a forked process, so nothing in this one changes, and all runs begin
    with one state. There is no check of code that visibly reaches outside of its process, such as
    by opening files. CUDA does not work in a forked copy of a process that has used it, so for
    links on a GPU the runs are in this process, and undone: the Python state that `reach.Reach`
    finds, arrays, gradients and random numbers are put back, and no parameter is made.

    Args:
        target (chainer.Link): the link whose parameters are trained; all parameters that a step
            needs must have been made.
        function (callable): returns the loss.
        args, kwargs (tuple, dict): its arguments, with one BatchedCSR or more. Arrays with as many
            rows as one of these matrices get spare rows, too. Padded batches need no check, because
            they have upstream's shapes.
        around (callable): returns a context manager, inside of which the loss is run.

    Returns:
        RowsCheck: `is_right` is None if a run would change something that is not undone, if a run
        fails, or if the loss is random.
    """
    batches = list(_batches((args, kwargs)))
    batches = [adj for adj in batches if adj.layout != 'padded']
    if not batches:
        return RowsCheck(True)
    try:
        return _Check(target, function, args, kwargs, around, batches).result()
    except (_CannotTell, NoResult) as error:
        return RowsCheck(None, str(error))
    except ParameterMissing:
        return RowsCheck(None, 'it makes a parameter that the first step has not made')
    except Exception as error:  # a user's objects may raise anything here; the training continues
        return RowsCheck(None, 'the check fails with %s' % _described(error))


class _Check:
    def __init__(self, target, function, args, kwargs, around, batches):
        self._target = target
        self._function = function
        self._arguments = args, kwargs
        self._around = around
        self._batches = batches
        self._dtype = dtype_of(target)
        self._is_on_host = _is_on_host([*target.links(), *_links_of(function)])
        self._reach: Any = None  # made in the process in which the loss is run

    def result(self):
        """Run the check and return its `RowsCheck`."""
        if any(adj.n_graphs in self._row_counts() for adj in self._batches):
            raise _CannotTell('the batch has as many rows as molecules')
        reason = run_forked(self._found_outside) if self._is_on_host else self._cannot_undo()
        if reason:
            raise _CannotTell('it would ' + reason)
        try:
            first = self._run()
        except (ParameterMissing, NoResult):
            raise
        except Exception as error:
            raise _CannotTell('in test mode it fails with %s' % _described(error)) from error
        if not numpy.isfinite(first[LOSS]):  # then it would not be finite with spare rows either
            return RowsCheck(True)
        try:
            spare = self._run(has_spare=True)
        except NoResult:
            raise
        except Exception as error:
            text = 'with rows that belong to no molecule it fails with %s'
            raise _CannotTell(text % _described(error)) from error
        tolerance = spare_tolerance(numpy.dtype(self._dtype), self._target)
        found = errors(spare, first, self._dtype)
        found = {name: error for name, error in found.items() if error > tolerance}
        if not found:
            return RowsCheck(True)
        again = errors(self._run(draws_others=True), first, self._dtype)
        if any(error > tolerance for error in again.values()):
            raise _CannotTell('two runs of one batch differ, so it is random in test mode')
        found = beyond_rounding(found, first, lambda by: self._run(factor=by), self._dtype)
        if not found:
            return RowsCheck(True)
        finite = [name for name, error in found.items() if numpy.isfinite(error)]
        if not finite:
            text = 'with rows that belong to no molecule %s is not finite'
            raise _CannotTell(text % next(iter(found)))
        return RowsCheck(False, self._text(finite[0], first, spare))

    def _text(self, name, first, spare):
        adj = self._batches[0]
        text = (
            'the loss of %s mistakes rows of a sparse batch for molecules: for %d molecules in %d '
            'rows %s is %.6g; with %d more rows, which belong to no molecule, it is %.6g. %s See %s'
        )
        return text % (
            type(self._target).__name__,
            adj.n_graphs,
            adj.n_rows,
            name if name.startswith('the ') else name + ', which is reported,',
            in_short(first[name]),
            adj.n_rows,
            in_short(spare[name]),
            self._cause(name, spare),
            PAGE,
        )

    def _cause(self, name, spare):
        """Return a sentence about the likely cause: the number of rows, or their contents."""
        try:
            other = self._run(has_spare=True, is_filled=True)
            error = errors(other, spare, self._dtype).get(name, numpy.inf)
        except Exception:
            error = None
        if any(adj.n_node_columns for adj in self._batches):
            columns = (
                ' If labels of molecules were taken for columns of atoms, give '
                'CSRConverter(n_node_columns=0).'
            )
        else:
            columns = ''
        counted = (
            'len(atoms) and atoms.shape[0] count rows, and so does a mean over axis 0: use len(t) '
            'or adj.n_graphs.'
        )
        reduced = (
            'a sum, a mean or a maximum over axis 0 covers the rows of all molecules: use a '
            'readout of Chainer Chemistry or chainer_bspmm.functions.segment_sum.'
        )
        if error is None:
            return 'Either %s Or %s%s' % (counted, reduced, columns)
        if error <= SAME:
            return 'It depends on how many rows there are: %s%s' % (counted, columns)
        return 'It depends on the contents of the rows: %s%s' % (reduced, columns)

    def _found_outside(self):
        return reaches_outside(self._made_reach().functions.values())

    def _cannot_undo(self):
        self._reach = self._made_reach()
        return next(iter(self._reach.cannot), '')

    def _made_reach(self):
        return Reach(self._target, self._function, *_hooks_of_user(self._target))

    def _run(self, **how):
        """Return the outcome on the batch; `how` are arguments of :meth:`_outcome`."""
        if self._is_on_host:
            return run_forked(functools.partial(self._outcome, **how))
        with Snapshot(self._target, self._reach).undone():
            return self._outcome(**how)

    def _outcome(self, has_spare=False, is_filled=False, draws_others=False, factor=None):
        """Run the loss and return its outcome; nothing is undone.

        With `has_spare` the batch has spare rows of zeros, with `is_filled` they are copies of its
        rows. With `draws_others` the loss draws other random numbers than without; for that it is
        run twice on a GPU. Parameters are multiplied by `factor`.
        """
        arguments = self._arguments
        if has_spare:
            arguments = _with_spare_rows(arguments, self._row_counts(), is_filled)
        if factor is not None:
            for param in self._target.params(include_uninit=False):
                param.array[...] *= factor
        if draws_others and self._is_on_host:
            _move_generators()
        elif draws_others:
            before = Snapshot(self._target, self._reach)
            self._outcome_of(*arguments)
            before.restore(with_numbers=False)
        return self._outcome_of(*arguments)

    def _outcome_of(self, args, kwargs):
        links = self._reach.links.values() if self._reach is not None else ()
        for link in links:  # not only the target's, because gradients add up over several runs
            for param in link.params(include_uninit=False):
                param.cleargrad()
        with self._around():
            return outcome(self._function, self._target, args, kwargs)

    def _row_counts(self):
        return {adj.n_rows for adj in self._batches}


def _move_generators():
    """Draw a number from every generator of random numbers in this process, a fork."""
    gc.unfreeze()  # objects that a user has frozen are not searched otherwise
    objects = gc.get_objects()
    own = numpy.random.RandomState, numpy.random.Generator, random.Random
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, own)}
    for thing in objects:
        if type(thing) in kinds:
            thing.random()


def _described(error):
    if isinstance(error, Failed):
        return str(error)
    return described(error)


def _hooks_of_user(target):
    """Return a user's hooks that run with the loss."""
    places = [chainer.get_function_hooks(), chainer._get_link_hooks()]
    places += [link._local_link_hooks or {} for link in target.links()]
    return [
        hook for hooks in places for hook in hooks.values() if is_user_code(type(hook).__module__)
    ]


def _batches(value):
    if isinstance(value, BatchedCSR):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _batches(each)


def _with_spare_rows(value, row_counts, is_filled):
    """Return the arguments of a loss with twice as many rows; the new ones are spare."""
    if isinstance(value, BatchedCSR):
        return value if value.layout == 'padded' else _more_rows(value)
    if isinstance(value, chainer.Variable):
        array = _with_spare_rows(value.array, row_counts, is_filled)
        return value if array is value.array else chainer.Variable(array)
    if isinstance(value, chainer.get_array_types()):
        if not value.ndim or len(value) not in row_counts:
            return value
        return _extended(value, value if is_filled else len(value))
    if isinstance(value, (tuple, list)):
        items = [_with_spare_rows(each, row_counts, is_filled) for each in value]
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    if isinstance(value, dict):
        # Without copy.copy, which fails if the class makes all attributes of items.
        changed = type(value).__new__(type(value))
        if type(value).__dictoffset__:  # it has attributes
            vars(changed).update(vars(value))
        for name, each in value.items():
            changed[name] = _with_spare_rows(each, row_counts, is_filled)
        return changed
    return value


def _more_rows(adj):
    """Return a `BatchedCSR` with as many spare rows as it has rows, and a spare entry."""
    n = adj.n_rows
    indptr = _extended(adj.indptr, n)
    indptr[n + 1 :] = adj.nnz
    return adj.replace(
        indptr=indptr,
        indices=_extended(adj.indices, 1),
        data=None if adj.data is None else _extended(adj.data, 1),
        row_weights=None if adj.row_weights is None else _extended(adj.row_weights, n),
        n_rows=2 * n,
        n_cols=2 * adj.n_cols,
        nnz=adj.nnz + 1,
        is_symmetric=adj.is_symmetric,  # rows without entries change nothing
        has_spare=True,
    )


def _extended(array, more):
    """Return an array with more rows appended: `more` is an array, or a number of rows of zeros."""
    xp = chainer.backend.get_array_module(array)
    if isinstance(more, int):
        more = xp.zeros((more,) + array.shape[1:], array.dtype)
    return xp.concatenate([array, more])
