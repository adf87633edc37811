"""`Snapshot`: all that a run may change, put back after it; and how two runs differ."""

import collections.abc
import contextlib
import random

import numpy

import chainer
from chainer.backends import cuda


class ParameterMissing(Exception):
    """An extra run would have made a parameter, which is left to a step of the user's."""


class Snapshot:
    """What a run of a function may change, as it is now: taken, put back, compared.

    That is Python state (see `reach.Reach`), states of random number generators, arrays in place,
    and which arrays are the gradients of parameters. `arrays` is name -> array.
    """

    def __init__(self, target, reach, has_parameters=True):
        self._reach = reach
        self._python = reach.save()
        self._copied = []  # iterators, with their copies that a run reads
        self._moved = []  # generators of random numbers, and where they were moved to
        params = {id(param): param for link in reach.links.values() for param in link.params()}
        self._lazy = [param for param in params.values() if not param.is_initialized]
        self._gradients = [(param, param._grad) for param in params.values()]
        self.arrays = arrays_of(target, reach, has_parameters)
        self._copies = Copies(self.arrays)

    def restore(self):
        """Put all of it back, but random numbers that were drawn for parameters made since."""
        self.restore_python()
        self.restore_arrays()

    def restore_python(self):
        """Put back what Python holds, but not what is in arrays."""
        were_made = any(param.is_initialized for param in self._lazy)
        self._reach.restore(self._python, with_numbers=not were_made)
        for param, gradient in self._gradients:
            param._set_grad_without_check(gradient)

    @property
    def has_lazy_parameters(self):
        """Whether there were parameters that had not been made."""
        return bool(self._lazy)

    def has_changed(self, name):
        """Return whether an array has other contents than it had (synchronises)."""
        return not has_same_bits(self.arrays[name], self._copies[name])

    def restore_arrays(self):
        """Put back what is in arrays, but not what Python holds."""
        self._copies.put_back(self.arrays)

    def changes(self):
        """Return what was assigned since, as :meth:`Reach.changes` does, gradients included."""
        new = [
            (param._set_grad_without_check, param._grad)
            for param, before in self._gradients
            if param._grad is not before
        ]
        return self._reach.changes(self._python, self._copied) + new

    def move_generators(self):
        """Draw from NumPy's and Python's generators: a run that seeds one then always shows."""
        numpy.random.random()
        random.random()
        self._moved = [(state, state.save()) for state, _ in self._python.generators]

    def changed_generator(self):
        """Return words (str or None) for a generator that was used since they were moved."""
        for state, position in self._moved:
            if state.save() != position:
                return state.text
        return None

    @contextlib.contextmanager
    def undone(self, with_caches=True):
        """Put back what is changed inside, where no parameter can be made.

        `with_caches`: caches of functools are empty inside. Otherwise they keep what is added.
        """
        try:
            for param in self._lazy:
                param.initialize = _refuse
            with _other_generators():
                self._copied = self._reach.copy_iterators(self._python, with_caches)
                yield
        finally:
            for param in self._lazy:
                vars(param).pop('initialize', None)  # there is none if an interrupt came first
            self.restore()


def _refuse(shape):
    raise ParameterMissing


class NoSnapshot:
    """Of a run that changes nothing, such as a prediction by a library's code alone."""

    arrays: dict = {}

    def restore(self):
        pass

    restore_arrays = restore

    def undone(self):
        return contextlib.nullcontext()


@contextlib.contextmanager
def _other_generators():
    """Let CuPy draw from other generators inside: the state of its own cannot be read."""
    if not cuda.available:
        yield
        return
    generators = cuda.cupy.random._generator._random_states
    before = dict(generators)
    generators.clear()
    try:
        yield
    finally:
        generators.clear()
        generators.update(before)


def arrays_of(target, reach, has_parameters=True):
    """Return name -> array: arrays that are reached; parameters and optimizer states, too."""
    arrays = dict(reach.arrays)
    named = dict(target.namedlinks())
    known = set(map(id, named.values()))
    for i, link in enumerate(reach.links.values()):
        if id(link) not in known:
            named['link %d (%s)' % (i, link.name or type(link).__name__)] = link
    for path, link in named.items():
        for name, value in vars(link).items():
            is_parameter = isinstance(value, chainer.Parameter)
            if has_parameters or not is_parameter:
                arrays['%s/%s' % (path.rstrip('/'), name)] = value.array if is_parameter else value
    for path, param in target.namedparams(include_uninit=False):
        if has_parameters and param.update_rule is not None:
            for name, value in (param.update_rule.state or {}).items():
                arrays['%s/%s' % (path, name)] = value
    kinds = chainer.get_array_types()
    return {
        name: array
        for name, array in arrays.items()
        if isinstance(array, kinds)
        and array.dtype.kind in 'biufc'
        and not (isinstance(array, numpy.ndarray) and not array.flags.writeable)
    }


