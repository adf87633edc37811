"""All arrays that a training step changes: copied, restored and compared."""

import contextlib

import numpy

import chainer
from chainer.backends import cuda


def state_arrays(optimizer, owners=()):
    """Return name -> array: parameters, optimizer states, and arrays that are attributes.

    Args:
        owners (sequence): links and objects whose attributes count, as the target's links' do.
    """
    arrays = {}
    for path, owner in _named(optimizer.target, owners).items():
        for name, value in sorted(vars(owner).items()):
            arrays['%s/%s' % (path.rstrip('/'), name)] = value
    for path, param in optimizer.target.namedparams(include_uninit=False):
        arrays[path] = param.array
        if param.update_rule is not None:
            for name, value in (param.update_rule.state or {}).items():
                arrays['%s/%s' % (path, name)] = value
    return {
        name: array
        for name, array in arrays.items()
        if isinstance(array, chainer.get_array_types())
        and not (isinstance(array, numpy.ndarray) and not array.flags.writeable)
    }


def _named(target, owners):
    """Return path -> link or object; those that are not links of the target are numbered."""
    named = dict(target.namedlinks())
    known = set(map(id, named.values()))
    named.update(
        ('object %d (%s)' % (i, getattr(owner, 'name', None) or type(owner).__name__), owner)
        for i, owner in enumerate(owners)
        if id(owner) not in known
    )
    return named


def copies(arrays):
    """Return copies of the arrays, by name."""
    return {name: array.copy() for name, array in arrays.items()}


def put_back(arrays, values):
    """Write values of :func:`copies` back into the arrays."""
    for name, array in arrays.items():
        array[...] = values[name]


@contextlib.contextmanager
def attributes_kept(owners):
    """Put back attributes of links and objects that are replaced inside.

    Running statistics that a trial step creates are reset.
    """
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for now, values in before:
            now.update(values)


def difference(arrays, values, tolerance):
    """Return the first array (str or None) that differs between two runs of a step.

    NaN is equal to NaN unless the tolerance is 0.

    Args:
        arrays, values (dict): name -> array or number.
        tolerance (float): 0 for equal bits; else the largest norm of the difference relative to
            that of the value.

    Note:
        Copies to the host (synchronises).
    """
    for name in {**arrays, **values}:
        if name not in arrays or name not in values:
            return '%s (only one of them has it)' % name
        found, expected = (
            numpy.asarray(cuda.to_cpu(array)) for array in (arrays[name], values[name])
        )
        if found.tobytes() == expected.tobytes():
            continue
        found, expected = (numpy.asarray(array, 'd') for array in (found, expected))
        is_same = (found == expected) | (numpy.isnan(found) & numpy.isnan(expected))
        with numpy.errstate(invalid='ignore'):
            error = numpy.linalg.norm(numpy.where(is_same, 0, found - expected))
        scale = numpy.linalg.norm(expected[numpy.isfinite(expected)])
        if not tolerance or not error <= tolerance * scale:
            return '%s (relative difference %.1e)' % (name, error / scale if scale else error)
    return None
