"""`SparseModel`: base of models, which remember the layout of their training batches."""

import weakref

import chainer

from chainer_bspmm.compat.user_code import warn
from chainer_bspmm.links.inner import are_patched, UnknownLayer
from chainer_bspmm.links.sparse import Sparse, swaps_at
from chainer_bspmm.sparse.batch import Batch

# Models that have warned. This is no attribute of a model, because captured steps watch attributes.
_warned = weakref.WeakSet()


class SparseModel(Sparse):
    """Base of the models: links that take whole batches and predict for each molecule.

    ``trained_with`` is (layout, padded_to) of the last training batch. Padded batches count as
    folded ones, because they give the same results. It is None if the model was not trained, or if
    its parameters were loaded from an ``.npz`` file, which does not contain the layout. A
    prediction on batches of another layout warns, once for each model.
    """

    trained_with = None
    _replaced: tuple[type, ...] = ()
    upstreams_layout = 'folded', None  # `trained_with` after a training as upstream's model

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # The classes of upstream whose code this class stands for: its own and its parts'.
        parts = [kind for kinds in cls.parts.values() for kind in kinds]
        cls._replaced = tuple(kind.upstream for kind in (cls, *parts) if kind.upstream)

    def __call__(self, *args, **kwargs):
        if are_patched(self._replaced):
            self._refuse_unknown()  # raises only if this model has such a part
        try:
            y = super().__call__(*args, **kwargs)
        except UnknownLayer:
            self._refuse_unknown()
            raise
        adj = args[1] if len(args) > 1 else kwargs.get('adj')
        if isinstance(adj, Batch):
            self._compare(adj)
        return y

    def _refuse_unknown(self):
        """Raise the error of :func:`sparsify` for a layer that was put in after the swap."""
        swaps_at(type(self).__name__, self, (type(self),))

    def _compare(self, adj):
        """Remember the layout of a training batch; warn of a prediction on another layout."""
        used = ('packed' if adj.layout == 'packed' else 'folded', adj.padded_to)
        if used == self.trained_with:
            return
        if chainer.config.train:
            # A call that only makes the parameters, before a snapshot is loaded, does not count.
            rules = [param.update_rule for param in self.params()]
            if chainer.config.enable_backprop and any(rules):
                self.trained_with = used
        elif self.trained_with is not None and self._padding_counts() and self not in _warned:
            _warned.add(self)
            layout, padded_to = self.trained_with
            before, now = (_size(n, layout == used[0]) for n in (padded_to, used[1]))
            given = 'padded' if adj.layout == 'unfolded' else adj.layout
            option = '' if padded_to is None else ', padded_to=%d' % padded_to
            warn(
                '%s was trained on %s batches%s and predicts on %s ones%s: its predictions may be '
                "far off; use CSRConverter(layout='%s'%s)"
                % (type(self).__name__, layout, before, given, now, layout, option)
            )

    def serialize(self, serializer):
        super().serialize(serializer)
        if isinstance(serializer, chainer.Deserializer):
            self.trained_with = None  # a snapshot does not contain the layout

    def _padding_counts(self):
        """Return whether a prediction depends on phantom atoms."""
        return True


class EdgeListModel(SparseModel):
    """Base of the models whose upstream counterparts take lists of edges, without padding."""

    upstreams_layout = 'packed', None

    def __call__(self, x, adj=None):
        if adj is None:
            raise TypeError(
                "%s: expected node features and a BatchedCSR, which CSRConverter('packed') makes "
                'of dataset.to_sparse(data), got only a %s'
                % (type(self).__name__, type(x).__name__)
            )
        if getattr(adj, 'layout', 'packed') != 'packed':
            raise ValueError(
                "adj: expected a packed batch, as CSRConverter('packed') makes it, because %s of "
                'Chainer Chemistry pads nothing, got %r' % (type(self).__name__, adj)
            )
        return super().__call__(x, adj)


def _size(padded_to, has_to_tell):
    if padded_to is None and not has_to_tell:
        return ''
    return ' (padded_to=%s)' % padded_to


def remember_dense_training(model: SparseModel) -> None:
    """Set `trained_with` if the optimizer's counts say that a model was trained before its swap."""
    trained_with, n_updates = model.__dict__.pop('_when_densified', (None, 0))
    if _n_updates(model) != n_updates:
        trained_with = model.upstreams_layout
    if trained_with is not None:
        model.trained_with = trained_with


def leave_note(model: SparseModel) -> None:
    """Store the layout that a model was trained with, for when it is swapped again."""
    model.__dict__['_when_densified'] = model.__dict__.pop('trained_with', None), _n_updates(model)


def _n_updates(model):
    rules = (param.update_rule for param in model.params())
    return max((rule.t for rule in rules if rule is not None), default=0)


def layout_of(model: chainer.Link) -> tuple[str, int | None] | None:
    """Return the layout of a model's last training batch.

    Args:
        model (chainer.Link): a swapped model, or a link that contains some.

    Returns:
        tuple or None: (layout, padded_to), arguments of ``CSRConverter``. ``layout`` is
        ``'packed'`` or ``'folded'``. None if the models in the tree differ, or if none is known to
        have been trained (``.npz`` files do not contain the layout).
    """
    layouts = {link.trained_with for link in model.links() if isinstance(link, SparseModel)}
    layouts.discard(None)
    return layouts.pop() if len(layouts) == 1 else None
