"""The first step of every model: from atom ids to rows of node features."""

import chainer
from chainer.backends import cuda
from chainer_chemistry.links import EmbedAtomID

from chainer_bspmm.links.linear import hooked
from chainer_bspmm.ops.embed_rows import embed_rows
from chainer_bspmm.sparse.batched_csr import check_adjacency


def node_shape(adj):
    """Return the shape of an array of one item for each node: (n_rows,), padded (n_graphs, N)."""
    return (adj.n_graphs, adj.max_rows) if adj.layout == 'padded' else (adj.n_rows,)


def embed_atoms(embed, atom_array, adj, any_width=False):
    """Return (n_rows, channels) node features of atom ids; features pass through, flattened."""
    # These are as wide as the embedding, or of `any_width`. Ids are checked by the batch's stored
    # maximum, or if that is unknown by the array itself, which synchronises if it is on a device.
    check_adjacency(adj)
    if not isinstance(atom_array, chainer.get_array_types() + (chainer.Variable,)):
        raise TypeError('atom_array: expected an array, got %s' % type(atom_array).__name__)
    lead = node_shape(adj)
    is_ids = atom_array.dtype.kind in 'iu'
    if atom_array.shape[: len(lead)] != lead or atom_array.ndim != len(lead) + (not is_ids):
        raise ValueError(
            'atom_array: expected shape %s%s to go with %r, got %s'
            % (lead, ' ids, or features of one more dimension', adj, atom_array.shape)
        )
    flat = atom_array.reshape((adj.n_rows,) + atom_array.shape[len(lead) :])
    n_atom_types, n_channels = embed.W.shape
    if not is_ids:
        if flat.shape[1] != n_channels and not any_width:
            text = 'atom_array: expected features of %d channels, got shape %s'
            raise ValueError(text % (n_channels, atom_array.shape))
        return chainer.as_variable(flat)
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
    """Return ``embed(ids)``, (n_rows, channels), of an array of checked ids."""
    is_table = type(embed) in (EmbedAtomID, chainer.links.EmbedID)
    if not is_table or embed.ignore_label is not None or hooked(embed):
        return embed(ids)
    return embed_rows(ids, embed.W)
