"""Batched sparse matrix products for the graph convolutions of Chainer Chemistry.

Two lines of a training script change::

    import chainer_bspmm                               # first: repairs Chainer for today's Python
    predictor = chainer_bspmm.sparsify(predictor)      # the same parameters, sparse products
    ...
    updater = StandardUpdater(train_iter, optimizer, device=device,
                              converter=chainer_bspmm.concat_mols)
"""

from typing import TYPE_CHECKING

from chainer_bspmm import compat, multi_node
from chainer_bspmm.compat.names_later import names_later

compat.apply()

from chainer_bspmm import adoption, dataset, functions, links, models, papers, sparse  # NOQA: E402
from chainer_bspmm.dataset import concat_mols, CSRConverter, DeviceDataset  # NOQA: E402
from chainer_bspmm.dataset import from_smiles, SparseDataset, to_sparse  # NOQA: E402
from chainer_bspmm.models import densify, layout_of, sparsify  # NOQA: E402
from chainer_bspmm.papers import BatchedCOO, BatchedSELL  # NOQA: E402
from chainer_bspmm.sparse import BatchedCSR  # NOQA: E402

adoption.install()

__version__ = '1.1.0'

__all__ = [
    'BatchedCOO',
    'BatchedCSR',
    'BatchedSELL',
    'CSRConverter',
    'DeviceDataset',
    'GraphUpdater',
    'PartIterator',
    'SparseDataset',
    'captured_predict',
    'check_swap',
    'concat_mols',
    'dataset',
    'densify',
    'from_smiles',
    'functions',
    'layout_of',
    'links',
    'models',
    'multi_node',
    'papers',
    'run_node_classification_train',
    'sparse',
    'sparsify',
    'to_sparse',
    'training',
]

if TYPE_CHECKING:  # from `__getattr__` mypy would take any name, misspelt ones too
    from chainer_bspmm import training
    from chainer_bspmm.multi_node import PartIterator
    from chainer_bspmm.training import GraphUpdater, run_node_classification_train
    from chainer_bspmm.training.captured_predict import captured_predict
    from chainer_bspmm.training.check_swap import check_swap
else:
    # Importing these at once would make the first import of the package slower.
    __getattr__, __dir__ = names_later(
        __name__,
        {
            'GraphUpdater': 'training',
            'PartIterator': 'multi_node',
            'captured_predict': 'training',
            'check_swap': 'training',
            'run_node_classification_train': 'training',
            'training': 'training',
        },
    )
