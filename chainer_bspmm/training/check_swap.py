"""`check_swap`: check that a swapped model gives the loss and gradients of the dense model."""

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import chainer
from chainer.dataset.convert import concat_examples

from chainer_bspmm.dataset import concat_mols, CSRConverter
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.models import densify
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.build import to_host
from chainer_bspmm.training.outcome import beyond_rounding, errors, in_short, LOSS, outcome

MAX_EXAMPLES = 32
MAX_ENTRIES = 2**18  # most entries of the dense adjacency of a batch
# Largest relative differences, by the dtype of the run. In float64 rounding errors are far smaller,
# except in models that cast to float32 inside.
TOLERANCE = {'float64': 1e-4, 'float32': 1e-3}
PAGE = 'docs/migration.md, "A Chain of your own"'


class SwapCheck(NamedTuple):
    """Result of `check_swap`.

    Attributes:
        equal (bool or None): whether loss, gradients and reported values equal the dense model's;
            None if that is not known.
        text (str): the difference and its likely cause, or the reason why it is not known.
        loss, dense_loss (float or None): loss of the swapped and of the dense model, for the
            molecules that were compared.
    """

    equal: bool | None
    text: str = ''
    loss: float | None = None
    dense_loss: float | None = None


class _CannotTell(Exception):
    """The check has no result; the message is the reason, for the user."""


def check_swap(
    model: chainer.Link,
    examples: Any,
    converter: Callable = concat_mols,
    loss_func: Callable | None = None,
) -> SwapCheck:
    """Compare a swapped model with the dense one: loss, gradients and reported values.

    A swapped and a dense copy of the model, with the same parameters, run on the host on up to 32
    examples, fewer if molecules are large. They run in test mode (no dropout), and in float64 if
    the model can.

        print(check_swap(model, train[:32]).text or 'equal')

    Args:
        model (chainer.Link): the link that is trained, such as a Regressor or a Chain of your own,
            on any device. It returns the loss of a batch, unless ``loss_func`` does.
        examples (sequence): a batch of the training set, dense or sparse.
        converter (callable): the converter of the training.
        loss_func (callable or None): as for an updater; None means the model.

    Returns:
        SwapCheck: ``equal`` is None for converters other than `CSRConverter`; for packed batches,
        whose results differ from upstream's on purpose; for models that cannot be copied, have no
        dense form, or do not fit the dense batch; for losses that are not finite; and for losses
        whose random numbers depend on the rows.

    Raises:
        TypeError: ``model`` is not a Link. Errors of the runs are not raised, but named in
            ``text``.

    Note:
        Attributes and parameters of the model, gradients, and the random numbers of NumPy and
        Python stay as they are. Other state that a user's code changes, such as globals, is changed
        by every run. There are two runs, and up to eight if results differ.
    """
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)
    try:
        return _compared(model, examples, converter, loss_func or model)
    except Exception as error:  # the training itself will raise the error
        return SwapCheck(None, str(error) if isinstance(error, _CannotTell) else repr(error))


def _compared(model, examples, converter, function):
    if not any(isinstance(link, Sparse) for link in model.links()):
        raise _CannotTell('nothing in the model is swapped')
    if type(converter) is not CSRConverter:
        raise _CannotTell('the converter is not a CSRConverter')
    if converter.layout == 'packed':
        raise _CannotTell("packed batches have no phantom atoms, unlike upstream's")
    examples = [_dense_example(examples[i]) for i in range(min(MAX_EXAMPLES, len(examples)))]
    examples = _not_too_large(examples)
    n_examples = len(examples)
    batch = converter(examples)
    padded_to = converter.padded_to
    if padded_to is not None:
        if any(len(atoms) > padded_to for atoms, *_ in examples):
            raise _CannotTell('molecules have more atoms than padded_to')
        examples[0] = _padded(examples[0], padded_to)
    dense_batch = concat_examples(examples, padding=0)
    run, sparse, dense = _both_ways(model, function, batch, dense_batch)
    losses = float(sparse[LOSS]), float(dense[LOSS])
    if not numpy.isfinite(losses).any():
        raise _CannotTell('the loss is %s with both' % losses[0])
    found = run.differences(sparse, dense, dense_batch)
    if not found:
        return SwapCheck(True, '', *losses)
    if run.differences(run(batch, has_other_numbers=True), sparse, batch):
        raise _CannotTell('the loss is random')
    name, error = next(iter(found.items()))
    adj = batch[1]
    is_counted = _is_off_by(adj.n_rows / n_examples, in_short(sparse[name]), in_short(dense[name]))
    if is_counted:
        cause = (
            'It is off by a factor of rows / molecules: len(atoms) and '
            'atoms.shape[0] count the rows of a sparse batch; use len(t) or adj.n_graphs.'
        )
    elif _is_equal_padded(run, examples, converter, dense, dense_batch):
        cause = (
            'In padded batches it is equal: something of your own reduces over rows, or expects '
            '(molecules, atoms, channels); use the readouts of Chainer Chemistry or '
            'chainer_bspmm.functions.segment_sum'
        )
        # With padded_to, 'padded' is no advice: it would give up padded_to and change all results.
        cause += '.' if padded_to is not None else ", or CSRConverter('padded')."
    else:
        cause = (
            'The loss or the model treats rows as molecules, or reads the shape of atoms or adj; '
            'or columns of labels were taken for columns of atoms (CSRConverter(n_node_columns=0)).'
        )
    text = (
        'the swap changes the numbers of this model: for %d molecules the loss is %.6g, before the '
        'swap it was %.6g; %s off by %.2g of its value. %s See %s'
    )
    what = 'it is' if name == LOSS else name + ' is'
    return SwapCheck(False, text % (n_examples, *losses, what, error, cause, PAGE), *losses)