def copies(arrays):
    """Return copies of the arrays, by name, each in separate memory."""
    return {name: array.copy() for name, array in arrays.items()}


class Copies(collections.abc.Mapping):
    """Copies of arrays, by name; all of one dtype in one array, which a GPU copies at once."""

    def __init__(self, arrays):
        groups = {}
        for name, array in arrays.items():
            device_id = array.data.device_id if isinstance(array, cuda.ndarray) else None
            groups.setdefault((device_id, array.dtype), {})[name] = array
        self._places = {}  # name -> (group, first element, last element and one, shape)
        self._joined = {}
        for group, members in groups.items():
            stop = 0
            flat = list(members.values())
            for name, array in members.items():
                start, stop = stop, stop + array.size
                self._places[name] = group, start, stop, array.shape
            device = chainer.backend.get_device_from_array(flat[0])
            with chainer.using_device(device):
                self._joined[group] = device.xp.concatenate([array.ravel() for array in flat])

    def __getitem__(self, name):
        group, start, stop, shape = self._places[name]
        return self._joined[group][start:stop].reshape(shape)

    def __iter__(self):
        return iter(self._places)

    def __len__(self):
        return len(self._places)

    def is_same(self, other):
        """Return whether all have the bits of other copies, of the same names. Synchronises."""
        return self._places == other._places and all(
            _has_same_bits(joined, other._joined[group]) for group, joined in self._joined.items()
        )

    def put_back(self, arrays):
        """Write the copies back into the arrays that they were made of."""
        for name, array in arrays.items():
            if not (isinstance(array, cuda.ndarray) and array.flags.c_contiguous):
                array[...] = self[name]
            elif array.size:
                # A copy by the driver takes a third of the time of a launch from Python.
                group, start, _, _ = self._places[name]
                copy = self._joined[group].data + start * array.itemsize
                array.data.copy_from_device_async(copy, array.nbytes)


def has_same_bits(actual, expected):
    """Return whether two arrays are alike to the bit (synchronises)."""
    if (
        type(actual) is not type(expected)
        or actual.dtype != expected.dtype
        or actual.shape != expected.shape
    ):
        return False
    actual, expected = (
        chainer.backend.get_array_module(array).ascontiguousarray(array).ravel()
        for array in (actual, expected)
    )
    return _has_same_bits(actual, expected)


def _has_same_bits(actual, expected):
    """Compare two one-dimensional arrays of one dtype on one device."""
    # A comparison of floats would find no NaN equal to itself, and -0 equal to 0.
    bits = 'u%d' % min(actual.itemsize, 8)
    actual, expected = actual.view(bits), expected.view(bits)
    if isinstance(actual, numpy.ndarray):
        return numpy.array_equal(actual, expected)
    with actual.device:
        differ = cuda.cupy.zeros(1, bool)
        # A reduction of CuPy would take four seconds to compile.
        kernel = cuda.elementwise(
            'T actual, T expected',
            'raw bool differ',
            'if (actual != expected) differ[0] = true',
            'bspmm_differ',
        )
        kernel(actual, expected, differ)
        return not differ.item()


def difference(arrays, values, tolerance, floor=0.0):
    """Return the first array (str or None) that differs between two runs of a step."""
    # `tolerance` is 0 for equal bits, else the largest norm of a difference, relative to the norm
    # of the values, or to `floor` if that is larger; NaN then equals NaN. Copies all to the host
    # (synchronises), unless two `Copies` are the same.
    if isinstance(arrays, Copies) and isinstance(values, Copies) and arrays.is_same(values):
        return None
    for name in {**arrays, **values}:
        if name not in arrays or name not in values:
            return '%s (only one of them has it)' % name
        actual, expected = (
            numpy.asarray(cuda.to_cpu(array)) for array in (arrays[name], values[name])
        )
        if actual.tobytes() == expected.tobytes():
            continue
        actual, expected = (numpy.asarray(array, 'd') for array in (actual, expected))
        is_same = (actual == expected) | (numpy.isnan(actual) & numpy.isnan(expected))
        with numpy.errstate(invalid='ignore'):
            error = numpy.linalg.norm(numpy.where(is_same, 0, actual - expected))
        scale = numpy.linalg.norm(expected[numpy.isfinite(expected)])
        if not tolerance or not error <= tolerance * max(scale, floor):
            return '%s (relative difference %.1e)' % (name, error / scale if scale else error)
    return None
