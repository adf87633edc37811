"""Where do the host's microseconds of a call of bspmm go?

Run it on a GPU from the checkout: ``python -m benchmarks.bench_host``. It writes
``benchmarks/results/<gpu>/host.json``; ``python -m benchmarks.plot_host`` draws that.
"""

import argparse
import contextlib
from unittest import mock

import chainer_bspmm
import chainer
import cupy
import numpy

from benchmarks import matrices
from benchmarks import measure
from chainer_bspmm import backend
from chainer_bspmm import reference
from chainer_bspmm.backend import check
from chainer_bspmm.backend import gpu
from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda import policy
from chainer_bspmm.sparse import operands

# A call of 2 microseconds on the device: the host never waits for it.
BATCH, DIM, NNZ_PER_ROW, N_B = 100, 50, 3, 64

BAR = 12  # microseconds of backend.bspmm

LAUNCH = 'packing the arguments, and launch'
PARTS = 'the parts of backend.bspmm in turn'
CALL = 'a Python call'  # that does nothing: in every figure here

EMPTY = 'extern "C" __global__ void empty() {}'


class Empty(chainer.FunctionNode):
    """Return the input: what is left of a function node without its work."""

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grad_outputs):
        return grad_outputs


def apply_empty(x):
    return Empty().apply((x,))[0]


def pieces(call):
    """Return {name: function}: the calls that ``backend.bspmm`` makes, to be made again alone.

    One call is made with the functions of the package's modules wrapped, so that their arguments
    are noted: what is timed later are those functions as they are, with these arguments. Calls
    that one of them makes belong to it.
    """
    made, depth = {}, [0]

    def noting(name, function):
        def wrapper(*args, **kwargs):
            if not depth[0]:
                made.setdefault(name, []).append(lambda: function(*args, **kwargs))
            depth[0] += 1
            try:
                result = function(*args, **kwargs)
            finally:
                depth[0] -= 1
            return noting(LAUNCH, result) if name == 'kernels.load' else result

        return wrapper

    with contextlib.ExitStack() as stack:
        for module, names in (
            (check, None),
            (policy, None),
            (kernels, None),
            (cupy, ['empty']),
            (gpu, ['contiguous', 'values_of']),
            (operands, None),
        ):
            for name in names or functions_of(module):
                label = '%s.%s' % (module.__name__.split('.')[-1], name)
                stack.enter_context(
                    mock.patch.object(module, name, noting(label, getattr(module, name)))
                )
        call()
    return {
        '%s (%d calls)' % (name, len(calls)) if len(calls) > 1 else name: in_turn(calls)
        for name, calls in made.items()
    }