def _both_ways(model, function, batch, dense_batch):
    """Return a `_Run`, in float64 if the model can, and outcomes of swapped and dense model."""
    for dtype in TOLERANCE:
        try:
            run = _Run(model, function, dtype, batch)
            return run, run(batch), run(dense_batch, is_dense=True)
        except _CannotTell:
            raise
        except Exception as error:
            failure = error
    # An error of the swapped model is raised by the training as well, with its traceback.
    raise _CannotTell('the swapped or the dense model does not run on this batch: %r' % failure)


def _dense_example(example):
    """Return an example with arrays on the host, and a dense adjacency."""
    atoms, adj, *labels = map(to_host, example)
    if isinstance(adj, BatchedCSR):
        adj = adj.to_dense()[0]
    if not isinstance(adj, numpy.ndarray):
        raise _CannotTell('the adjacency of a molecule is %s' % type(adj).__name__)
    return (atoms, adj, *labels)


def _not_too_large(examples):
    """Return the examples, smallest first, without the largest if they have too many dense entries.

    At least two are left.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))
    fitting = [e for i, e in enumerate(examples, 1) if i * len(e[0]) ** 2 <= MAX_ENTRIES]
    return fitting if len(fitting) > 1 else examples[:2]


def _padded(example, n):
    """Return an example that is padded with phantom atoms to n atoms."""
    atoms, adj, *labels = example
    n_phantom = n - len(atoms)
    atoms = numpy.pad(atoms, [(0, n_phantom)] + [(0, 0)] * (atoms.ndim - 1))
    return (atoms, numpy.pad(adj, [(0, 0)] * (adj.ndim - 2) + [(0, n_phantom)] * 2), *labels)


class _Run:
    """Runs of a loss in a dtype, each on a new copy of the model, from the same random numbers."""

    def __init__(self, model, function, dtype, batch):
        self._model, self._function, self._dtype = model, function, dtype
        self._observers = dict(model.namedlinks())
        self._template = model
        if any(not param.is_initialized for param in model.params()):
            self._template = self._copied()
            with _lent(model, self._template), _random_numbers_kept():  # makes lazy parameters
                self._outcome(self._template, batch)

    def __call__(self, batch, is_dense=False, factor=1, has_other_numbers=False):
        """Return the outcome on a batch, with parameters that are multiplied by `factor`."""
        copied = self._copied(factor)
        if is_dense:
            densify(copied)
        with _lent(self._model, copied), _random_numbers_kept():
            if has_other_numbers:
                numpy.random.random()
                random.random()
            return self._outcome(copied, batch)

    def differences(self, actual, expected, batch):
        """Return name -> relative error for the values that differ from the outcome on a batch."""
        found = errors(actual, expected, self._dtype)
        found = {
            name: error for name, error in found.items() if not error <= TOLERANCE[self._dtype]
        }
        is_dense = not isinstance(batch[1], BatchedCSR)

        def scaled(factor):
            return self(batch, is_dense, factor)

        return beyond_rounding(found, expected, scaled, self._dtype)

    def _outcome(self, copied, batch):
        with chainer.using_config('dtype', numpy.dtype(self._dtype)):
            batch = [_cast(value, self._dtype) for value in batch]
            return outcome(self._function, copied, batch, {}, self._observers)

    def _copied(self, factor=1):
        try:
            copied = copy.deepcopy(self._template)
            copied.to_device('@numpy')
        except Exception as error:
            raise _CannotTell('the model cannot be copied to the host: %r' % error) from error
        for link in copied.links():
            for name, value in vars(link).items():
                if isinstance(value, numpy.ndarray):
                    vars(link)[name] = _cast(value, self._dtype)
        for param in copied.params(include_uninit=False):
            param.array = _cast(param.array, self._dtype) * numpy.dtype(self._dtype).type(factor)
        return copied


def _cast(value, dtype):
    if isinstance(value, BatchedCSR):
        return value.astype(dtype)
    if isinstance(value, numpy.ndarray) and value.dtype.kind == 'f':
        return value.astype(dtype)
    return value


@contextlib.contextmanager
def _random_numbers_kept():
    of_numpy, of_python = numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        numpy.random.set_state(of_numpy)
        random.setstate(of_python)


@contextlib.contextmanager
def _lent(model, copied):
    """Give the links of a model the classes and attributes of a copy's links for a while."""
    # The copy itself cannot be passed to a loss function, which refers to the model, maybe by a
    # closure or an attribute.
    links = list(model.links())
    before = [(link, type(link), vars(link)) for link in links]
    try:
        for link, other in zip(links, list(copied.links()), strict=True):
            link.__class__ = type(other)
            link.__dict__ = vars(other)
        yield
    finally:
        for link, kind, attributes in before:
            link.__class__ = kind
            link.__dict__ = attributes


def _is_off_by(ratio, actual, expected):
    return any(abs(actual - by * expected) <= 1e-4 * abs(actual) for by in (ratio, 1 / ratio))


def _is_equal_padded(run, examples, converter, dense, dense_batch):
    try:
        padded = CSRConverter('padded', n_node_columns=converter.n_node_columns)
        return not run.differences(run(padded(examples)), dense, dense_batch)
    except Exception:
        return False
