"""Self-test of a device: sparse models on it are compared with dense models on the CPU."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import copy
import io

import numpy

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from chainer.training import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.dataset import CSRConverter, to_sparse
from chainer_bspmm.models import densify, set_up_predictor
from chainer_bspmm.training import GraphUpdater

SIZES = 5, 1, 9, 3  # atoms of the molecules
N_OUT = 2
METHODS = 'rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp', 'relgat', 'gnnfilm'
N_STEPS = 5  # one eager, one captured, then replays, which are checked
# Largest allowed relative error, in the maximum norm, of predictions and of all gradients. Rounding
# to float16 is the reason for the first one, rounding in the dense float32 model for the others.
TOLERANCES = {'e': 5e-2, 'f': 1e-4, 'd': 1e-4}
# Errors of an array are relative to its largest value, but at least to this part of the largest
# value of all arrays.
FLOOR = 1e-2

# method: its name, with ', trained' for a training; dtype: one letter; error (float or None):
# relative, None after an exception; reason (str or None): the exception, or the limit exceeded.
Outcome = collections.namedtuple('Outcome', 'method dtype error reason')


def molecules(method: str, dtype: str) -> list[tuple]:
    """Return examples (atoms, adj, label) of a method, with bonds at random."""
    rng = numpy.random.RandomState(0)
    n_relations = 5 if method == 'gnnfilm' else 4
    examples = []
    for n in SIZES:
        relation = numpy.triu(rng.randint(0, 3 * n_relations, (n, n)), 1)
        bonds = numpy.stack([relation == r for r in range(1, n_relations + 1)])
        adj = (bonds | bonds.transpose(0, 2, 1)).astype(dtype)
        if method in ('rsgcn', 'gin', 'nfp'):
            adj = adj.sum(axis=0)
        if method == 'rsgcn':
            adj += numpy.eye(n, dtype=dtype)
            factors = 1 / numpy.sqrt(adj.sum(axis=1))
            adj *= factors[:, None] * factors
        atoms = rng.randint(1, 9, n).astype(numpy.int32)
        examples.append((atoms, adj, rng.uniform(-1, 1, N_OUT).astype(dtype)))
    return examples


def new_model(method: str) -> Regressor:
    """Return a sparse model in float32 whose parameters are all initialized."""
    numpy.random.seed(0)
    with chainer.using_config('dtype', numpy.float32), contextlib.redirect_stdout(io.StringIO()):
        predictor = set_up_predictor(method, 16, 2, class_num=N_OUT)
        model = Regressor(predictor, lossfun=functions.mean_squared_error, metrics_fun=None)
        outcome_of(model, molecules(method, 'f'), CSRConverter(), None)
    return model


def outcome_of(model, examples, converter, device):
    """Return the gradients of all parameters by name, and predictions as 'y', on the host."""
    *inputs, t = converter(examples, device)
    model.cleargrads()
    y = model.predictor(*inputs)
    model.lossfun(y, t).backward()
    arrays = {name: param.grad for name, param in model.namedparams() if param.grad is not None}
    return {name: cuda.to_cpu(array) for name, array in dict(arrays, y=y.array).items()}


def trained(model, examples, converter, device, kind):
    """Return the parameters by name, on the host, after `N_STEPS` steps with all molecules."""
    optimizer = chainer.optimizers.SGD(0.03).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))  # sums over rows are large
    iterator = SerialIterator(examples, len(examples), shuffle=False)
    options = {'on_difference': 'raise'} if kind is GraphUpdater else {}
    updater = kind(iterator, optimizer, converter=converter, device=device, **options)
    for _ in range(N_STEPS):
        updater.update()
    return {name: cuda.to_cpu(param.array) for name, param in model.namedparams()}


def relative_error(actual, expected):
    """Return the largest error of any array relative to its largest value, or NaN if one is NaN.

    Errors of arrays with small values are relative to `FLOOR` times the largest value of all.
    """
    if actual.keys() != expected.keys():
        names = sorted(actual.keys() ^ expected.keys())
        raise ValueError('expected gradients of the same parameters, got only one of %s' % names)
    largest = {name: abs(array).max(initial=0) for name, array in expected.items()}
    least = FLOOR * max(largest.values())
    errors = [
        abs(array - expected[name]).max(initial=0) / max(largest[name], least)
        for name, array in actual.items()
    ]
    return float(numpy.max(errors))  # not Python's max, which passes over NaN


def cast(model, dtype):
    """Return a copy of a model with parameters of a dtype."""
    model = copy.deepcopy(model)
    for param in model.params():
        param.array = param.array.astype(dtype)
    return model


def run(device: chainer.backend.Device) -> Iterator[Outcome]:
    """Test a device: yield an `Outcome` for each method and dtype, and each training in float32.

    Errors become outcomes; none is raised. On a GPU, the first use of each dtype of a method
    compiles kernels.
    """
    for method in METHODS:
        for dtype in TOLERANCES:
            yield _outcome(method, dtype, device, predicts)
        yield _outcome(method, 'f', device, trains)


def predicts(model, tested, method, dtype, device):
    """Return predictions and gradients of a method, computed on the device and as expected."""
    return (
        outcome_of(tested, molecules(method, dtype), CSRConverter(), device),
        outcome_of(densify(model), molecules(method, 'f'), concat_mols, None),
    )


def trains(model, tested, method, dtype, device):
    """Return parameters trained on the device (by captured steps on a GPU), and as expected."""
    steps = GraphUpdater if device.xp is cuda.cupy else StandardUpdater
    data = TupleDataset(*zip(*molecules(method, dtype)))
    return (
        trained(tested, to_sparse(data), CSRConverter(), device, steps),
        trained(densify(model), molecules(method, 'f'), concat_mols, None, StandardUpdater),
    )


def _outcome(method, dtype, device, test):
    name = method + ', trained' if test is trains else method
    try:
        with chainer.using_device(device), chainer.using_config('train', False):
            model = new_model(method)
            tested = cast(model, dtype)
            tested.to_device(device)
            error = relative_error(*test(model, tested, method, dtype, device))
    except Exception as problem:  # any error belongs in the report
        return Outcome(name, dtype, None, '%s: %s' % (type(problem).__name__, problem))
    limit = TOLERANCES[dtype]
    # Not `error > limit`, which NaN would pass.
    reason = (
        None if error <= limit else 'relative error %.1e, expected at most %.0e' % (error, limit)
    )
    return Outcome(name, dtype, error, reason)
