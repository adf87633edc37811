"""All arrays that a training step changes: copied, restored and compared."""

import collections.abc
import contextlib
import itertools

import numpy

import chainer
from chainer.backends import cuda


def state_arrays(optimizer, owners=()):
    """Return name -> array: parameters, optimizer states, and arrays that are attributes."""
    arrays = {}
    kinds = chainer.get_array_types()
    named = dict(optimizer.target.namedlinks())
    known = set(map(id, named.values()))
    for i, owner in enumerate(owners):
        if id(owner) not in known:
            name = getattr(owner, 'name', None) or type(owner).__name__
            named['object %d (%s)' % (i, name)] = owner
    for path, owner in named.items():
        for name, value in vars(owner).items():
            arrays['%s/%s' % (path.rstrip('/'), name)] = value
    for path, param in optimizer.target.namedparams(include_uninit=False):
        arrays[path] = param.array
        if param.update_rule is not None:
            for name, value in (param.update_rule.state or {}).items():
                arrays['%s/%s' % (path, name)] = value
    return {
        name: array
        for name, array in arrays.items()
        if isinstance(array, kinds)
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


@contextlib.contextmanager
def attributes_kept(owners):
    """Put back attributes that are replaced inside, such as running statistics."""
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for now, values in before:
            now.update(values)


@contextlib.contextmanager
def untouched(owners, params):
    """Undo what is done inside to attributes of links and objects, and make no parameters."""
    # For a capture that is dropped: what it assigns is memory that nothing has written to. New
    # attributes go, and sets, lists and dicts get back their entries.
    kinds = set, list, dict
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    values = itertools.chain.from_iterable(attributes.values() for _, attributes in before)
    containers = [(value, value.copy()) for value in values if type(value) in kinds]
    lazy = [param for param in params if not param.is_initialized]
    for param in lazy:
        param.initialize = _refuse
    try:
        yield
    finally:
        for param in lazy:
            del param.initialize
        for now, attributes in before:
            now.clear()
            now.update(attributes)
        for container, entries in containers:
            container.clear()
            getattr(container, 'extend' if type(container) is list else 'update')(entries)


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


def _refuse(shape):
    raise RuntimeError('a parameter would be made in a capture')


def difference(arrays, values, tolerance):
    """Return the first array (str or None) that differs between two runs of a step."""
    # `tolerance` is 0 for equal bits, else the largest relative norm of a difference; NaN then
    # equals NaN. Copies all to the host (synchronises), unless two `Copies` are the same.
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
        if not tolerance or not error <= tolerance * scale:
            return '%s (relative difference %.1e)' % (name, error / scale if scale else error)
    return None
