"""Base class of links of Chainer Chemistry that compute on sparse batches."""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import chainer

from chainer_bspmm.links import inner


class Sparse:
    """Base of the links and models that replace Chainer Chemistry's.

    Each is a subclass of the class that it replaces, `upstream`, with another `forward`.
    Constructor, attributes, parameter paths and snapshots are upstream's, and assigning
    ``__class__`` turns an object of one class into the other (`sparsify`, `densify`).

    - `parts`: attributes that hold a link, or a list of links, to be swapped together with their
      owner, and the classes that these links may have.
    - `inner_layers`: attributes whose links are not called, and their known classes
      (`links.inner`).

    All of them take batches in three layouts, and treat each row as a node.

    - **Folded** (``chainer_bspmm.concat_mols``): a graph has its nodes, and one more row for all of
      its phantom atoms, which counts as often as there are phantom atoms (``adj.row_weights``). The
      result equals upstream's for the padded batch, phantom atoms included, unless
      ``is_real_node`` leaves them out.
    - **Padded** (``CSRConverter('padded')``): every graph has as many rows as the largest one. The
      result is the same.
    - **Packed** (``CSRConverter('packed')``): there are no phantom atoms. The result for a graph
      equals upstream's for this graph alone.
    """

    upstream: Any = None
    parts: dict[str, tuple[type[Sparse], ...]] = {}
    inner_layers: dict[str, tuple[type, ...]] = {}

    if TYPE_CHECKING:  # all other attributes come from `upstream`

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        upstream = cls.__bases__[-1]
        if not upstream.__module__.startswith('chainer_chemistry.'):
            return  # it is common code of several links, or a user's subclass

        @functools.wraps(upstream.__init__)
        def __init__(self, *args, **kwargs):
            upstream.__init__(self, *args, **kwargs)
            for link, kind in cls.swaps(self)[1:]:
                link.__class__ = kind

        cls.upstream = upstream
        cls.__init__ = __init__
        inner.remember(upstream, cls)

    # Upstream's classes override __call__; Chainer's is needed, which runs hooks and `forward`.
    __call__ = chainer.Link.__call__

    @staticmethod
    def check(link: chainer.Link) -> None:
        """Raise ValueError if the options of a link, upstream's or ours, have no sparse form."""

    @classmethod
    def swaps(cls, link: chainer.Link) -> list[tuple[chainer.Link, type]]:
        """Check the link and its parts; return pairs of each link to swap and its sparse class.

        The link itself is the first pair. Parts that are sparse already are checked but not
        returned; dense links inside of them are returned. If a part has no sparse form, ValueError
        is raised, whose message begins with its path.
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
    """Return :meth:`Sparse.swaps` of the link at a path, which must belong to one of `kinds`."""
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
