"""Batched sparse times dense product (Batched SpMM), and the gradient by its edge values."""

from chainer import function_node
from chainer import Variable
from chainer.types import NdArray

from chainer_bspmm import backend
from chainer_bspmm.functions.node import apply_untracked
from chainer_bspmm.papers import BatchedCOO
from chainer_bspmm.papers import BatchedSELL
from chainer_bspmm.sparse import BatchedCSR


class BatchedSpMM(function_node.FunctionNode):
    """C = op(A) X (+ residual); inputs x, then edge values and residual, if any.

    `trans` makes op(A) the transpose, with edge values still in the order of A.
    """

    def __init__(self, adj, has_data, has_residual, trans=False, algorithm='auto'):
        self._adj = adj
        self._has_data = has_data
        self._has_residual = has_residual
        self._trans = trans
        self._algorithm = algorithm

    def forward(self, inputs):
        x = inputs[0]
        data = inputs[1] if self._has_data else None
        residual = inputs[-1] if self._has_residual else None
        # The product is linear in x: only the gradients that involve edge values need the inputs.
        self.retain_inputs((0, 1) if self._has_data else ())
        return (backend.bspmm(self._adj, x, data, residual, self._trans, self._algorithm),)

    def backward(self, indexes, grad_outputs):
        (gy,) = grad_outputs
        x, data = self.get_retained_inputs() if self._has_data else (None, None)
        gradients = []
        for index in indexes:
            if index == 0:
                node = BatchedSpMM(
                    self._adj, self._has_data, False, not self._trans, self._algorithm
                )
                gradients += apply_untracked(node, (gy, data) if self._has_data else (gy,))
            elif index == 1 and self._has_data:
                pair = (x, gy) if self._trans else (gy, x)
                gradients += apply_untracked(BatchedSDDMM(self._adj, self._algorithm), pair)
            else:
                gradients.append(gy)
        return tuple(gradients)


class BatchedSDDMM(function_node.FunctionNode):
    def __init__(self, adj, algorithm='auto'):
        self._adj = adj
        self._algorithm = algorithm  # of the products that its gradients are

    def forward(self, inputs):
        self.retain_inputs((0, 1))
        u, v = inputs
        return (backend.bsddmm(self._adj, u, v),)

    def backward(self, indexes, grad_outputs):
        u, v = self.get_retained_inputs()
        (gw,) = grad_outputs
        gradients = []
        for index in indexes:
            # w is bilinear: the gradient of each factor is the sparse product of gw and the other.
            node = BatchedSpMM(self._adj, True, False, index == 1, self._algorithm)
            gradients += apply_untracked(node, (u if index == 1 else v, gw))
        return tuple(gradients)


