"""Differentiable batched sparse products and segmented reductions."""

from chainer_bspmm.functions.bsddmm import bsddmm
from chainer_bspmm.functions.bspmm import bspmm
from chainer_bspmm.functions.fused.gru_step import gru_step
from chainer_bspmm.functions.node_softmax import node_softmax
from chainer_bspmm.functions.fused.relation_linear import relation_linear
from chainer_bspmm.functions.segment import segment_broadcast
from chainer_bspmm.functions.segment import segment_max
from chainer_bspmm.functions.segment import segment_sum
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
