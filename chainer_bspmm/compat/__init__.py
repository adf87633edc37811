"""Repairs that let Chainer 7.8.1 and Chainer Chemistry 0.7.1 run on today's Python and NumPy.

Each repair is a small function for one upstream module (see ``import_hooks``). It runs right after
that module has been executed, now or later, so that modules that are never imported
(``chainer.testing``, ``chainermn``) cost nothing. Some names have to be in other modules while
upstream is imported; they are there only during that import (``stand_ins``). Names that upstream
reads from NumPy at run time are visible to that upstream module only (``module_view``). NumPy
itself is not changed.
"""

from chainer_bspmm.compat.imports import import_upstream as apply  # noqa: F401
