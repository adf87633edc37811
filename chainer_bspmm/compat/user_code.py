"""User code, told from libraries by the name of its module, and warnings that point to it."""

import sys
import warnings

LIBRARIES = (
    *('chainer', 'chainerx', 'chainermn', 'chainer_chemistry', 'chainer_bspmm'),
    *('cupy', 'cupy_backends'),
)
NOT_USER_CODE = sys.stdlib_module_names | {*LIBRARIES, 'numpy', 'scipy'}
# Modules of named tuples, one for each class, and of the class of all functions in Cython.
GENERATED = 'namedtuple_', '_cython_'


def is_user_code(module):
    """Return whether a module (its name or None) is neither in a library nor in Python itself."""
    package = (module or '').partition('.')[0]
    return package not in NOT_USER_CODE and not package.startswith(GENERATED)


def warn(text):
    """Warn, pointing to the innermost line of user code on the stack."""
    level = 1
    frame = sys._getframe()
    while frame is not None and not is_user_code(frame.f_globals.get('__name__')):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
