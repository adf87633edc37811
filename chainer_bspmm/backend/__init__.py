"""The products and reductions on bare arrays: checks first, then SciPy or a CUDA kernel.

Every function takes arrays on the device of the matrix, launches on that device's current stream,
does not synchronise, and returns new C-contiguous arrays. The exceptions, which write to arrays
that they are given, are :func:`relu_dropout`, :func:`row_softmax` and :func:`gather_batch`.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from chainer.backends import cuda

from chainer_bspmm import papers
from chainer_bspmm.backend import check
from chainer_bspmm.backend import cpu
from chainer_bspmm.backend import gated
from chainer_bspmm.backend import gpu
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import operands
from chainer_bspmm.sparse.batched_csr import Buffers


def _module(x):
    return gpu if isinstance(x, cuda.ndarray) else cpu


def bspmm(
    adj: BatchedCSR | papers.BatchedCOO | papers.BatchedSELL,
    x: Any,
    data: Any = None,
    residual: Any = None,
    trans: bool = False,
    algorithm: str = 'auto',
) -> Any:
    """Compute ``y[i] = sum_k value[k] x[column[k]] (+ residual[i])`` over the entries of row i.

    x and the result are (rows, n_B), or (n_graphs, N, n_B) where ``adj`` is padded. ``data``, in
    the order of ``adj``'s entries even with ``trans``, replaces its values (not of a BatchedSELL);
    ``algorithm`` is ``'auto'`` or, on a GPU, one of :func:`algorithms`.
    """
    if type(adj) is not BatchedCSR:
        return papers.bspmm(adj, x, data, residual, trans, algorithm)
    operands.bspmm(adj, x, data, residual, trans)
    if _module(x) is cpu:
        check.one_of('algorithm on a CPU', algorithm, ('auto',))
        return cpu.bspmm(adj, x, data, residual, trans)
    if algorithm != 'auto':
        check.one_of('algorithm', algorithm, ('auto', *gpu.algorithms(adj)))
    return gpu.bspmm(adj, x, data, residual, trans, algorithm)


def algorithms(adj: BatchedCSR | papers.BatchedCOO | papers.BatchedSELL) -> list[str]:
    """Return the names of the algorithms that :func:`bspmm` has for a matrix on a GPU."""
    return list(gpu.algorithms(adj) if type(adj) is BatchedCSR else papers.gpu.algorithms(adj))


def bsddmm(adj: BatchedCSR | papers.BatchedCOO, u: Any, v: Any) -> Any:
    """Compute ``w[k] = sum_c u[row[k], c] v[column[k], c]``, (nnz,), for every entry k."""
    if type(adj) is not BatchedCSR:
        return papers.bsddmm(adj, u, v)
    operands.bsddmm(adj, u, v)
    return _module(u).bsddmm(adj, u, v)


def layer_of(
    x: Any,
    given: dict,
    n_relations: int,
    loop: bool,
    activation: str,
    by_relation: bool = False,
    longest: int = 0,
) -> Any:
    """Return a layer of a graph convolution as a `policy.Layer`, None if it is not one launch.

    That is on a host, where the matrices do not fit into a GPU's shared memory, and where rows are
    long, for which all rows of a tile would wait. `given` holds W (out_channels * R, in_channels),
    W_self, b (out_channels * R,) and b_self (out_channels,), those that there are; several b_self,
    one after the other, are all added. `by_relation`: W is one matrix after the other, not with the
    relation as the minor index of its rows. `loop`: the first matrix has ones on its diagonal
    added.
    """
    if isinstance(x, cuda.ndarray):
        return gpu.layer_of(x, given, n_relations, loop, activation, by_relation, longest)
    return None


def layer(
    layer: Any,
    rows: Any,
    x: Any,
    given: dict,
    dropout_ratio: float = 0.0,
    draw: Any = None,
    out: Any = None,
) -> Any:
    """Compute the layer that :func:`layer_of` describes, (n_rows, out_channels) of x's dtype.

    `rows`, (n_rows * R) x n_rows, are of `sparse.relations.relation_rows`; `draw` is the (seed,
    stream, counter) of a step for dropout; the result is written to `out`, C-contiguous, if given.
    """
    return gpu.layer(layer, rows, x, given, dropout_ratio, draw, out)


def layer_grad(
    layer: Any,
    rows: Any,
    x: Any,
    y: Any,
    gy: Any,
    given: dict,
    dropout_ratio: float = 0.0,
    has_features: bool = True,
    more: Any = None,
) -> dict:
    """Return {name: gradient} of :func:`layer` by x and all parameters, given its result y and gy.

    `rows` are of `sparse.relations.transposed_rows`; the gradient by x, wanted if `has_features`,
    is added to `more`, (n_rows, in_channels). Those of parameters are :func:`sum_partials`; where
    the layer is ``by_relation``, W and b_self are lists, an array for each relation and each bias.
    """
    return gpu.layer_grad(layer, rows, x, y, gy, given, dropout_ratio, has_features, more)


def edge_film(adj: BatchedCSR, messages: Any, film: Any) -> Any:
    """Compute ``y[i] = sum of value max(0, gamma[i, r] messages[j, r] + beta[i, r])``.

    The sum is over the entries (i, j * R + r) of row i. `messages` is (n_nodes * R, C), with row
    ``j * R + r`` for node j and relation r; `film` is (n_nodes * R, 2 * C), gamma and beta. All are
    of adj's dtype. No array of (nnz, C) is made on a GPU.
    """
    check.film(adj, messages, film)
    return _module(messages).edge_film(adj, messages, film)


def edge_film_grad(adj: BatchedCSR, messages: Any, film: Any, gy: Any) -> tuple[Any, Any]:
    """Return the gradients of :func:`edge_film` by ``messages`` and ``film``."""
    check.film(adj, messages, film, gy)
    return _module(messages).edge_film_grad(adj, messages, film, gy)


def layer_norm(x: Any, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
    """Compute ``y[i, c] = gamma[c] (x[i, c] - mean_i) / sqrt(variance_i + eps) + beta[c]``.

    Returns y and (n_rows, 2), the means and ``1 / sqrt(variance + eps)`` of x's rows, in float64
    for float64, else in float32.
    """
    check.norm(x, gamma, beta)
    return _module(x).layer_norm(x, gamma, beta, eps)


def layer_norm_grad(x: Any, gamma: Any, gy: Any, statistics: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of :func:`layer_norm` by x, gamma and beta, given its `statistics`."""
    check.norm(x, gamma)
    return _module(x).layer_norm_grad(x, gamma, gy, statistics)


