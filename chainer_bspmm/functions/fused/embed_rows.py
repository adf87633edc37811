"""Rows of a table by their number, with a gradient that is summed by products."""

import numpy
import scipy.sparse

from chainer import backend as chainer_backend
from chainer import function_node
from chainer.backends import cuda

from chainer_bspmm.cuda.gemm import dot
from chainer_bspmm.functions.node import apply_untracked


class EmbedRows(function_node.FunctionNode):
    """Input W; the ids are constants."""

    def __init__(self, ids):
        self._ids = ids

    def forward(self, inputs):
        (W,) = inputs
        self._n_types = len(W)
        self.retain_inputs(())
        return (W.take(self._ids, axis=0),)

    def backward(self, indexes, grad_outputs):
        return tuple(apply_untracked(EmbedRowsGrad(self._ids, self._n_types), grad_outputs))


class EmbedRowsGrad(function_node.FunctionNode):
    """Compute ``gW[t] = sum of gy[i] over the rows i of id t``: the transpose of one-hot times gy.

    Chainer's own loops over the rows on the host, a fifth of a training step of a small model, and
    adds with atomics on a GPU.
    """

    def __init__(self, ids, n_types):
        self._ids = ids
        self._n_types = n_types

    def forward(self, inputs):
        (gy,) = inputs
        self.retain_inputs(())
        ids, shape = self._ids, (len(self._ids), self._n_types)
        if chainer_backend.get_array_module(gy) is numpy:
            dtype = numpy.float32 if gy.dtype == numpy.float16 else gy.dtype
            one_hot = scipy.sparse.csr_matrix(
                (numpy.ones(len(ids), dtype), ids, numpy.arange(len(ids) + 1)), shape=shape
            )
            gW = one_hot.T @ gy.astype(dtype, copy=False)
        else:
            one_hot = cuda.elementwise(
                'raw S ids, int32 n_types',
                'T y',
                'y = ids[i / n_types] == i % n_types ? (T)1 : (T)0',
                'bspmm_one_hot',
            )(ids, self._n_types, cuda.cupy.empty(shape, gy.dtype))
            gW = dot(one_hot.T, gy)
        return (gW.astype(gy.dtype, copy=False),)

    def backward(self, indexes, grad_outputs):
        return EmbedRows(self._ids).apply(grad_outputs)


def embed_rows(ids, W):
    """Take rows of a table: ``y[i] = W[ids[i]]``. Differentiable to any order.

    Args:
        ids (array): (n_rows,) integers in [0, n_types), which are not checked.
        W (Variable or array): (n_types, n_channels) floats.

    Returns:
        Variable: (n_rows, n_channels), of W's dtype.

    Note:
        Deterministic, its gradient too, unlike that of ``chainer.functions.embed_id`` on a GPU;
        there the gradient takes n_rows * n_types elements of memory for a while. Does not
        synchronise.
    """
    return EmbedRows(ids).apply((W,))[0]
