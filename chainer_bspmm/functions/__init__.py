"""Differentiable functions of sparse batches: products, reductions, softmax and two layers.

Nodes that only links use are in :mod:`chainer_bspmm.functions.fused`.
"""

from chainer_bspmm.functions.bspmm import bsddmm
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused.gru_step import gru_step
from chainer_bspmm.functions.relation_linear import relation_linear
from chainer_bspmm.functions.segment import segment_broadcast
from chainer_bspmm.functions.segment import segment_max
from chainer_bspmm.functions.segment import segment_sum
from chainer_bspmm.functions.segment_softmax import node_softmax
from chainer_bspmm.functions.segment_softmax import segment_softmax

__all__ = [
    'bsddmm',
    'bspmm',
    'gru_step',
    'node_softmax',
    'relation_linear',
    'segment_broadcast',
    'segment_max',
    'segment_softmax',
    'segment_sum',
]
