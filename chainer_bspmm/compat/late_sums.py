"""Repairs of Chainer's reporter: sums in float64 on a host, and without launches on a GPU."""

import functools
import itertools
import weakref

import numpy

from chainer_bspmm.compat.import_hooks import repairs

MOST = 1024  # most values that may wait

_lasting = weakref.WeakValueDictionary()  # id of an array's memory -> the array


def never_overwritten(array):
    """Promise that values in the memory of a CuPy array are not overwritten, so need no copy.

    The promise holds as long as the array exists. Its values are fetched by one copy of the whole
    array.
    """
    _lasting[id(array.data.mem)] = array


@repairs('chainer.reporter')
def summaries_add_late(module):
    """chainer/reporter.py: Summary.add launches five kernels for a value on a GPU.

    LogReport adds every reported value of every step. Here a copy of the value waits until a
    statistic is read, the summary is serialized, or MOST values wait. Then all of them are fetched
    at once and added on the host, one after the other in their own dtype. The sums are the same as
    on the device, except that the device takes numbers below 1e-38 for 0. Statistics are NumPy
    scalars, as for values on the host.
    """
    kind, cuda = module.Summary, module.chainer.backends.cuda
    add_now = kind.add
    kind._waiting = ()

    @functools.wraps(add_now)
    def add(self, value, weight=1):
        is_plain = type(weight) is int and weight == 1
        if not is_plain or not isinstance(value, cuda.ndarray) or value.dtype.kind != 'f':
            _catch_up(self, cuda)
            both = [cuda.to_cpu(x) if isinstance(x, cuda.ndarray) else x for x in (value, weight)]
            return add_now(self, *both)
        if not self._waiting:
            self._waiting = []
        table = _lasting.get(id(value.data.mem))
        if table is None:  # a model may overwrite the value in its next step
            with value.device:
                value = value.copy()
        self._waiting.append((value, table))
        if len(self._waiting) >= MOST:
            _catch_up(self, cuda)

    kind.add = add
    dict_kind = module.DictSummary
    add_dict = dict_kind.add

    @functools.wraps(add_dict)
    def add_all(self, d):
        for name, value in d.items():
            if type(value) is module.variable.Variable:
                value = value.array
            if type(value) is cuda.ndarray and not value.ndim:  # skips upstream's slower tests
                self._summaries[name].add(value)
            else:
                add_dict(self, {name: value})

    dict_kind.add = add_all
    for name in ('compute_mean', 'make_statistics', 'serialize'):
        setattr(kind, name, _up_to_date(getattr(kind, name), cuda))


@repairs('chainer.reporter')
def summaries_add_in_float64(module):
    """chainer/reporter.py: Summary adds scalars of NumPy to 0.0, which NumPy 2 does in float32.

    With NumPy 1 the sum was a float64. In float32 the mean of a long epoch loses digits, the
    difference of sums of squares that is the deviation loses nearly all, and ``json`` refuses the
    results.
    """
    kind = module.Summary
    add = kind.add

    @functools.wraps(add)
    def add_in_float64(self, value, weight=1):
        is_of_numpy = isinstance(value, numpy.generic) or type(value) is numpy.ndarray
        if is_of_numpy and not value.ndim and value.dtype.char in 'ef':
            value = numpy.float64(value)
        add(self, value, weight)

    kind.add = add_in_float64


def _up_to_date(method, cuda):
    @functools.wraps(method)
    def call(self, *args):
        _catch_up(self, cuda)
        return method(self, *args)

    return call


def _catch_up(summary, cuda):
    """Add the waiting values (synchronises with their device)."""
    waiting, summary._waiting = summary._waiting, ()
    if waiting:
        for _, values in itertools.groupby(_fetched(waiting, cuda), lambda value: value.dtype):
            array = numpy.array(list(values))
            summary._x = _sum(summary._x, array)
            summary._x2 = _sum(summary._x2, array * array)
            summary._n += len(array)


def _fetched(waiting, cuda):
    """Fetch the values as NumPy scalars, with one copy for each table."""
    results = [None] * len(waiting)
    others = []  # places of values that are in no table
    places_in = {}  # (table, dtype) -> places of its values
    for i, (value, table) in enumerate(waiting):
        if table is None:
            others.append(i)
        else:
            places_in.setdefault((id(table), value.dtype), []).append(i)

    for (_, dtype), places in places_in.items():
        table = waiting[places[0]][1]
        with table.device:
            start = table.data.ptr
            numbers = table.get().view(numpy.uint8).ravel()
        firsts = numpy.array([waiting[i][0].data.ptr - start for i in places])
        numbers = numbers[firsts[:, None] + numpy.arange(dtype.itemsize)].view(dtype)
        for i, number in zip(places, numbers[:, 0]):
            results[i] = number

    kinds = itertools.groupby(others, lambda i: (waiting[i][0].device, waiting[i][0].dtype))
    for (device, _), places in kinds:
        places = list(places)
        with device:
            numbers = cuda.cupy.stack([waiting[i][0] for i in places]).get()
        for i, number in zip(places, numbers):
            results[i] = number
    return results


def _sum(start, values):
    """Return start + values[0] + values[1] + ..., rounded after each."""
    is_number = type(start) in (int, float)  # has no dtype, such as the 0.0 of a new summary
    dtype = values.dtype if is_number else numpy.promote_types(start.dtype, values.dtype)
    return numpy.add.accumulate(numpy.append(start, values).astype(dtype))[-1]
