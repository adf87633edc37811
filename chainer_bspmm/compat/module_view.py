"""A view of a module of another package, for one upstream module."""

import types

import numpy

_NUMPY_MAJOR = int(numpy.__version__.split('.')[0])


class ModuleView(types.ModuleType):
    """A module with some names added or replaced; all others are read from the original."""

    def __init__(self, module, **names):
        super().__init__(module.__name__)
        self.__dict__.update(names, _original=module)

    def __getattr__(self, name):
        return getattr(self._original, name)


def _in1d(ar1, ar2, assume_unique=False, invert=False):
    # in1d always returned one dimension; isin keeps the shape of its first argument.
    return numpy.isin(ar1, ar2, assume_unique=assume_unique, invert=invert).ravel()


_LOST_NAMES = {
    'bool': bool,
    'float': float,
    'in1d': _in1d,
    'int': int,
    'sctypes': {
        'int': [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
        'float': [numpy.float16, numpy.float32, numpy.float64, numpy.longdouble],
    },
}


def lost_numpy_names(*names):
    """Return {name: former value} for each of the names that NumPy has removed or deprecated."""
    # ``vars`` does not list the aliases that NumPy 1.20-1.23 serve with a warning, and does not
    # trigger that warning either. in1d is still listed, deprecated, in NumPy 2.0-2.3.
    lost = (_LOST_NAMES.keys() - vars(numpy).keys()) | ({'in1d'} if _NUMPY_MAJOR >= 2 else set())
    return {name: _LOST_NAMES[name] for name in names if name in lost}


def give_back_numpy_names(module, alias, *names):
    """Give lost names of NumPy back to a single upstream module, which calls NumPy `alias`.

    The module must not compare NumPy by identity.
    """
    lost = lost_numpy_names(*names)
    if lost:
        setattr(module, alias, ModuleView(getattr(module, alias), **lost))