def gated_step(
    x: Any, message: Any, state: Any, parameters: Any, is_tanh: bool
) -> tuple[Any, Any] | None:
    """Compute gated rows, or a step of a gated recurrent unit, in one launch.

    With ``v = [x; message]``: without a state ``y = sigmoid(W_z v + b_z) * h`` and ``h = W_h v +
    b_h``, or its tanh; with one, which may be x, as :func:`chainer_bspmm.functions.gru_step`.
    `parameters` are (W, b) of h and z, and with a state of r, then (U, c) of h, z and r; biases may
    be None. Returns y (n_rows, H) and what :func:`gated_step_grad` needs; None where no kernel does
    this: on a CPU, without rows, for widths whose weights do not fit in a GPU's shared memory
    (about 128 and more).
    """
    if _module(x) is cpu:
        return None
    return gated.gated_step(x, message, state, parameters, is_tanh)


def gated_step_grad(
    x: Any,
    message: Any,
    state: Any,
    parameters: Any,
    kept: Any,
    gy: Any,
    is_tanh: bool,
    dtypes: Any,
) -> tuple[Any, Any, Any, list]:
    """Return the gradients of :func:`gated_step`, in two launches and a sum of partial results.

    They are those by x, message and state (None without one, or if the state is x, whose gradient
    is the sum of both), and a list by the parameters, None where `dtypes`, W, b, W, b, ..., is
    None; :func:`sum_partials` may put these off. `kept` is the other result of the step.
    """
    return gated.gated_step_grad(x, message, state, parameters, kept, gy, is_tanh, dtypes)


