"""A repair of Chainer's reporter: sums of values on a GPU without kernels for every value."""

import functools
import itertools
import weakref

import numpy

from chainer_bspmm.compat.hooks import repairs

MOST = 1024  # values that wait

_lasting = weakref.WeakValueDictionary()  # id of its memory -> array


def never_overwritten(array):
    """Promise that values in the memory of a CuPy array last: while they wait, no copy is needed.

    Holds for as long as the array exists.
    """
    _lasting[id(array.data.mem)] = array


@repairs('chainer.reporter')
def summaries_add_late(module):
    """chainer/reporter.py: Summary.add launches five kernels for a value on a GPU.

    LogReport adds every reported value of every step. A copy of it waits instead, until a
    statistic is asked for, the summary is serialized, or there are MOST: then all are fetched at
    once and added on the host, one after the other in the type that they have. These are the
    numbers that the device would give (it takes numbers below 1e-38 for 0). Statistics are NumPy
    scalars, as they are for values on the host.
    """
    kind, cuda = module.Summary, module.chainer.backends.cuda
    add_now = kind.add
    kind._waiting = ()

    @functools.wraps(add_now)
    def add(self, value, weight=1):
        if not isinstance(value, cuda.ndarray) and not isinstance(weight, cuda.ndarray):
            if self._waiting:
                _catch_up(self, cuda)
            add_now(self, value, weight)
        elif type(weight) is int and weight == 1 and value.dtype.kind == 'f':
            if not self._waiting:
                self._waiting = []
            if id(value.data.mem) not in _lasting:  # a model may write to its own at every step
                with value.device:
                    value = value.copy()
            self._waiting.append(value)
            if len(self._waiting) >= MOST:
                _catch_up(self, cuda)
        else:
            _catch_up(self, cuda)
            value, weight = (
                cuda.to_cpu(x) if isinstance(x, cuda.ndarray) else x for x in (value, weight)
            )
            add_now(self, value, weight)

    kind.add = add
    for name in ('compute_mean', 'make_statistics', 'serialize'):
        setattr(kind, name, _up_to_date(getattr(kind, name), cuda))


def _up_to_date(method, cuda):
    @functools.wraps(method)
    def call(self, *args):
        _catch_up(self, cuda)
        return method(self, *args)

    return call


def _catch_up(summary, cuda):
    """Add the values that wait (synchronises with their device)."""
    waiting, summary._waiting = summary._waiting, ()
    for device, values in itertools.groupby(waiting, lambda value: value.device):
        with device:
            values = [cuda.cupy.stack(list(same)).get() for _, same in _by_dtype(values)]
        for array in values:
            summary._x = _sum(summary._x, array)
            summary._x2 = _sum(summary._x2, array * array)
            summary._n += len(array)


def _by_dtype(values):
    return itertools.groupby(values, lambda value: value.dtype)


def _sum(start, values):
    """Return start + values[0] + values[1] + ..., rounded after each."""
    is_number = type(start) in (int, float)  # without a type, such as the 0.0 of a new summary
    dtype = values.dtype if is_number else numpy.promote_types(start.dtype, values.dtype)
    return numpy.add.accumulate(numpy.append(start, values).astype(dtype))[-1]