def bspmm(
    adj: BatchedCSR | BatchedCOO | BatchedSELL,
    x: Variable | NdArray,
    data: Variable | NdArray | None = None,
    residual: Variable | NdArray | None = None,
    algorithm: str = 'auto',
) -> Variable:
    """Multiply every graph's sparse matrix by its block of dense rows, in one launch.

    ``y[i, c] = sum_k value[k] * x[column[k], c] (+ residual[i, c])`` over the entries k of row i.
    Differentiable to any order with respect to ``x``, ``data`` and ``residual``.

    Args:
        adj (BatchedCSR, BatchedCOO or BatchedSELL): the batch of matrices, n_rows x n_cols, on the
            device of ``x``. Its own values are constants. A BatchedSELL suits an ``x`` of at most
            about eight columns; wider ones take eight columns at a time and read the matrix
            each time. Its backward pass multiplies by the SELL of the transpose, which is built
            once and kept.
        x (Variable or array): (n_cols, n_B) float16, float32 or float64. If ``adj`` is padded to N
            columns per graph, also (n_graphs, N, n_B).
        data (Variable or array or None): (nnz,) edge values of x's dtype, used instead of
            ``adj.data``, in the order of its entries. NaN propagates as in a dense product. Not
            with a BatchedSELL.
        residual (Variable or array or None): added to the product; of its shape and dtype.
        algorithm (str): ``'auto'``, or the name of one of ``backend.algorithms(adj)``, which
            runs forward and in every derivative, each of which may refuse it; for tests and
            benchmarks. For a BatchedCOO ``'auto'`` means ``'st'``, which follows the paper's rule:
            ``'st_shared'`` if the output of the largest matrix fits in 32 KB, ``'st_blocked'`` if
            one column of it does (8,192 rows of float32, 4,096 of float64), else ``'st_global'``.
            A BatchedSELL has ``'sell'`` only.

    Returns:
        Variable: (n_rows, n_B), or (n_graphs, N, n_B) for a three-dimensional ``x``; of x's dtype.
        float16 is summed in float32.

    Raises:
        TypeError: ``adj`` is no such container, or a dtype does not fit (float16 with a BatchedCOO
            on a GPU: its atomics would round every partial sum).
        ValueError: a shape, a device or the algorithm does not fit.
        Both are raised before anything is launched.

    Note:
        Deterministic, except with a BatchedCOO on a GPU: atomics add in any order, of which
        ``chainer.config.warn_nondeterministic`` warns. Does not synchronise. Arrays that are not
        C-contiguous are copied. On a GPU float32 denormals are flushed to zero. There rows of
        a graph that has one of more than 128 entries may be summed in pieces, by several threads,
        and a second launch adds these up.

    Source:
        Nagasaka, Nukada, Kojima, Matsuoka: Batched Sparse Matrix Multiplication for Accelerating
        Graph Convolutional Networks (CCGrid 2019), CSR variant; ``kernels/bspmm_csr.cu``.
        ``'swa'``: their CSR kernel as written; ``'swa_rows'`` and ``'swa_blocked'``: its forms (c)
        and (d) of figure 5 at any width; ``kernels/papers/bspmm_swa.cu`` names deviations.
        The SparseTensor variant (figures 3, 5-(a) and 5-(b), section 4.3): ``bspmm_st_shared.cu``
        and ``bspmm_st_global.cu``; the paper leaves the block size open, and offsets replace its
        tables of pointers. SELL: IPSJ report 2018-HPC-164 No. 3, for one column there;
        ``kernels/papers/bspmm_sell.cu``.

    Example:
        >>> import numpy
        >>> import chainer_bspmm
        >>> adj = chainer_bspmm.BatchedCSR.from_matrices([numpy.ones((2, 2)), numpy.eye(1)])
        >>> chainer_bspmm.functions.bspmm(adj, numpy.array([[1.], [2.], [3.]])).array
        array([[3.],
               [3.],
               [3.]])
    """
    inputs = [array for array in (x, data, residual) if array is not None]
    node = BatchedSpMM(adj, data is not None, residual is not None, algorithm=algorithm)
    return node.apply(inputs)[0]


def bsddmm(adj: BatchedCSR | BatchedCOO, u: Variable | NdArray, v: Variable | NdArray) -> Variable:
    """Multiply two dense matrices at the entries of a sparse pattern only, in one launch.

    ``w[k] = sum_c u[row[k], c] * v[column[k], c]`` for every entry k of ``adj``. Differentiable to
    any order with respect to ``u`` and ``v``.

    Args:
        adj (BatchedCSR or BatchedCOO): the pattern, n_rows x n_cols; its values are not used.
        u (Variable or array): (n_rows, n_B) float16, float32 or float64; or (n_graphs, N, n_B) if
            ``adj`` is padded to N rows per graph.
        v (Variable or array): (n_cols, n_B), or three-dimensional as u; of u's dtype.

    Returns:
        Variable: (nnz,) in the order of adj's entries, of u's dtype; float16 is summed in
        float32.

    Raises:
        TypeError, ValueError: as :func:`chainer_bspmm.functions.bspmm`.

    Note:
        Deterministic; does not synchronise. Its gradients are products by
        :func:`chainer_bspmm.functions.bspmm`, as deterministic as those.
    """
    return BatchedSDDMM(adj).apply((u, v))[0]
