"""From examples of Chainer Chemistry's data sets to sparse batches."""
from chainer_bspmm.dataset.converters import concat_mols
from chainer_bspmm.dataset.converters import CSRConverter

__all__ = ['CSRConverter', 'concat_mols']