def functions_of(module):
    """Return the names of the public functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith('_')
        and not isinstance(value, type)
        and callable(value)
        and getattr(value, '__module__', None) == module.__name__
    ]


def in_turn(calls):
    if len(calls) == 1:
        return calls[0]

    def call():
        for one in calls:
            one()

    return call


def floors(adj):
    """Return {name: function}: what to hold the pieces to."""
    empty = cupy.RawModule(code=EMPTY).get_function('empty').kernel
    return {
        'launch of an empty kernel without arguments': lambda: empty((1,), (1,), ()),
        CALL: lambda: None,
        # Everything else here finds its plan made; a batch of other sizes than any before does not.
        'policy.bspmm_launch of sizes not seen before': lambda: policy.bspmm_launch.__wrapped__(
            adj.n_rows, adj.n_cols, adj.nnz, N_B, 4, 4, kernels.device(0)
        ),
    }


def products(adj, x):
    """Return {name: function}: the whole of a product, with and without the graph of Chainer."""
    variable = chainer.Variable(x)
    gy = cupy.ones_like(x)

    def without_graph(function):
        def call():
            with chainer.no_backprop_mode():
                function(x)

        return call

    def no_graph():
        with chainer.no_backprop_mode():
            pass

    def backward(function):
        y = function(variable)

        def call():
            variable.cleargrad()
            y.grad = gy  # which backward() drops
            y.backward()

        return call

    def bspmm(x):
        return chainer_bspmm.functions.bspmm(adj, x)

    return {
        'backend.bspmm': lambda: backend.bspmm(adj, x),
        'functions.bspmm, with graph': lambda: bspmm(variable),
        'functions.bspmm, no_backprop_mode': without_graph(bspmm),
        'no_backprop_mode alone': no_graph,
        'backward of functions.bspmm': backward(bspmm),
        'empty FunctionNode, with graph': lambda: apply_empty(variable),
        'empty FunctionNode, no_backprop_mode': without_graph(apply_empty),
        'backward of an empty FunctionNode': backward(apply_empty),
        # What FunctionNode adds beside a launch; alone it runs from warmer caches.
        'backend.bspmm, then an empty FunctionNode with graph': lambda: (
            backend.bspmm(adj, x),
            apply_empty(variable),
        ),
        'functions.relu, with graph': lambda: chainer.functions.relu(variable),
    }


def current_device(x):
    with launch.device_of(x):
        pass


def error(actual, expected):
    return float(numpy.linalg.norm(actual.get() - expected) / numpy.linalg.norm(expected))


def check_products(adj, x):
    variable = chainer.Variable(x)
    y = chainer_bspmm.functions.bspmm(adj, variable)
    y.grad = gy = cupy.random.uniform(-1, 1, y.shape, 'f')
    y.backward()
    errors = {
        'forward': error(y.array, reference.bspmm(adj, x)),
        'backward': error(variable.grad, reference.bspmm(adj, gy, trans=True)),
    }
    assert max(errors.values()) < 1e-5, errors
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--commit', help='commit to note down where git is not at hand')
    parser.add_argument('--out', help='folder for the result in place of results/<gpu>')
    args = parser.parse_args()
    rng = numpy.random.RandomState(0)
    adj = matrices.regular(rng, BATCH, DIM, NNZ_PER_ROW).to_device(0)
    x = cupy.asarray(rng.uniform(-1, 1, (adj.n_cols, N_B)).astype('f'))
    errors = check_products(adj, x)  # nobody is timed on a wrong answer
    whole_calls = products(adj, x)
    parts = pieces(whole_calls['backend.bspmm'])
    parts['launch.device_of'] = lambda: current_device(x)
    assert LAUNCH in parts, list(parts)
    together = in_turn(list(parts.values()))
    times = measure.host_times({**whole_calls, **parts, **floors(adj), PARTS: together})
    call = times[CALL]['median']
    alone = sum(times[name]['median'] - call for name in parts)
    # The loop over the parts calls each of them, and is called itself.
    in_a_row = times[PARTS]['median'] - (len(parts) + 1) * call
    whole = times['backend.bspmm']['median'] - call
    result = {
        'question': 'host microseconds of a call of bspmm (float32), by part',
        'method': 'median of %d interleaved rounds of 100 calls, never waiting for the device; '
        'each part timed on its own, and all in turn; unexplained: the whole less the '
        'parts in turn, all less Python calls' % measure.ROUNDS,
        'conditions': measure.conditions(args.commit),
        'case': {'batch': BATCH, 'dim': DIM, 'nnz_per_row': NNZ_PER_ROW, 'n_B': N_B},
        'relative_error': errors,
        'host_us': {name: times[name] for name in times if name not in parts},
        'parts_of_backend_bspmm_us': {name: times[name] for name in parts},
        'beyond_the_parts_us': {
            'parts in turn, beyond their sum': round(in_a_row - alone, 3),
            'unexplained': round(whole - in_a_row, 3),
        },
        'bars_met': {'backend.bspmm us <= %g' % BAR: times['backend.bspmm']['median'] <= BAR},
    }
    for kind in ('host_us', 'parts_of_backend_bspmm_us'):
        for name, spread in result[kind].items():
            print(
                '  %-52s %7.2f us  (%.2f to %.2f)'
                % (name, spread['median'], spread['low'], spread['high'])
            )
    for name, beyond in result['beyond_the_parts_us'].items():
        print('  %-52s %7.2f us' % (name, beyond))
    print(result['bars_met'])
    print('wrote', measure.save('host', result, args.out))


if __name__ == '__main__':
    main()
