"""Base class of links of Chainer Chemistry that compute on sparse batches."""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import chainer

from chainer_bspmm.links import inner


class Sparse:
    """Base of the links and models that replace Chainer Chemistry's.

    Each is a subclass of the class it replaces, `upstream`, with another `forward`: constructor,
    attributes, parameter paths and snapshots are upstream's, and assigning ``__class__`` turns an
    object of one into the other (`sparsify`, `densify`). `parts` names attributes whose link, or
    each link of whose list, is swapped with its owner, and the classes that it may have.
    `inner_layers` names those that are not called, and the classes that are known (`links.inner`).

    All of them take batches in three layouts, and rows are nodes to them. **Folded**
    (``chainer_bspmm.concat_mols``): the nodes of every graph, and one more for all of its phantom
    atoms, which counts as often as there are (``adj.row_weights``); the result is what upstream
    gives for the padded batch, phantom atoms included, unless ``is_real_node`` leaves them out.
    **Padded** (``CSRConverter('padded')``): every graph has as many rows as the largest one; the
    result is the same. **Packed** (``CSRConverter('packed')``): no phantom atoms; the result for a
    graph is what upstream gives for it alone.
    """

    upstream: Any = None
    parts: dict[str, tuple[type[Sparse], ...]] = {}
    inner_layers: dict[str, tuple[type, ...]] = {}

    if TYPE_CHECKING:  # other attributes are those of `upstream`

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        upstream = cls.__bases__[-1]
        if not upstream.__module__.startswith('chainer_chemistry.'):
            return  # common code of several links, or a user's subclass

        @functools.wraps(upstream.__init__)
        def __init__(self, *args, **kwargs):
            upstream.__init__(self, *args, **kwargs)
            for link, kind in cls.swaps(self)[1:]:
                link.__class__ = kind

        cls.upstream = upstream
        cls.__init__ = __init__
        inner.remember(upstream, cls)

    # Upstream's classes define __call__. Chainer's runs hooks and `forward`.
    __call__ = chainer.Link.__call__

    @staticmethod
    def check(link: chainer.Link) -> None:
        """Raise ValueError if the options of a link, upstream's or ours, have no sparse form."""

    @classmethod
    def swaps(cls, link: chainer.Link) -> list[tuple[chainer.Link, type]]:
        """Return the link and its parts, each with its sparse class, after a check of all.

        Parts that are sparse already are checked as well, and those of theirs that are not
        returned. If one has no sparse form, ValueError names its path first.
        """
        cls.check(link)
        if 'upstream' in vars(cls) and type(link) in (cls, cls.upstream):  # not a user's subclass
            inner.check_layers(link, cls.inner_layers)
        pairs: list[tuple[chainer.Link, type]] = [(link, cls)]
        for name, kinds in cls.parts.items():
            held = getattr(link, name)
            is_list = isinstance(held, chainer.ChainList)
            for part in held if is_list else [held]:
                path = '%s.%s' % (name, part.name) if is_list else name
                pairs += swaps_at(path, part, kinds)
        return pairs


def swaps_at(path: str, link: chainer.Link, kinds: tuple[type[Sparse], ...]):
    """Return :meth:`Sparse.swaps` of a link at a path; it must be of one of the sparse classes."""
    for kind in kinds:
        if isinstance(link, kind) or type(link) is kind.upstream:
            inner.refuse_patched(path, link, kind.upstream)
            own = type(link) if isinstance(link, kind) else kind
            try:
                pairs = own.swaps(link)
            except ValueError as error:
                raise ValueError('%s.%s' % (path, error)) from None
            return pairs[1:] if isinstance(link, kind) else pairs
    text = "%s: expected Chainer Chemistry's %s, got %r"
    raise ValueError(text % (path, ' or '.join(kind.__name__ for kind in kinds), link))
