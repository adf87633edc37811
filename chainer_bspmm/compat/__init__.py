"""Repairs that let Chainer 7.8.1 and Chainer Chemistry 0.7.1 run on today's Python and NumPy.

Each repair is a small function for one upstream module (see ``hooks``). It runs right after that
module has been executed, now or later, so that modules that are never imported
(``chainer.testing``, ``chainermn``) cost nothing. Names that upstream needs in another module
only during an import exist only for that time (``stand_ins``); names that it reads from NumPy at
run time are visible to the upstream module only (``module_view``). NumPy itself is not changed.
"""

from chainer_bspmm.compat import imports


def apply():
    """Import Chainer and Chainer Chemistry, repaired; ImportError says what to do.

    Calling it again does nothing. Modules of theirs that are already imported are repaired in
    place; leftovers of a failed import are removed first.
    """
    imports.import_upstream()
