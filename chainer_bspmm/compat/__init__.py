"""Repairs that let Chainer 7.8.1 and Chainer Chemistry 0.7.1 run on today's Python and NumPy.

Each repair is one small function bound to the upstream module it is for (see ``hooks``). It
runs right after that module has been executed, whether that is now or later, so that modules
nobody imports (``chainer.testing``, ``chainermn``) cost nothing. Names that upstream expects in
a foreign module only while it is being imported exist only for that time (``stand_ins``); names
that it reads from NumPy at run time are given to the upstream module alone (``module_view``).
NumPy itself is left as it is.
"""

from chainer_bspmm.compat import imports


def apply():
    """Import Chainer and Chainer Chemistry, repaired.

    Calling it again does nothing. Modules of theirs that are already imported are repaired in
    place; leftovers of an import of theirs that failed are removed first.

    Raises:
        ImportError: If one of the two is missing or cannot be imported. The message says what
            to do.
    """
    imports.import_upstream()
