"""Differentiable functions of sparse batches: products, reductions, softmax and two layers.

They are the public part of :mod:`chainer_bspmm.ops`; the package itself imports them from there.
"""

from chainer_bspmm.ops.bspmm import bsddmm, bspmm
from chainer_bspmm.ops.gates.gru_step import gru_step
from chainer_bspmm.ops.graph_linear import relation_linear
from chainer_bspmm.ops.segment_softmax import node_softmax, segment_softmax
from chainer_bspmm.ops.segments import segment_broadcast, segment_max, segment_sum

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
