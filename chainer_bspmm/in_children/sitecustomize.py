"""Repair Chainer in the interpreters that a script under ``python -m chainer_bspmm run`` starts.

The command puts this folder on PYTHONPATH, which these interpreters inherit, so that they import
this module as they start. It has to run on every Python that such a script may start, old ones too.
An interpreter of another environment is left alone, and in one that does not import Chainer nothing
more happens.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))


class RepairedChainer:
    """Finder that imports chainer_bspmm before the first of Chainer's packages."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ('chainer', 'chainer_chemistry', 'chainermn'):
            return None
        import importlib.util

        sys.meta_path.remove(RepairedChainer)
        if 'chainer_bspmm' not in sys.modules:
            if importlib.util.find_spec('chainer_bspmm') is None:
                # The command has found the package in its current folder.
                sys.path.append(os.path.dirname(os.path.dirname(FOLDER)))
            import chainer_bspmm.run_script  # noqa: F401  imports Chainer
        # Python expects that sys.modules does not contain the module that it is about to import.
        module = sys.modules.pop(name, None)
        if module is None:
            return importlib.util.find_spec(name)  # chainer_bspmm has added a finder
        return importlib.util.spec_from_loader(name, Imported(module))


class Imported:
    """Loader of a module that was imported while a finder was looking for it."""

    def __init__(self, module):
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec


sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
if os.environ.get('CHAINER_BSPMM_RUN') == sys.prefix:
    sys.meta_path.insert(0, RepairedChainer)
# Import the sitecustomize that Python would have imported without this folder, if there is one.
this = sys.modules.pop(__name__)
try:
    import sitecustomize  # noqa: F401
except ImportError as error:
    if getattr(error, 'name', __name__) != __name__:
        raise
    sys.modules[__name__] = this
