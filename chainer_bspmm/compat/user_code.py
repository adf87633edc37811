"""User code, told from libraries by the name of its module, and warnings that point to it."""

import functools
import os
import sys
import warnings

LIBRARIES = (
    *('chainer', 'chainerx', 'chainermn', 'chainer_chemistry', 'chainer_bspmm'),
    *('cupy', 'cupyx', 'cupy_backends'),
)
NOT_USER_CODE = {*LIBRARIES, 'numpy', 'scipy', 'six'}
# NVIDIA's packages, which CuPy calls, with their dots: a user's module may be called `cuda`.
PACKAGES = 'cuda.bindings.', 'cuda.core.', 'cuda.pathfinder.'


def is_user_code(module):
    """Return whether a module (its name or None) is neither in a library nor in Python itself."""
    module = module or ''
    package = module.partition('.')[0]
    if package in NOT_USER_CODE or (module + '.').startswith(PACKAGES):
        return False
    if package in sys.stdlib_module_names:
        return not _is_of_python(package)
    # Two invented module names are no user code either: `_cython_...`, of the class of Cython's
    # functions, and `namedtuple_...`, of the methods that Python generates for a named tuple.
    is_made = module.startswith('namedtuple_') and module not in sys.modules
    return not (is_made or module.startswith('_cython_'))


@functools.lru_cache(maxsize=None)
def _is_of_python(package):
    """Return whether a module that is named like one of Python's is Python's, not a user's file."""
    file = getattr(sys.modules.get(package), '__file__', None) or ''
    return not file.endswith('.py') or file.startswith(os.path.dirname(os.__file__) + os.sep)


def warn(text):
    """Warn, pointing to the innermost line of user code on the stack."""
    level = 1
    frame = sys._getframe()
    while frame is not None and not is_user_code(frame.f_globals.get('__name__')):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
