"""`check_swap`: does a swapped model give the loss and gradients that it gave before the swap?"""

import contextlib
import copy
import random
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import chainer
from chainer.dataset.convert import concat_examples

from chainer_bspmm.compat.user_code import is_user_code
from chainer_bspmm.dataset import concat_mols, CSRConverter
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.models import densify, sparsify
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.build import to_host

N_MOLECULES = 3
FEW_ATOMS, MAX_ATOMS = 16, 64  # of a molecule: dense, it takes n**2; the second for lack of smaller
# Relative differences. Where the model runs in float64 rounding is far below; what casts to float32
# inside of it is not.
TOLERANCE = {'float64': 1e-4, 'float32': 1e-3}
FLOOR = {'float64': 1e-6, 'float32': 1e-2}  # losses and gradients below are compared with it
# Parameters are scaled by so little that nothing but rounding may show.
SCALES = {'float64': (1 + 1e-9, 1 + 3e-9, 1 + 7e-9), 'float32': (1 + 1e-6, 1 + 3e-6, 1 + 7e-6)}
SMALL = 1e-3  # gradients below this share of all are compared with the share
MAX_NODES, MAX_BYTES = 2000, 10_000_000  # of what the model and the loss refer to, to be copied
PLAIN = (type(None), bool, int, float, complex, str, bytes, numpy.generic, numpy.dtype)
HANDLES = 'cupy', 'cupy_backends', 'chainermn', 'mpi4py'  # whose copies would free what they hold
SHARED = types.ModuleType, types.BuiltinFunctionType, numpy.ufunc, type
PAGE = 'docs/migration.md, "A Chain of your own"'


class SwapCheck(NamedTuple):
    """What `check_swap` found.

    Attributes:
        equal (bool or None): whether loss and gradients are those of the dense model; None: that
            is not known.
        text (str): by how much they differ and the likely cause, or why that is not known.
        loss, dense_loss (float or None): of the molecules that were compared.
    """

    equal: bool | None
    text: str = ''
    loss: float | None = None
    dense_loss: float | None = None


class _CannotTell(Exception):
    """The reason, for the user."""


class _Outcome(NamedTuple):
    loss: float
    gradients: dict  # path -> array


def check_swap(
    model: chainer.Link,
    examples: Any,
    converter: Callable = concat_mols,
    loss_func: Callable | None = None,
) -> SwapCheck:
    """Compare a swapped model with the dense one: the loss of a few molecules, and its gradients.

    Up to three small molecules of different sizes go through a copy of the model on the host,
    swapped and dense, with the same parameters, in test mode (no dropout), in float64 if the model
    can.

        print(check_swap(model, train[:32]).text or 'equal')

    Args:
        model (chainer.Link): what is trained, such as a Regressor or a Chain of your own: it
            returns the loss of a batch, unless ``loss_func`` does. On any device.
        examples (sequence): a batch of the training set, dense or sparse.
        converter (callable): that of the training.
        loss_func (callable or None): as an updater has it; None means the model.

    Returns:
        SwapCheck: ``equal`` is None for converters other than `CSRConverter`, packed batches
        (which are not upstream's, on purpose), molecules of more than 64 atoms, models without a
        dense form or that the dense batch does not fit, losses that are random in test mode, and
        code of a user that reads globals other than modules, functions, numbers and strings, or
        much data.

    Note:
        Runs copies of the model and of what the loss function refers to. The originals, what is
        reported, and the random numbers of NumPy and Python do not change. Other effects of a
        user's code, such as printing, happen here as well. Usually takes tens of milliseconds.
    """
    if not isinstance(model, chainer.Link):
        raise TypeError('model: expected a chainer.Link, got %s' % type(model).__name__)
    try:
        return _compared(model, examples, converter, loss_func)
    except Exception as error:  # the training raises what is wrong
        text = str(error) if isinstance(error, _CannotTell) else repr(error)
        return SwapCheck(None, text)