def row_softmax(a: Any) -> Any:
    """Replace the rows of matrices by their softmax, and return the sum of the matrices.

    `a`, (n_terms, n_rows, n_B), is C-contiguous and written to; if there is one term, the result is
    ``a[0]`` itself.
    """
    return _module(a).row_softmax(a)


def row_softmax_grad(a: Any, g: Any) -> Any:
    """Return the gradients of :func:`row_softmax` by the matrices, given what it made of them."""
    return _module(a).row_softmax_grad(a, g)


def sum_partials(partials: Any, parts: Any) -> list:
    """Return the sums over the rows of columns of an array.

    They are ``partials[:, first : first + prod(shape)].sum(axis=0)``, of that shape and dtype, for
    each (first, shape, dtype) of `parts`. `partials`, C-contiguous, is of the dtype that kernels
    calculate in: float64 for float64 results, else float32. One launch, deterministic, without
    synchronising. In a step that puts sums off, there is none, and the results hold nothing until
    the end of its backward pass: they must be gradients of parameters, which only the update reads.
    """
    return gpu.sum_partials(partials, parts)


def embed_grad(ids: Any, gy: Any, n_types: int) -> Any:
    """Compute ``y[t] = sum of gy[i] where ids[i] == t``, (n_types, n_B): an embedding's gradient.

    Rows with other ids than 0, ..., n_types - 1 take no part. On a GPU it is from
    :func:`sum_partials`, so in a step it may have to be the gradient of a parameter.
    """
    check.rows(gy)
    return _module(gy).embed_grad(ids, gy, n_types)


def mean_loss(
    kind: str, x: Any, t: Any, divisor: int | None = None, ignore_nan: bool = False
) -> tuple[Any, Any]:
    """Compute a loss or metric ``y = sum of term(x[i], t[i]) / divisor`` over all elements i.

    `kernels/mean_loss.cu` has the terms of each kind: ``'SIGMOID_CROSS_ENTROPY'`` and
    ``'BINARY_ACCURACY'`` of integer labels, of which -1 takes no part, ``'SQUARED_ERROR'`` and
    ``'ABSOLUTE_ERROR'`` of values of x's dtype, where with `ignore_nan` a difference that is NaN is
    0. x has fewer than 2**31 elements. Returns the loss, a scalar of x's dtype summed in float64,
    and the divisor if it was counted (None was given): the labels other than -1, at least 1, an
    int64.
    """
    check.loss(kind, x, t)
    return _module(x).mean_loss(kind, x, t, divisor, ignore_nan)


def training_loss(
    kind: str,
    x: Any,
    t: Any,
    divisor: int | None = None,
    ignore_nan: bool = False,
    with_gradient: bool = True,
) -> tuple[Any, Any, Any, Any]:
    """Compute a :func:`mean_loss` and, by the same launch, what a training step needs with it.

    Returns the loss and its divisor; the binary accuracy of a cross entropy whose labels are
    counted, else None; and if `with_gradient` what :func:`mean_loss_grad` gives where gy is 1, else
    None. On a GPU the last two are None where there are too many elements.
    """
    check.loss(kind, x, t)
    return _module(x).training_loss(kind, x, t, divisor, ignore_nan, with_gradient)


def mean_loss_grad(
    kind: str, x: Any, t: Any, gy: Any, divisor: Any, ignore_nan: bool = False
) -> Any:
    """Return the gradient of :func:`mean_loss` by x, of any kind but the accuracy."""
    check.loss(kind, x, t)
    return _module(x).mean_loss_grad(kind, x, t, gy, divisor, ignore_nan)


def segment_sum(x: Any, offsets: Any, max_rows: int | None = None, weights: Any = None) -> Any:
    """Compute ``y[g] = sum of weights[i] x[i] over offsets[g] <= i < offsets[g + 1]``.

    `max_rows` is the most rows that a segment has, if the host knows it; without it a GPU prepares
    for a segment of all the rows, by a second launch. `weights` are float32 for any dtype of x;
    None means ones. A row of weight 0 contributes nothing, even if it holds NaN. An empty segment
    gives 0.
    """
    check.segments(x, offsets, weights)
    return _module(x).segment_sum(x, offsets, max_rows, weights)


