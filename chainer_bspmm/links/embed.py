"""Embedding, the first step of every model: from atom ids to rows of node features."""

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.links.inner import is_known, TABLES
from chainer_bspmm.ops.embed_rows import embed_rows
from chainer_bspmm.ops.link_hooks import hooked
from chainer_bspmm.sparse.batched_csr import check_adjacency


def node_shape(adj):
    """Return the shape of an array with one item per node: (n_rows,), or padded (n_graphs, N)."""
    return (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)


def embed_atoms(embed, atom_array, adj, any_width=False):
    """Embed atom ids as node features, (n_rows, channels); features are only flattened.

    Features must be as wide as the embedding unless `any_width`.
    """
    # Ids are checked by the maximum that is stored in the batch. If that is unknown, the array
    # itself is read, which synchronises with a GPU.
    check_adjacency(adj)
    if not isinstance(atom_array, chainer.get_array_types() + (chainer.Variable,)):
        raise TypeError('atom_array: expected an array, got %s' % type(atom_array).__name__)
    lead = node_shape(adj)
    is_ids = atom_array.dtype.kind in 'iu'
    if atom_array.shape[: len(lead)] != lead or atom_array.ndim != len(lead) + (not is_ids):
        raise ValueError(
            'atom_array: expected ids of shape %s, or features of one more dimension, to go with '
            '%r, got shape %s' % (lead, adj, atom_array.shape)
        )
    flat = atom_array.reshape((adj.n_rows,) + atom_array.shape[len(lead) :])
    is_table = is_known(embed, TABLES)
    if not is_ids:
        if is_table and flat.shape[1] != embed.W.shape[1] and not any_width:
            text = 'atom_array: expected features of %d channels, got shape %s'
            raise ValueError(text % (embed.W.shape[1], atom_array.shape))
        return chainer.as_variable(flat)
    if not is_table:
        return call_embed(embed, atom_array, adj)
    n_atom_types = len(embed.W)
    largest = adj.max_atom_id
    smallest = 0
    if largest is None and flat.size:
        array = cuda.to_cpu(chainer.as_array(flat))
        largest, smallest = int(array.max()), int(array.min())
    if largest is not None and not (0 <= smallest and largest < n_atom_types):
        text = 'atom_array: expected ids in [0, %d), the size of the embedding, got %d'
        raise ValueError(text % (n_atom_types, smallest if smallest < 0 else largest))
    return embed_ids(embed, chainer.as_array(flat))


def embed_ids(embed, ids):
    """Return ``embed(ids)``, (n_rows, channels), for a known embedding and checked ids."""
    if embed.ignore_label is not None or hooked(embed):
        return embed(ids)
    return embed_rows(ids, embed.W)


def call_embed(embed, ids, adj):
    """Call an embedding that a user put into a model; return (n_rows, channels).

    The embedding gets ids in the shape of the batch. That is upstream's shape, (n_graphs, N), only
    if the batch is padded.
    """
    h = embed(ids)
    if h.shape[:-1] != ids.shape:
        raise ValueError(
            'embed: expected features of shape %s from ids of shape %s, got %s of %r'
            % (ids.shape + ('channels',), ids.shape, h.shape, embed)
        )
    return functions.reshape(h, (adj.n_rows, h.shape[-1]))
