"""`Snapshot`: the state that a run may change, put back after it; differences between runs."""

import collections.abc
import contextlib
import random

import numpy

import chainer
from chainer.backends import cuda


_EXACT = numpy.ndarray, numpy.memmap, cuda.ndarray


class ParameterMissing(Exception):
    """An extra run would have made a parameter, which only a user's own step may do."""


class Snapshot:
    """State that a run of a function may change, at one moment, to be put back or compared.

    It consists of Python state (see `reach.Reach`), states of random number generators, contents of
    arrays, and the gradient arrays of parameters. `arrays` is name -> array.

    Args:
        target (Link): the link that is trained or predicts.
        reach (Reach): the state that the function can reach.
        has_parameters (bool): whether `arrays` has the parameters and the optimizer's states.
        has_user_code (bool): whether the run may make other objects than arrays reachable. A
            library's code keeps arrays in attributes of links only.
    """

    def __init__(self, target, reach, has_parameters=True, has_user_code=True):
        self._target = target
        self._has_user_code = has_user_code
        self._has_parameters = has_parameters
        self._reach = reach
        self._python = reach.save()
        self._copied = []  # (copy, iterator): copies from which a run reads
        self._moved = []  # (generator of random numbers, position to which it was moved)
        params = {id(param): param for link in reach.links.values() for param in link.params()}
        self._lazy = [param for param in params.values() if not param.is_initialized]
        self._gradients = [(param, param._grad) for param in params.values()]
        self.arrays = arrays_of(target, reach, has_parameters)
        self._copies = Copies(self.arrays)

    def restore(self, with_numbers=True):
        """Put everything back.

        `with_numbers`: also positions of generators of random numbers, unless parameters were made
        since. Without them a second run draws other numbers than the first.
        """
        self.restore_python(with_numbers)
        self.restore_arrays()

    def restore_python(self, with_numbers=True):
        """Put Python state back, but not the contents of arrays; see :meth:`restore`."""
        were_made = any(param.is_initialized for param in self._lazy)
        self._reach.restore(self._python, with_numbers=with_numbers and not were_made)
        for param, gradient in self._gradients:
            param._set_grad_without_check(gradient)

    @property
    def has_lazy_parameters(self):
        """Whether there were parameters that had not been made yet."""
        return bool(self._lazy)

    def has_changed(self, name):
        """Return whether the contents of an array have changed (synchronises)."""
        return not has_same_bits(self.arrays[name], self._copies[name])

    def restore_arrays(self):
        """Put the contents of arrays back, but not Python state."""
        self._copies.put_back(self.arrays)

    def arrays_now(self):
        """Return the current arrays by the same names; for one that is gone, the saved array."""
        reach = self._reach.anew() if self._has_user_code else self._reach
        now = arrays_of(self._target, reach, self._has_parameters)
        return {name: now.get(name, array) for name, array in self.arrays.items()}

    def lasting_arrays(self):
        """Return the arrays (list) that are still where they were."""
        now = self.arrays_now()
        return [array for name, array in self.arrays.items() if now[name] is array]

    def is_known(self, thing):
        """Return whether an object was there before, and could be reached."""
        return self._reach.follows(thing)

    def changes(self):
        """Return the assignments since then, also of gradients, in the form of `Reach.changes`."""
        params = [param for param, before in self._gradients if param._grad is not before]
        new = [param._grad for param in params]
        gradients = [(_Gradients(params), new)] if params else []
        return self._reach.changes(self._python, self._copied) + gradients

    def assignments(self):
        """Return :meth:`changes` without gradients, and without putting any iterator back."""
        return self._reach.changes(self._python)

    def move_generators(self):
        """Draw from NumPy's and Python's generators, so that a run that seeds one is noticed."""
        numpy.random.random()
        random.random()
        self._moved = [(state, state.save()) for state, _ in self._python.generators]

    def changed_generator(self):
        """Return words (str or None) for a generator used since :meth:`move_generators`."""
        for state, position in self._moved:
            if state.save() != position:
                return state.text
        return None

    @contextlib.contextmanager
    def undone(self, with_caches=True):
        """Context whose changes are undone at its end, and in which no parameter can be made.

        `with_caches`: caches of functools are empty inside. Otherwise new entries stay in them.
        """
        try:
            for param in self._lazy:
                param.initialize = _refuse
            with _other_generators():
                self._copied = self._reach.copy_iterators(self._python, with_caches)
                yield
        finally:
            for param in self._lazy:
                vars(param).pop('initialize', None)  # an interrupt may have come before it was set
            self.restore()


