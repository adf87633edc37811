"""From examples of Chainer Chemistry's data sets to sparse batches."""

from chainer_bspmm.dataset.converters import concat_mols
from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.device_dataset import DeviceDataset
from chainer_bspmm.dataset.smiles import Failure
from chainer_bspmm.dataset.smiles import from_smiles
from chainer_bspmm.dataset.smiles import FromSmiles
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_dataset import to_sparse
from chainer_bspmm.dataset.sparse_example import SparseExample

__all__ = [
    'CSRConverter',
    'DeviceDataset',
    'Failure',
    'FromSmiles',
    'SparseDataset',
    'SparseExample',
    'concat_mols',
    'from_smiles',
    'to_sparse',
]
