"""Import of the two upstream packages with every repair in place."""

import importlib
import importlib.util
import sys

# These modules fill the table of repairs when they are imported.
from chainer_bspmm.compat import chainer_repairs  # noqa: F401
from chainer_bspmm.compat import chainermn_repairs  # noqa: F401
from chainer_bspmm.compat import chemistry_repairs  # noqa: F401
from chainer_bspmm.compat import imported_later  # noqa: F401
from chainer_bspmm.compat import late_sums  # noqa: F401
from chainer_bspmm.compat import stand_ins  # noqa: F401
from chainer_bspmm.compat import import_hooks

_INSTALL_CHAINER = (
    'chainer_bspmm needs Chainer, which is not installed. Its source package does not build with '
    'setuptools 82 or later. Install it with:\n'
    "    pip install 'setuptools<81' wheel\n"
    '    pip install --no-build-isolation chainer==7.8.1'
)
_INSTALL_CHEMISTRY = (
    'chainer_bspmm needs Chainer Chemistry, which is not installed. Install it with:\n'
    '    pip install chainer-chemistry==0.7.1'
)
_RESTART = (
    '{name} could not be imported: {error!r}. If {name} was imported before chainer_bspmm in this '
    'process, restart Python and import chainer_bspmm first; it was written for Chainer 7.8.1 and '
    'Chainer Chemistry 0.7.1.'
)


def _purge_leftovers(package, dependents):
    """Remove the modules of a package whose import has failed."""
    # Python removes the package itself but keeps its modules that were imported; a second import
    # would mix them with new ones.
    are_left = any(name.startswith(package + '.') for name in sys.modules)
    if are_left and package not in sys.modules:
        for name in list(sys.modules):
            if name.split('.')[0] in dependents:
                del sys.modules[name]


def _import(name, when_absent):
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ImportError(when_absent, name=name)
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ImportError(_RESTART.format(name=name, error=error), name=name) from error


_is_done = False


def import_upstream():
    """Import Chainer and Chainer Chemistry, repaired; ImportError says what to do.

    Modules of both that were imported before are repaired in place. Leftovers of a failed import
    are removed first.
    """
    global _is_done
    if _is_done:
        return
    _purge_leftovers('chainer', ('chainer', 'chainerx', 'chainermn', 'chainer_chemistry'))
    _purge_leftovers('chainer_chemistry', ('chainer_chemistry',))
    try:
        import_hooks.install()
        _import('chainer', _INSTALL_CHAINER)
        _import('chainer_chemistry', _INSTALL_CHEMISTRY)
    except ImportError:
        import_hooks.uninstall()
        raise
    _is_done = True