def _compared(model, examples, converter, loss_func):
    if not any(isinstance(link, Sparse) for link in model.links()):
        raise _CannotTell('nothing in the model is swapped')
    if type(converter) is not CSRConverter:
        raise _CannotTell('the converter is not a CSRConverter')
    if converter.layout == 'packed':
        raise _CannotTell("packed batches have no phantom atoms, unlike upstream's")
    if chainer.get_function_hooks() or chainer._get_link_hooks():
        raise _CannotTell('a hook has to see every call, and only those of the training')
    chosen = _chosen([_dense_example(examples[i]) for i in range(len(examples))])
    if converter.padded_to is not None:
        chosen[0] = _padded(chosen[0], converter.padded_to)
        if any(len(example[0]) > converter.padded_to for example in chosen):
            raise _CannotTell('molecules have more atoms than padded_to')
    with _random_numbers_kept():
        run, sparse, dense = _both_ways(model, loss_func, chosen, converter)
        dtype = run.dtype
        differs = _difference(sparse, dense, dtype)
        if not differs:
            return SwapCheck(True, '', sparse.loss, dense.loss)
        if _difference(run.sparse(converter), sparse, dtype):
            raise _CannotTell('the loss is random')
        for scale in SCALES[dtype]:
            with run.scaled(scale):
                if _difference(run.dense(), dense, dtype) or _difference(
                    run.sparse(converter), sparse, dtype
                ):
                    raise _CannotTell('gradients jump with rounding, as where a maximum is tied')
        cause = _cause(run, converter, sparse, dense)
    text = (
        'the swap changes the numbers of this model: of %d molecules the loss is %.6g, before the '
        'swap it was %.6g; %s. %s See %s'
    )
    text %= len(chosen), sparse.loss, dense.loss, differs, cause, PAGE
    return SwapCheck(False, text, sparse.loss, dense.loss)


def _both_ways(model, loss_func, examples, converter):
    """Return a `_Run`, in float64 if the model can, and its outcomes swapped and dense."""
    for dtype in TOLERANCE:
        run = _Run(model, loss_func, examples, dtype)
        try:
            return run, run.sparse(converter), run.dense()
        except Exception as error:
            failure = error
    # What the swapped model raises the training raises as well, with its traceback.
    raise _CannotTell('swapped or dense, it does not run on such a batch: %r' % failure)


def _dense_example(example):
    """Return an example with arrays on the host, the adjacency dense."""
    atoms, adj, *labels = map(to_host, example)
    if isinstance(adj, BatchedCSR):
        adj = adj.to_dense()[0]
    if not isinstance(adj, numpy.ndarray):
        raise _CannotTell('the adjacency of a molecule is %s' % type(adj).__name__)
    return (atoms, adj, *labels)


def _chosen(examples):
    """Return a few examples with few atoms, smallest first; without two such, the two smallest."""
    examples = sorted(examples, key=lambda example: len(example[0]))
    examples = [example for example in examples if 0 < len(example[0]) <= MAX_ATOMS]
    if not examples:
        raise _CannotTell('no molecule has 1 to %d atoms' % MAX_ATOMS)
    few = [example for example in examples if len(example[0]) <= FEW_ATOMS]
    examples = few if len(few) > 1 else examples[:2]
    places = numpy.linspace(0, len(examples) - 1, min(N_MOLECULES, len(examples)))
    return [examples[round(place)] for place in places]


def _padded(example, n):
    """Return an example with phantom atoms up to n."""
    atoms, adj, *labels = example
    n_phantom = max(n - len(atoms), 0)
    atoms = numpy.pad(atoms, [(0, n_phantom)] + [(0, 0)] * (atoms.ndim - 1))
    return (atoms, numpy.pad(adj, [(0, 0)] * (adj.ndim - 2) + [(0, n_phantom)] * 2), *labels)


