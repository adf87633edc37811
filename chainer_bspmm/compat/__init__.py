"""Repairs that let Chainer 7.8.1 and Chainer Chemistry 0.7.1 run on today's Python and NumPy.

Each repair is a small function for one upstream module (see ``import_hooks``). It runs right after
that module has been executed, now or later, so that modules that are never imported
(``chainer.testing``, ``chainermn``) cost nothing. Names that upstream needs in another module only
during an import exist only for that time (``stand_ins``); names that it reads from NumPy at run
time are visible to the upstream module only (``module_view``). NumPy itself is not changed.
"""

from chainer_bspmm.compat.imports import import_upstream as apply  # noqa: F401
