"""All arrays that a training step changes: to be kept, put back and compared."""
import numpy

import chainer
from chainer.backends import cuda


def state_arrays(optimizer):
    """Return name -> array: parameters, persistent values, optimizer states of the target link."""
    arrays = {}
    for path, link in optimizer.target.namedlinks():
        for name in sorted(link._persistent):
            arrays['%s/%s' % (path.rstrip('/'), name)] = getattr(link, name)
    for path, param in optimizer.target.namedparams(include_uninit=False):
        arrays[path] = param.array
        if param.update_rule is not None:
            for name, value in (param.update_rule.state or {}).items():
                arrays['%s/%s' % (path, name)] = value
    return {name: array for name, array in arrays.items()
            if isinstance(array, chainer.get_array_types())}


def copies(arrays):
    """Return the arrays' values as they are now, in memory of their own."""
    return {name: array.copy() for name, array in arrays.items()}


def put_back(arrays, values):
    """Write values of :func:`copies` back into the arrays."""
    for name, array in arrays.items():
        array[...] = values[name]


def difference(arrays, values, tolerance):
    """Return the first array (str or None) that is not what another run of the step made of it.

    Args:
        arrays, values (dict): name -> array.
        tolerance (float): 0 for equal bits; else the largest norm of the difference relative to
            that of the value.

    Note:
        Copies to the host (synchronises).
    """
    for name, array in arrays.items():
        found, expected = cuda.to_cpu(array), cuda.to_cpu(values[name])
        if found.tobytes() == expected.tobytes():
            continue
        error = numpy.linalg.norm(numpy.asarray(found - expected, 'd'))
        scale = numpy.linalg.norm(numpy.asarray(expected, 'd'))
        if not tolerance or not error <= tolerance * scale:
            return '%s (relative difference %.1e)' % (name, error / scale if scale else error)
    return None
