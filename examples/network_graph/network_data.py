"""Citation networks: Cora and CiteSeer, if Chainer Chemistry has their files, or a generated one.

Nodes are papers with a bag of words and a class, edges are citations.
"""

import collections
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import chainer
import numpy
from common.data import DataError

CITATIONS = ('cora', 'citeseer')
URL = 'https://linqs-data.soe.ucsc.edu/public/lbc/%s.tgz'

# x: (n_nodes, n_words) float32, 1 for a word that the paper has; edges: (2, n_edges) int64, source
# and receiver, each citation in both directions; y: (n_nodes,) int32; description: for the user.
Network = collections.namedtuple('Network', 'x edges y description')


def load(name, seed):
    """Return the `Network` of `--dataset`; 'auto' is Cora if its files exist, else 'generated'."""
    if name == 'auto':
        name = 'cora' if all(map(os.path.isfile, paths_of('cora'))) else 'generated'
    return generate(seed) if name == 'generated' else read(name)


def paths_of(name):
    """Return the paths of Chainer Chemistry's two files of a data set: papers and citations."""
    folder = os.path.join(chainer.dataset.get_dataset_root(), 'pfnet', 'chainer', name)
    return [os.path.join(folder, name + ending) for ending in ('.content', '.cites')]


def read(name):
    """Read Cora or CiteSeer.

    The first file has a line for each paper: its name, 0 or 1 for each word, its class. The second
    one has pairs of names. Citations of unknown papers, or of a paper by itself, are left out.
    """
    content, cites = paths_of(name)
    for path in (content, cites):
        if not os.path.isfile(path):
            raise DataError(
                '--dataset %s: %s not found. Unpack %s there, or use --dataset generated'
                % (name, path, URL % name)
            )
    try:
        path = content
        papers = _words_of(path)
        x = numpy.array([words for _, *words, _ in papers], numpy.float32)
        numbers = {paper[0]: i for i, paper in enumerate(papers)}
        path = cites
        pairs = [[numbers.get(paper, -1) for paper in (a, b)] for a, b in _words_of(path)]
    except ValueError as error:
        raise DataError('%s is not as in %s: %s' % (path, URL % name, error)) from error
    _, y = numpy.unique([paper[-1] for paper in papers], return_inverse=True)
    return Network(x, _both_ways(pairs), y.astype(numpy.int32), name)


def _words_of(path):
    """Return a list of words for each line of a file that is not blank."""
    with open(path) as f:
        return [line.split() for line in f if line.strip()]


def generate(seed, n_nodes=2000, n_classes=7, n_words=500, n_citations=2, loyalty=0.8):
    """Generate a planted partition whose nodes have words.

    A paper cites `n_citations` others on average, each with the probability `loyalty` from its own
    class, else from any class. It has about 15 words, one in five of them from the 40 words that
    its class prefers.
    """
    rng = numpy.random.RandomState(seed)
    y = rng.randint(0, n_classes, n_nodes).astype(numpy.int32)
    words = rng.randint(0, n_words, (n_nodes, 15))
    preferred = numpy.stack([rng.permutation(n_words)[:40] for _ in range(n_classes)])
    of_class = preferred[y[:, None], rng.randint(0, 40, words.shape)]
    words = numpy.where(rng.uniform(size=words.shape) < 1 / 5, of_class, words)
    x = numpy.zeros((n_nodes, n_words), numpy.float32)
    x[numpy.arange(n_nodes)[:, None], words] = 1
    sources = rng.randint(0, n_nodes, n_nodes * n_citations)
    members = [numpy.flatnonzero(y == c) for c in range(n_classes)]
    of_class = [rng.choice(members[c]) for c in y[sources]]
    anyone = rng.randint(0, n_nodes, sources.size)
    receivers = numpy.where(rng.uniform(size=sources.size) < loyalty, of_class, anyone)
    pairs = numpy.stack([sources, receivers], axis=1)
    return Network(x, _both_ways(pairs), y, 'generated, not real: a planted partition with words')


def _both_ways(pairs):
    """Return pairs of nodes, -1 if unknown, as edges in both directions, (2, n_edges) int64."""
    pairs = numpy.array(pairs, numpy.int64).reshape(-1, 2)
    pairs = pairs[(pairs >= 0).all(axis=1) & (pairs[:, 0] != pairs[:, 1])]
    return numpy.unique(numpy.concatenate([pairs, pairs[:, ::-1]]), axis=0).T
