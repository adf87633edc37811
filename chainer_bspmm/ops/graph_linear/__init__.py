"""A layer of a graph convolution, or a linear layer, with its activation and dropout."""

from chainer_bspmm.ops.graph_linear.node import graph_linear, relation_linear

__all__ = ['graph_linear', 'relation_linear']