class _Gradients:
    """Place of the gradient arrays of parameters; changes are lists of one for each parameter."""

    def __init__(self, params):
        self._params = params

    def apply(self, changes):
        for param, gradient in zip(self._params, changes):
            param._set_grad_without_check(gradient)

    def present(self, changes):
        return [param._grad for param in self._params]


def _refuse(shape):
    raise ParameterMissing


class NoSnapshot:
    """Snapshot for a run that changes nothing, such as a prediction by a library's code alone."""

    arrays: dict = {}

    def arrays_now(self):
        return {}

    def restore(self):
        pass

    restore_arrays = restore

    def undone(self):
        return contextlib.nullcontext()


@contextlib.contextmanager
def _other_generators():
    """Context in which CuPy draws from other generators: the state of its own cannot be read."""
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
    """Return name -> array for arrays within reach, and parameters and optimizer states."""
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
        if isinstance(array, kinds) and can_be_kept(array) and not _is_constant(array)
    }


def can_be_kept(array):
    """Return whether an array's contents can be put back, or no run can change them.

    Arrays of subclasses may have more than these contents, such as a mask, and arrays of objects
    have references only.
    """
    return (type(array) in _EXACT or _is_constant(array)) and not array.dtype.hasobject


def _is_constant(array):
    return isinstance(array, numpy.ndarray) and not array.flags.writeable


def copies(arrays):
    """Return copies of the arrays, by name, each in separate memory."""
    return {name: array.copy() for name, array in arrays.items()}


class Copies(collections.abc.Mapping):
    """Copies of arrays, by name. Arrays of one dtype are joined, and copied in one launch."""

    def __init__(self, arrays):
        groups = {}
        for name, array in arrays.items():
            device_id = array.data.device_id if isinstance(array, cuda.ndarray) else None
            groups.setdefault((device_id, array.dtype), {})[name] = array
        self._places = {}  # name -> (group, first element, end, shape)
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
        """Return whether other copies have the same names and the same bits (synchronises)."""
        return self._places == other._places and all(
            _has_same_bits(joined, other._joined[group]) for group, joined in self._joined.items()
        )

    def put_back(self, arrays):
        """Write the copies back to the arrays from which they were made."""
        for name, array in arrays.items():
            if isinstance(array, numpy.ndarray):
                if not has_same_bits(numpy.asarray(array), self[name]):
                    array[...] = self[name]
            elif not (isinstance(array, cuda.ndarray) and array.flags.c_contiguous):
                array[...] = self[name]
            elif array.size:
                # A copy by CUDA's driver takes a third of the time of a launch from Python.
                group, start, _, _ = self._places[name]
                copy = self._joined[group].data + start * array.itemsize
                array.data.copy_from_device_async(copy, array.nbytes)


def has_same_bits(actual, expected):
    """Return whether two arrays are equal bit for bit (synchronises)."""
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
    """Compare two one-dimensional arrays of one dtype on one device, bit for bit."""
    if actual.dtype.kind not in 'biufc':  # such as text, which is on the host
        return actual.tobytes() == expected.tobytes()
    # Compared as floats, NaN would differ from itself, and -0 would equal 0.
    bits = 'u%d' % min(actual.itemsize, 8)
    actual, expected = actual.view(bits), expected.view(bits)
    if isinstance(actual, numpy.ndarray):
        return numpy.array_equal(actual, expected)
    with actual.device:
        differ = cuda.cupy.zeros(1, bool)
        # This is not a reduction, because CuPy takes four seconds to compile one.
        kernel = cuda.elementwise(
            'T actual, T expected',
            'raw bool differ',
            'if (actual != expected) differ[0] = true',
            'bspmm_differ',
        )
        kernel(actual, expected, differ)
        return not differ.item()


def difference(arrays, values, tolerance, floor=0.0):
    """Return the name of the first array that differs between two runs, and how (str or None).

    With a `tolerance` of 0 all bits must be equal. Otherwise it bounds the norm of the difference,
    relative to the norm of the values, or to `floor` if that is larger; NaN then equals NaN. All
    arrays are copied to the host (synchronises), unless two `Copies` are the same.
    """
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
        if actual.dtype.kind not in 'biufc':
            return name
        actual, expected = (numpy.asarray(array, 'd') for array in (actual, expected))
        is_same = (actual == expected) | (numpy.isnan(actual) & numpy.isnan(expected))
        with numpy.errstate(invalid='ignore'):
            error = numpy.linalg.norm(numpy.where(is_same, 0, actual - expected))
        scale = numpy.linalg.norm(expected[numpy.isfinite(expected)])
        if not tolerance or not error <= tolerance * max(scale, floor):
            if numpy.isnan(error):
                return '%s (one of them is not finite)' % name
            return '%s (relative difference %.1e)' % (name, error / scale if scale else error)
    return None
