"""Random molecules in the format of upstream's preprocessors, for tests of links and models."""

import numpy

SIZES = (9, 1, 17, 4, 12, 2, 30, 8)


def molecules(sizes=SIZES, kind='relations', n_relations=4, n_labels=3, seed=0):
    """Return examples (atoms, adjacency, label); see :func:`adjacency` for the kinds."""
    rng = numpy.random.RandomState(seed)
    examples = []
    for n in sizes:
        atoms = rng.randint(1, 20, n).astype('i')
        adj = adjacency(rng, n, kind, n_relations)
        examples.append((atoms, adj, rng.uniform(-1, 1, n_labels).astype('f')))
    return examples


def adjacency(rng, n, kind='relations', n_relations=4):
    """Return a random adjacency of n atoms, float32, of one of these kinds.

    `relations`: (n_relations, n, n) values, not symmetric, so that a swap of sender and receiver is
    noticed; some atoms have no bond. `bonds`: symmetric, and all values are 1. `counted`: (n, n)
    numbers of bonds with self-loops; column sums are from 0 to beyond 7, and differ from row sums.
    `counted bonds`: numbers of bonds, symmetric. `normalised`: (n, n), symmetric, for RSGCN; no two
    atoms are equivalent, so that a maximum has one winner.
    """
    if kind in ('relations', 'bonds'):
        which = rng.randint(0, n_relations, (n, n))
        bonds = (rng.uniform(size=(n, n)) < 2.5 / max(n, 3)) * rng.uniform(0.5, 1.5, (n, n))
        adj = numpy.stack([bonds * (which == r) for r in range(n_relations)])
        if kind == 'bonds':
            adj = numpy.maximum(adj, adj.swapaxes(1, 2)) != 0
        return adj.astype('f')
    chain = numpy.eye(n) + numpy.diag(numpy.ones(max(n - 1, 0)), 1)[:n, :n]
    adj = numpy.minimum(chain + chain.T + (rng.uniform(size=(n, n)) < 0.1), 1)
    if kind == 'counted':
        if n > 3:  # for degrees of 0 and beyond 7, and an entry of 2
            adj[:, 1], adj[:, 3], adj[0, 2] = 0, 1, 2
        return adj.astype('f')
    if kind == 'counted bonds':
        adj = numpy.maximum(adj, adj.T)
        if n > 3:
            adj[3] = adj[:, 3] = 1
            adj[1] = adj[:, 1] = 0
            adj[0, 2] = adj[2, 0] = 2
        return adj.astype('f')
    adj = numpy.maximum(adj, adj.T) * rng.uniform(0.5, 1.5, (n, n))
    return ((adj + adj.T) / numpy.sqrt(adj.sum(0) * adj.sum(1)[:, None])).astype('f')


def mask_of(sizes, dtype='f'):
    """Return ``is_real_node`` (n_graphs, N) of padded molecules."""
    return (numpy.arange(max(sizes)) < numpy.array(sizes)[:, None]).astype(dtype)


def folded_mask_of(sizes, dtype='f'):
    """Return ``is_real_node`` (n_rows,) of folded molecules."""
    mask = numpy.ones(sum(sizes) + len(sizes), dtype)
    mask[numpy.cumsum(numpy.array(sizes) + 1) - 1] = 0
    return mask
