"""Conversion of SMILES and of Chainer Chemistry's data sets to sparse batches."""

from chainer_bspmm.dataset.converters import concat_mols, CSRConverter
from chainer_bspmm.dataset.device_dataset import DeviceDataset
from chainer_bspmm.dataset.selection import SparseExample
from chainer_bspmm.dataset.smiles import Failure, from_smiles, FromSmiles
from chainer_bspmm.dataset.sparse_dataset import SparseDataset, to_sparse

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
