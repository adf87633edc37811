"""Batched sparse matrix products for the graph convolutions of Chainer Chemistry.

Two lines of a training script change::

    import chainer_bspmm                               # first: repairs Chainer for today's Python
    predictor = chainer_bspmm.sparsify(predictor)      # the same parameters, sparse products
    ...
    updater = StandardUpdater(train_iter, optimizer, device=device,
                              converter=chainer_bspmm.concat_mols)
"""

from chainer_bspmm import compat, multi_node

compat.apply()

from chainer_bspmm import adoption, dataset, functions, links, models, papers, sparse  # NOQA: E402
from chainer_bspmm.dataset import concat_mols, CSRConverter  # NOQA: E402
from chainer_bspmm.models import densify, sparsify  # NOQA: E402
from chainer_bspmm.papers import BatchedCOO, BatchedSELL  # NOQA: E402
from chainer_bspmm.sparse import BatchedCSR  # NOQA: E402

adoption.install()

__version__ = '1.0.0'

__all__ = [
    'BatchedCOO',
    'BatchedCSR',
    'BatchedSELL',
    'CSRConverter',
    'concat_mols',
    'dataset',
    'densify',
    'functions',
    'links',
    'models',
    'multi_node',
    'papers',
    'sparse',
    'sparsify',
]
