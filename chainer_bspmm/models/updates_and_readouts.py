"""What models of several updates, each of which may be read out, do alike."""

import chainer
from chainer import functions
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout as DenseReadout

from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.links.embed import embed_atoms


class UpdatesAndReadouts(chainer.Chain):
    """Embedding, updates and readouts as children, options as attributes.

    A subclass names as `options` the attributes that it has in common with the model of Chainer
    Chemistry whose place it takes, and as `update_kind` the class of its updates, unless it has a
    `from_dense` of its own.
    """

    update_kind = None
    options = ()

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        return twin_of(
            model,
            cls,
            embed=model.embed,
            update_layers=[cls.update_kind.from_dense(link) for link in model.update_layers],
            readout_layers=sparse_readouts(model),
            **cls._options_of(model),
        )

    @classmethod
    def _options_of(cls, model):
        return {name: getattr(model, name) for name in cls.options}

    def _assemble(self, embed, update_layers, readout_layers, **options):
        with self.init_scope():
            self.embed = embed
            self.update_layers = chainer.ChainList(*update_layers)
            self.readout_layers = chainer.ChainList(*readout_layers)
        for name, value in options.items():
            setattr(self, name, value)


class RecurrentUpdatesAndReadouts(UpdatesAndReadouts):
    """The same with updates that have a state."""

    def reset_state(self):
        """Forget the state of every update, as :meth:`forward` does at its start."""
        for update_layer in self.update_layers:
            update_layer.reset_state()


def predict(model, atom_array, adj, **of_readout):
    """Embed atoms, update them step by step, and read out, after every step or after the last.

    Args:
        model (chainer.Chain): has ``embed``, ``update_layers``, ``readout_layers``,
            ``n_update_layers``, ``weight_tying`` and ``concat_hidden``.
        atom_array, adj: what it was called with.
        of_readout: further arguments of its readouts.

    Returns:
        Variable: (n_graphs, out_dim), or (n_graphs, out_dim * n_update_layers) where
        ``concat_hidden`` is set.
    """
    h = h0 = embed_atoms(model.embed, atom_array, adj)
    adj = adj.astype(h.dtype)
    outputs = []
    for step in range(model.n_update_layers):
        h = model.update_layers[0 if model.weight_tying else step](h, adj)
        if model.concat_hidden:
            outputs.append(model.readout_layers[step](h=h, adj=adj, h0=h0, **of_readout))
    if model.concat_hidden:
        return functions.concat(outputs, axis=1)
    return model.readout_layers[0](h=h, adj=adj, h0=h0, **of_readout)


def sparse_readouts(model):
    """Return the twins of the readouts of Chainer Chemistry's model.

    Raises:
        ValueError: one of them is of another kind than Chainer Chemistry makes.
    """
    for i, readout in enumerate(model.readout_layers):
        if type(readout) is not DenseReadout:
            raise ValueError(
                'model.readout_layers[%d]: expected a GGNNReadout of Chainer '
                'Chemistry, got %r' % (i, readout)
            )
    return [GGNNReadout.from_dense(link) for link in model.readout_layers]
