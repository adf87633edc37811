"""User code, told from libraries by the name of its module, and warnings that point to it."""

import sys
import warnings

LIBRARIES = (
    *('chainer', 'chainerx', 'chainermn', 'chainer_chemistry', 'chainer_bspmm'),
    *('cupy', 'cupyx', 'cupy_backends'),
)
NOT_USER_CODE = sys.stdlib_module_names | {*LIBRARIES, 'numpy', 'scipy', 'six'}
BEGINNINGS = (
    # Modules of named tuples, one for each class, and of the class of all functions in Cython.
    *('namedtuple_', '_cython_'),
    # NVIDIA's packages, which CuPy calls. A module of a user's may have their common name, `cuda`.
    *('cuda.bindings', 'cuda.core', 'cuda.pathfinder'),
)


def is_user_code(module):
    """Return whether a module (its name or None) is neither in a library nor in Python itself."""
    module = module or ''
    return module.partition('.')[0] not in NOT_USER_CODE and not module.startswith(BEGINNINGS)


def warn(text):
    """Warn, pointing to the innermost line of user code on the stack."""
    level = 1
    frame = sys._getframe()
    while frame is not None and not is_user_code(frame.f_globals.get('__name__')):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
