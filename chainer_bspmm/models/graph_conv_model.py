"""What the wrappers of Chainer Chemistry (GWM, CWLE, GWLE) have in common, on sparse batches."""

import inspect

import chainer
from chainer import functions
from chainer_chemistry.links import GeneralReadout as DenseGeneralReadout
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout as DenseGGNNReadout
from chainer_chemistry.links.readout.nfp_readout import NFPReadout as DenseNFPReadout

from chainer_bspmm.functions.fused.batch_norm import batch_norm
from chainer_bspmm.links import GeneralReadout
from chainer_bspmm.links import GGNNReadout
from chainer_bspmm.links import NFPReadout
from chainer_bspmm.links.twin import twin_of
from chainer_bspmm.backend.scale_adj import scale_adj
from chainer_bspmm.links.embed import embed_atoms

# How each readout of Chainer Chemistry becomes ours, and how ours is called.
READOUTS = {
    DenseGGNNReadout: GGNNReadout.from_dense,
    DenseNFPReadout: NFPReadout.from_dense,
    DenseGeneralReadout: lambda link: GeneralReadout(link.mode, link.activation),
}


class GraphConvModel(chainer.Chain):
    """Embedding, updates and readouts with whatever a wrapper puts between them.

    A subclass names the class of Chainer Chemistry whose place it takes as `dense`, whose
    constructor it has; and defines `_assemble_wrapper`, which takes over the links of the wrapper
    proper.

    Raises:
        ValueError: the options go together in Chainer Chemistry's constructor, but not in its
            forward pass; or an update or readout link has no sparse twin.
    """

    dense = None

    def __init_subclass__(cls):
        cls.__signature__ = inspect.signature(cls.dense)

    def __init__(self, *args, **kwargs):
        super().__init__()
        # Upstream's own constructor: the same checks, defaults and random numbers.
        self._assemble(self.dense(*args, **kwargs))

    @classmethod
    def from_dense(cls, model):
        """Return the sparse twin of Chainer Chemistry's model; it owns that one's child links."""
        return twin_of(model, cls, model)

    def _assemble(self, model):
        with self.init_scope():
            self.embed = model.embed
            self.update_layers = chainer.ChainList(
                *[_sparse_update(link, i) for i, link in enumerate(model.update_layers)]
            )
            self.readout_layers = chainer.ChainList(
                *[_sparse_readout(link, i) for i, link in enumerate(model.readout_layers)]
            )
            if model.use_batchnorm:
                self.bnorms = model.bnorms
            self._assemble_wrapper(model)
        # What is left are options.
        for name, value in vars(model).items():
            if not name.startswith('_') and name not in vars(self):
                setattr(self, name, value)
        if (self.concat_hidden or self.sum_hidden) and len(
            self.readout_layers
        ) < self.n_update_layers:
            raise ValueError(
                'weight_tying: expected False to go with a readout after each of %d updates '
                '(concat_hidden, sum_hidden), got True, for which Chainer Chemistry makes one '
                'readout and fails in its forward pass' % self.n_update_layers
            )

    def _embed(self, atom_array, adj):
        """Forget the last batch; return node features, and the adjacency that goes with them."""
        for update in self.update_layers:
            if hasattr(update, 'reset_state'):
                update.reset_state()
        h = embed_atoms(self.embed, atom_array, adj)
        adj = adj.astype(h.dtype)
        return h, scale_adj(adj, h.dtype) if self.scale_adj else adj

    def _convolve(self, h, h0, adj, is_real_node, mix=None):
        """Return what the readouts give, (n_graphs, out_dim), side by side with `concat_hidden`.

        h0: the features that readouts see beside h. mix: ``mix(h, h_new, index)`` makes the nodes
        of what was before and after an update, all (n_rows, hidden_channels).
        """

        def read(readout):
            return readout(h=h, adj=adj, h0=h0, is_real_node=is_real_node)

        results = []
        for step in range(self.n_update_layers):
            index = 0 if self.weight_tying else step
            h_new = self.update_layers[index](h=h, adj=adj)
            h = h_new if mix is None else mix(h, h_new, index)
            if self.use_batchnorm:
                h = batch_norm(adj, self.bnorms[index], h)
            if self.dropout_ratio > 0.0:
                h = functions.dropout(h, ratio=self.dropout_ratio)
            if self.activation is not None and step < self.n_activation:
                h = self.activation(h)
            if self.concat_hidden or self.sum_hidden:
                results.append(read(self.readout_layers[step]))
        if self.concat_hidden:
            return functions.concat(results, axis=1)
        if self.sum_hidden:
            return functions.add(*results) if len(results) > 1 else results[0]
        return read(self.readout_layers[0])


def _sparse_update(link, i):
    from chainer_bspmm.models.sparsify import SWAPS  # which knows this file's models too

    if type(link) not in SWAPS:
        raise ValueError(
            'model.update_layers.%d: expected an update link that sparsify swaps, '
            'got %r' % (i, link)
        )
    return SWAPS[type(link)].from_dense(link)


def _sparse_readout(link, i):
    if type(link) not in READOUTS:
        raise ValueError(
            'model.readout_layers.%d: expected one of %s of Chainer Chemistry, got %r'
            % (i, ', '.join(kind.__name__ for kind in READOUTS), link)
        )
    return READOUTS[type(link)](link)
