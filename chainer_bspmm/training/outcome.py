"""`outcome` of a loss in test mode: its value, reported values and gradients; and `errors`."""

import contextlib
import warnings

import numpy

import chainer
from chainer import link_hooks
from chainer.backends import cuda

# Two runs round products differently, so differences of small values mean little. The relative
# error of a value is the norm of the difference, divided by the norm of the value, but by at least
# FLOOR (by the dtype of the parameters), and for a gradient by at least SMALL times the norm of the
# largest gradient.
FLOOR = {'float16': 1e-2, 'float32': 1e-2, 'float64': 1e-6}
SMALL = 1e-3
FACTORS = 8, 24, 56  # parameters are changed by these multiples of their dtype's rounding
MARGIN = 10  # an error is more than rounding if it is so many times larger than rounding's effect

LOSS = 'the loss'


def outcome(function, target, args, kwargs, observers=None):
    """Run a loss in test mode; return name -> array, on the host.

    Names are worded for use in a sentence. `observers`: path -> link that reports, if these are not
    the target's links. Gradients, and other changes by the run, are left as they are.
    """
    params = dict(target.namedparams(include_uninit=False))
    for param in params.values():
        param.cleargrad()
    reporter = _Reporter(observers or dict(target.namedlinks()))
    with (
        reporter,
        warnings.catch_warnings(),
        _without_observers(target),
        chainer.using_config('train', False),
        chainer.using_config('enable_backprop', True),
    ):
        warnings.simplefilter('ignore')  # the training itself shows the same warnings
        loss = function(*args, **kwargs)
        loss.backward()
    found = {LOSS: _on_host(loss)}
    for name, value in reporter.observation.items():
        value = _on_host(value)
        if value.dtype.kind in 'biuf':
            found[name] = value
    for path, param in params.items():
        missing = param.grad is None
        gradient = numpy.zeros(param.shape, param.dtype) if missing else _on_host(param.grad)
        found[gradient_of(path)] = gradient
    return found


def gradient_of(path):
    """Return the name of the gradient of the parameter at a path."""
    return 'the gradient of ' + path


def errors(actual, expected, dtype):
    """Return name -> relative error of an outcome, in the order of `expected`.

    Values that are finite in neither, and values of another shape, are left out. If a value is
    finite in only one of the two, its error is infinite.
    """
    gradients = {name for name in expected if name.startswith(gradient_of('/'))}
    norms = {name: _norm(value) for name, value in expected.items()}
    largest = max((norms[name] for name in gradients if norms[name] < numpy.inf), default=0)
    found = {}
    for name, value in expected.items():
        other = actual.get(name)
        if other is None or other.shape != value.shape:
            continue
        are_finite = norms[name] < numpy.inf, _norm(other) < numpy.inf
        if all(are_finite):
            least = max(FLOOR[dtype], SMALL * largest) if name in gradients else FLOOR[dtype]
            found[name] = _norm(other.astype('d') - value) / max(norms[name], least)
        elif any(are_finite):
            found[name] = numpy.inf
    return found


def _norm(array):
    return float(numpy.linalg.norm(array.astype('d').ravel()))


def beyond_rounding(found, expected, run_scaled, dtype):
    """Return the errors (dict) among `found` that rounding does not explain.

    Where a maximum is tied or a sum cancels, rounding decides the result. ``run_scaled(factor)``
    returns the outcome with parameters multiplied by a factor; `expected` is the outcome for a
    factor of 1.
    """
    if not found:
        return found
    rounding = float(numpy.finfo(dtype).eps)
    others = [errors(run_scaled(1 + n * rounding), expected, dtype) for n in FACTORS]
    return {
        name: error
        for name, error in found.items()
        if error > MARGIN * max(other.get(name, 0) for other in others)
    }


def dtype_of(link):
    """Return the name of the least precise dtype in which a link computes."""
    if chainer.config.dtype is chainer.mixed16:
        return 'float16'
    dtypes = {param.dtype for param in link.params(include_uninit=False) if param.dtype.kind == 'f'}
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=numpy.dtype('f')).name


def in_short(value):
    """Return a number (float) that represents an array: its only element, or its norm."""
    return float(value.reshape(())) if value.size == 1 else _norm(value)


class _Reporter(chainer.Reporter):
    """Reporter that knows the observers of all current reporters, and accepts any other."""

    def __init__(self, observers):
        super().__init__()
        for path, link in observers.items():
            self.add_observer('main' + path.rstrip('/'), link)
        for other in chainer.reporter._get_reporters():
            self._observer_names.update(other._observer_names)

    def report(self, values, observer=None):
        # In a loop without a reporter, observers need not be registered.
        self._observer_names.setdefault(id(observer), type(observer).__name__)
        super().report(values, observer)


@contextlib.contextmanager
def _without_observers(target):
    """Remove hooks that only observe a run for a while."""
    hooks = [chainer.get_function_hooks(), chainer._get_link_hooks()]
    hooks += [link._local_link_hooks for link in target.links() if link._local_link_hooks]
    before = [(of_one, dict(of_one)) for of_one in hooks]
    try:
        for of_one, all_hooks in before:
            for name, hook in all_hooks.items():
                if _only_observes(hook):
                    del of_one[name]
        yield
    finally:
        for of_one, all_hooks in before:
            of_one.clear()
            of_one.update(all_hooks)


def _only_observes(hook):
    """Return whether a hook is one of Chainer's own that only observe a run, such as TimerHook."""
    is_of_functions = type(hook).__module__.startswith('chainer.function_hooks.')
    return is_of_functions or type(hook) is link_hooks.TimerHook


def _on_host(value):
    """Return an array, a variable or a number as a new array on the host."""
    return numpy.array(cuda.to_cpu(chainer.as_array(value)))