class _Run:
    """A copy of a model on the host, and the molecules that it is run on."""

    def __init__(self, model, loss_func, examples, dtype):
        memo: dict = {}
        for link in model.links():
            for kind in type(link).__mro__:
                _look_at_code(kind)
            _weigh(list(vars(link).values()))
        try:
            self._model = copy.deepcopy(model, memo)
            self._function = _copied(loss_func, memo) if loss_func else self._model
            self._model.to_device('@numpy')
            for link in self._model.links():
                for name, value in vars(link).items():
                    if isinstance(value, numpy.ndarray):
                        vars(link)[name] = _cast(value, dtype)
                    elif isinstance(value, dict):
                        functions = [key for key, entry in value.items() if _is_users(entry)]
                        value.update((key, _copied(value[key], memo)) for key in functions)
                    elif _is_users(value):
                        vars(link)[name] = _copied(value, memo)
        except _CannotTell:
            raise
        except Exception as error:
            raise _CannotTell('the model cannot be copied to the host: %r' % error) from error
        for param in self._model.params(include_uninit=False):
            param.array = _cast(param.array, dtype)
        self._examples = [tuple(_cast(value, dtype) for value in example) for example in examples]
        self.dtype = dtype
        # An earlier run may leave its state, such as that of a GRU, in attributes.
        self._attributes = [(vars(link), dict(vars(link))) for link in self._model.links()]
        self.sizes = [len(example[0]) for example in examples]

    @contextlib.contextmanager
    def scaled(self, factor):
        """Multiply the parameters by a factor."""
        before = [(param, param.array) for param in self._model.params(include_uninit=False)]
        for param, array in before:
            param.array = array * array.dtype.type(factor)
        try:
            yield
        finally:
            for param, array in before:
                param.array = array

    def sparse(self, converter):
        """Return the loss (float) and path -> gradient of the swapped model."""
        return self._outcome(converter(self._examples))

    def dense(self):
        """Return the same of the model before the swap."""
        densify(self._model)
        try:
            return self._outcome(concat_examples(self._examples, padding=0))
        finally:
            sparsify(self._model)

    def _outcome(self, batch):
        model = self._model
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        reporter = chainer.Reporter()
        reporter.add_observer('main', model)
        reporter.add_observers('main', model.namedlinks(skipself=True))
        model.cleargrads()
        with (
            warnings.catch_warnings(),
            reporter.scope({}),
            chainer.using_config('train', False),
            chainer.using_config('enable_backprop', True),
            chainer.using_config('dtype', numpy.dtype(self.dtype)),
        ):
            warnings.simplefilter('ignore')  # what there is to say, the training says
            loss = self._function(*batch)
            loss.backward()
        params = model.namedparams(include_uninit=False)
        gradients = {path: param.grad for path, param in params if param.grad is not None}
        return _Outcome(float(loss.array), gradients)


def _cast(value, dtype):
    if getattr(value, 'dtype', None) is not None and value.dtype.kind == 'f':
        return value.astype(dtype)
    return value.copy() if isinstance(value, numpy.ndarray) else value


def _is_users(value):
    return isinstance(value, types.FunctionType) and is_user_code(value.__module__)


def _copied(value, memo):
    """Return a deep copy of a value, of a user's function with copies of what it refers to."""
    if id(value) in memo:
        return memo[id(value)]
    if value is None or isinstance(value, SHARED):
        return value
    if not isinstance(value, types.FunctionType):
        _weigh([value])
        return copy.deepcopy(value, memo)
    if not _is_users(value):
        return value
    around = value.__globals__
    cells = value.__closure__ or ()
    new_around = dict(around)
    new_cells = tuple(types.CellType() for _ in cells)
    new = types.FunctionType(value.__code__, new_around, value.__name__, None, new_cells)
    memo[id(value)] = new
    for cell, new_cell in zip(cells, new_cells):
        new_cell.cell_contents = _copied(cell.cell_contents, memo)
    for name in value.__code__.co_names:
        if name in around and around[name] is not value:
            new_around[name] = _copied(around[name], memo)
    new.__defaults__ = _copied(value.__defaults__, memo)
    new.__kwdefaults__ = _copied(value.__kwdefaults__, memo)
    return new


def _look_at_code(kind):
    """Raise _CannotTell if methods of a user's class read globals that may change or be changed."""
    if not is_user_code(kind.__module__):
        return
    for method in vars(kind).values():
        if isinstance(method, types.FunctionType) and method.__name__ != '__init__':
            around = method.__globals__
            for name in method.__code__.co_names:
                value = around.get(name)
                if not isinstance(value, (*PLAIN, *SHARED, types.FunctionType)):
                    words = kind.__name__, method.__name__, name, type(value).__name__
                    raise _CannotTell('%s.%s reads the global %s, a %s' % words)