def segment_max(x: Any, offsets: Any, max_rows: int | None = None, weights: Any = None) -> Any:
    """Compute the maximum of every segment; arguments as :func:`segment_sum`.

    Rows of weight 0 take no part. A segment without other rows gives 0; NaN propagates.
    """
    check.segments(x, offsets, weights)
    return _module(x).segment_max(x, offsets, max_rows, weights)


def row_sum(x: Any) -> Any:
    """Compute ``y[c] = sum of x[:, c]``, the gradient of a bias; 0 where there are no rows.

    Summed in a tree, which is more accurate than row after row, and on a GPU at the speed of
    memory, unlike CuPy's sum over the first axis.
    """
    check.rows(x)
    return _module(x).row_sum(x)


def segment_broadcast(
    y: Any, offsets: Any, n_rows: int, max_rows: int | None = None, weights: Any = None
) -> Any:
    """Compute ``x[i] = weights[i] y[g]`` for the rows of segment g: :func:`segment_sum` transposed.

    `n_rows` is ``offsets[-1]``, known on the host, or more: rows past it get 0, as do those of
    weight 0, whatever ``y`` holds.
    """
    check.broadcast(y, offsets, n_rows, weights)
    return _module(y).segment_broadcast(y, offsets, n_rows, max_rows, weights)


def segment_softmax(x: Any, offsets: Any, weights: Any = None) -> Any:
    """Compute ``y[i, c] = exp(x[i, c]) / sum of weights[k] exp(x[k, c])``, in float64.

    The sum is over the rows k of i's segment. Rows of weight 0, and those of no segment, get 0. The
    maximum is subtracted first: nothing overflows. On a GPU one thread does a segment's column,
    which suits short segments such as the entries of a row.
    """
    check.segments(x, offsets, weights)
    return _module(x).segment_softmax(x, offsets, weights)


def segment_softmax_grad(y: Any, gy: Any, offsets: Any, weights: Any = None) -> Any:
    """Compute ``gx[i, c] = y[i, c] (gy[i, c] - weights[i] sum of y[k, c] gy[k, c])``.

    The sum is over the rows k of i's segment. Rows of weight 0, and those of no segment, get 0 and
    contribute nothing, even if ``gy`` is NaN there.
    """
    check.segments(y, offsets, weights)
    return _module(y).segment_softmax_grad(y, gy, offsets, weights)


def dropout(x: Any, ratio: float, seed: int, stream: int, counter: Any) -> tuple[Any, Any]:
    """Return a mask, 0 with probability ratio, else 1 / (1 - ratio), and ``y = x * mask``.

    The same seed (64 bits), number `stream` of the layer (32 bits) and step, the (1,) uint64
    `counter` on x's device, give the same random numbers on every device; ``kernels/dropout.cu``
    defines them. x has at most 2**34 elements.
    """
    check.dropout(x, counter)
    return _module(x).dropout(x, ratio, seed, stream, counter)


def relu_dropout(x: Any, ratio: float, seed: int, stream: int, counter: Any) -> None:
    """Compute ``max(0, x) * mask`` in place; arguments as :func:`dropout`. NaN stays NaN."""
    check.dropout(x, counter)
    _module(x).relu_dropout(x, ratio, seed, stream, counter)


def dropout_mask(
    size: int, dtype: DTypeLike, ratio: float, seed: int, stream: int, counter: Any
) -> Any:
    """Return the mask alone, (size,) on the device of ``counter``; see :func:`dropout`."""
    check.elements(size)
    return _module(counter).dropout_mask(size, dtype, ratio, seed, stream, counter)


Source = gpu.Source


def gather_batch(source: Source, index: Any, buffers: Buffers, padded_to: Any = None) -> None:
    """Write a packed or folded batch of molecules of a data set on a GPU into buffers there.

    One launch, and another for every two labels after the first two. Nothing is checked: `index`,
    (n_graphs,) int32, names molecules of the data set; buffers are C-contiguous, of its dtypes, and
    have a row more for each molecule and row_weights where the batch is folded, which `padded_to`
    says: (1,) int32 on the device, read when the launch runs. What is larger becomes spare.
    """
    gpu.gather_batch(source, index, buffers, padded_to)