def _weigh(values):
    """Raise _CannotTell if values, and what they hold, are too much to copy; links do not count."""
    seen = set()
    n_bytes = 0
    while values:
        value = values.pop()
        leaves = *PLAIN, *SHARED, chainer.Variable, chainer.backend.Device
        if id(value) in seen or isinstance(value, leaves):
            continue
        seen.add(id(value))
        if isinstance(value, chainer.get_array_types()):
            n_bytes += value.nbytes
        elif isinstance(value, chainer.Link):
            pass  # weighed by itself, or of another model, as large as that
        elif type(value).__module__.partition('.')[0] in HANDLES:
            raise _CannotTell('the model or the loss holds a %s' % type(value).__name__)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, (list, tuple, set)):
            values += value
        elif isinstance(value, types.MethodType):
            values.append(value.__self__)
        elif hasattr(value, '__dict__') and not isinstance(value, types.FunctionType):
            values += vars(value).values()
        if len(seen) + len(values) > MAX_NODES or n_bytes > MAX_BYTES:
            raise _CannotTell('the model or the loss refers to much data')


@contextlib.contextmanager
def _random_numbers_kept():
    ours, pythons = numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        numpy.random.set_state(ours)
        random.setstate(pythons)


def _difference(actual, expected, dtype):
    """Return how (str) two outcomes differ, '' if they do not beyond rounding."""
    tolerance = TOLERANCE[dtype]
    norms = {path: numpy.linalg.norm(gradient) for path, gradient in expected.gradients.items()}
    # What the loss is made of may cancel: it is compared with a change of it, too.
    largest = max(norms.values(), default=0)
    scale = max(abs(actual.loss), abs(expected.loss), 1e-2 * largest, FLOOR[dtype])
    is_finite = numpy.isfinite(actual.loss) or numpy.isfinite(expected.loss)
    error = abs(actual.loss - expected.loss)
    if is_finite and not error <= tolerance * scale:
        return 'off by %.2g of it' % (error / max(abs(expected.loss), 1e-30))
    least = max(SMALL * largest, FLOOR[dtype])
    worst, where = 0.0, None
    for path in {**actual.gradients, **expected.gradients}:
        after, before = actual.gradients.get(path), expected.gradients.get(path)
        if after is None or before is None:
            side = 'before' if after is None else 'after'
            return 'the gradient of %s is there only %s the swap' % (path, side)
        both = numpy.isnan(after) & numpy.isnan(before)
        error = numpy.linalg.norm(numpy.where(both, 0, after - before))
        if numpy.isfinite(norms[path]):
            error /= max(norms[path], least)
        if not error <= worst:  # NaN as well
            worst, where = error, path
        if numpy.isnan(worst):
            break
    if worst <= tolerance:
        return ''
    return 'its gradient with respect to %s is off by %.2g of it' % (where, worst)


def _cause(run, converter, sparse, dense):
    """Return a sentence about the likely cause of a difference."""
    n, n_rows = len(run.sizes), sum(run.sizes)
    if converter.layout == 'folded':
        n_rows += n
    for ratio in (n / n_rows, n_rows / n):
        if abs(sparse.loss - ratio * dense.loss) <= 1e-4 * abs(sparse.loss):
            return (
                'It is off by the number of rows over that of molecules: len(atoms) and '
                'atoms.shape[0] count the rows of a sparse batch; use len(t) or adj.n_graphs.'
            )
    with contextlib.suppress(Exception):
        if not _difference(run.sparse(CSRConverter('padded')), dense, run.dtype):
            return (
                'In padded batches it is equal: something of your own reduces over rows, or '
                'expects (molecules, atoms, channels); use the readouts of Chainer Chemistry, '
                "chainer_bspmm.functions.segment_sum, or CSRConverter('padded')."
            )
    return (
        'The loss or the model treats rows as molecules, or reads the shape of atoms or adj; or '
        'columns of labels were taken for columns of atoms (CSRConverter(n_node_columns=0)).'
    )
