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

    Args:
        adj (BatchedCSR, BatchedCOO or BatchedSELL): n_rows x n_cols.
        x (array): (n_cols, n_B); or (n_graphs, N, n_B) where ``adj`` is padded.
        data (array or None): (nnz,) values of the entries instead of ``adj.data``; None with a
            BatchedSELL.
        residual (array or None): of the result's shape, added to the product.
        trans (bool): multiply by the transposed matrix; ``data`` keeps the order of ``adj``.
        algorithm (str): ``'auto'``, or on a GPU one of :func:`algorithms`.

    Returns:
        array: (n_rows, n_B), or (n_graphs, N, n_B) for a three-dimensional ``x``, of x's dtype.
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
    """Compute ``w[k] = sum_c u[row[k], c] v[column[k], c]`` for every entry k.

    Args:
        adj (BatchedCSR or BatchedCOO): the pattern, n_rows x n_cols; its values are not used.
        u (array): (n_rows, n_B), or (n_graphs, N, n_B) where ``adj`` is padded.
        v (array): (n_cols, n_B), or three-dimensional as u.

    Returns:
        array: (nnz,), of u's dtype.
    """
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
    """Describe a layer of a graph convolution, if that is one launch.

    Args:
        x (array): (n_rows, in_channels) features.
        given (dict): W (out_channels * R, in_channels), W_self (out_channels, in_channels), b
            (out_channels * R,), b_self (out_channels,), those that there are. Several b_self, one
            after the other, are all added.
        n_relations (int): R. loop (bool): whether the first matrix has ones added to its diagonal.
        activation (str): ``'identity'``, ``'relu'``, ``'tanh'`` or ``'sigmoid'``.
        by_relation (bool): whether W is one matrix (out_channels, in_channels) after the other, not
            with the relation as the minor index of its rows.
        longest (int): of the matrix, see ``BatchedCSR``.

    Returns:
        cuda.policy.Layer or None: None on a host, where the matrices do not fit into the shared
        memory of a GPU, and where rows are long, for which all rows of a tile would wait.
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
    """Compute a layer: :func:`~chainer_bspmm.functions.fused.graph_linear.graph_linear` on arrays.

    Args:
        layer, x, given: of :func:`layer_of`.
        rows (BatchedCSR or None): (n_rows * R) x n_rows, ``sparse.relations.relation_rows``.
        dropout_ratio (float): of the result, after the activation.
        draw (tuple or None): (seed, stream, counter) of a step, for dropout.
        out (array or None): where the result is written, C-contiguous; None: to a new array.

    Returns:
        array: (n_rows, out_channels), of x's dtype.
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
    """Compute the gradients of :func:`layer`, given its result and the gradient by that.

    Args:
        rows (BatchedCSR or None): ``sparse.relations.transposed_rows``.
        has_features (bool): whether the gradient by x is wanted.
        more (array or None): (n_rows, in_channels), what the gradient by x is added to.

    Returns:
        dict: name -> gradient, of x and of all parameters; those are :func:`sum_partials`. Where
        the layer is ``by_relation``, W and b_self are lists: of an array for each relation, and for
        each bias.
    """
    return gpu.layer_grad(layer, rows, x, y, gy, given, dropout_ratio, has_features, more)


def edge_film(adj: BatchedCSR, messages: Any, film: Any) -> Any:
    """Compute ``y[i] = sum of value max(0, gamma[i, r] messages[j, r] + beta[i, r])``.

    The sum is over the entries (i, j * R + r) of row i.

    Args:
        adj (BatchedCSR): n_nodes x (n_nodes * R), its values of the dtype of ``messages``.
        messages (array): (n_nodes * R, C) floats, row ``j * R + r`` for node j and relation r.
        film (array): (n_nodes * R, 2 * C), gamma and beta of every node and relation.

    Returns:
        array: (n_nodes, C), of the dtype of ``messages``; no array of (nnz, C) is made on a GPU.
    """
    check.film(adj, messages, film)
    return _module(messages).edge_film(adj, messages, film)


def edge_film_grad(adj: BatchedCSR, messages: Any, film: Any, gy: Any) -> tuple[Any, Any]:
    """Return the gradients of :func:`edge_film` by ``messages`` and ``film``.

    Args:
        adj, messages, film: the same.
        gy (array): (n_nodes, C), the gradient by its result.
    """
    check.film(adj, messages, film, gy)
    return _module(messages).edge_film_grad(adj, messages, film, gy)


def layer_norm(x: Any, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
    """Compute ``y[i, c] = gamma[c] (x[i, c] - mean_i) / sqrt(variance_i + eps) + beta[c]``.

    Args:
        x (array): (n_rows, n_B) floats; mean and variance are those of its rows.
        gamma, beta (array): (n_B,) of x's dtype.
        eps (float): above 0.

    Returns:
        tuple of arrays: y, of x's shape and dtype; and (n_rows, 2), the means and
        ``1 / sqrt(variance + eps)``, in float64 for float64, else in float32.
    """
    check.norm(x, gamma, beta)
    return _module(x).layer_norm(x, gamma, beta, eps)


def layer_norm_grad(x: Any, gamma: Any, gy: Any, statistics: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of :func:`layer_norm` by x, gamma and beta.

    Args:
        x, gamma (array): the same.
        gy (array): (n_rows, n_B) of x's dtype, the gradient by y.
        statistics (array): the other result.
    """
    check.norm(x, gamma)
    return _module(x).layer_norm_grad(x, gamma, gy, statistics)


def gated_step(
    x: Any, message: Any, state: Any, parameters: Any, is_tanh: bool
) -> tuple[Any, Any] | None:
    """Compute gated rows, or a step of a gated recurrent unit, in one launch.

    With ``v = [x; message]``: without a state ``y = sigmoid(W_z v + b_z) * h`` and
    ``h = W_h v + b_h``, or its tanh; with one as :func:`chainer_bspmm.functions.gru_step`.

    Args:
        x (array): (n_rows, C) floats.
        message (array or None): (n_rows, M) of x's dtype.
        state (array or None): (n_rows, H) of x's dtype; may be x.
        parameters (sequence): (W, b) of h and z, and with a state of r, then (U, c) of h, z and r;
            of x's dtype. Biases may be None.
        is_tanh (bool): whether h is a tanh; with a state it is.

    Returns:
        (array, array) or None: y (n_rows, H), and what :func:`gated_step_grad` needs. None where no
        kernel does this: on a CPU, without rows, for widths whose weights do not fit in a GPU's
        shared memory (about 128 and more).
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

    Args:
        x, message, state, parameters, is_tanh: the same.
        kept (array): its other result.
        gy (array): (n_rows, H) of x's dtype, the gradient by y.
        dtypes (sequence): of the gradient of each of the parameters, W, b, W, b, ...; None: it is
            not needed.

    Returns:
        tuple: the gradients by x, message (None without one) and state (None without one, or if it
        is x, whose gradient is the sum of both), and those of the parameters (None: not needed),
        which :func:`sum_partials` may put off.
    """
    return gated.gated_step_grad(x, message, state, parameters, kept, gy, is_tanh, dtypes)


def row_softmax(a: Any) -> Any:
    """Replace the rows of matrices by their softmax, and return the sum of the matrices.

    Args:
        a (array): (n_terms, n_rows, n_B) floats, C-contiguous; written to.

    Returns:
        array: (n_rows, n_B) of a's dtype; ``a[0]`` itself if there is one term. NaN propagates.
    """
    return _module(a).row_softmax(a)


def row_softmax_grad(a: Any, g: Any) -> Any:
    """Return the gradients of :func:`row_softmax` by the matrices.

    Args:
        a (array): (n_terms, n_rows, n_B), what it made of them.
        g (array): (n_rows, n_B) of a's dtype, the gradient by their sum.

    Returns:
        array: (n_terms, n_rows, n_B) of a's dtype.
    """
    return _module(a).row_softmax_grad(a, g)


def sum_partials(partials: Any, parts: Any) -> list:
    """Sum the rows of columns of an array.

    Args:
        partials (cupy.ndarray): (n_rows, n_columns), C-contiguous, of the dtype that kernels
            calculate in: float64 for float64 results, else float32.
        parts (sequence): (first column, shape, dtype) of each result.

    Returns:
        list of cupy.ndarray: ``partials[:, first : first + prod(shape)].sum(axis=0)`` in that shape
        and dtype. In a step that puts sums off they hold nothing until the end of its backward
        pass: they must be gradients of parameters, which only the update reads.

    Note:
        One launch, or none if the sums are put off. Deterministic; does not synchronise.
    """
    return gpu.sum_partials(partials, parts)


def embed_grad(ids: Any, gy: Any, n_types: int) -> Any:
    """Compute ``y[t] = sum of gy[i] where ids[i] == t``, the gradient of a table of embeddings.

    Args:
        ids (array): (n_rows,) integers; rows of others than 0, ..., n_types - 1 take no part.
        gy (array): (n_rows, n_B) floats.
        n_types (int): rows of the result.

    Returns:
        array: (n_types, n_B), of gy's dtype. On a GPU from :func:`sum_partials`, so in a step it
        may have to be the gradient of a parameter.
    """
    check.rows(gy)
    return _module(gy).embed_grad(ids, gy, n_types)


def mean_loss(
    kind: str, x: Any, t: Any, divisor: int | None = None, ignore_nan: bool = False
) -> tuple[Any, Any]:
    """Compute a loss or metric ``y = sum of term(x[i], t[i]) / divisor`` over all elements i.

    Args:
        kind (str): ``'SIGMOID_CROSS_ENTROPY'``, ``'BINARY_ACCURACY'``, ``'SQUARED_ERROR'`` or
            ``'ABSOLUTE_ERROR'``; ``kernels/mean_loss.cu`` has their terms.
        x (array): predictions, floats of any shape, fewer than 2**31.
        t (array): of x's shape: integers, labels of which -1 takes no part, for the first two; for
            the errors values of x's dtype.
        divisor (int or None): None: the number of labels other than -1, but at least 1.
        ignore_nan (bool): whether a difference of values that is NaN is taken for 0.

    Returns:
        tuple of arrays: the loss, a scalar of x's dtype, summed in float64; and the divisor that
        was counted, an int64 scalar, None if it was given.
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

    Args:
        kind (str): any but the accuracy; x, t, divisor, ignore_nan: the same.
        with_gradient (bool): whether the gradient is needed.

    Returns:
        tuple of arrays: the loss and its divisor, the same; the binary accuracy of a cross entropy
        whose labels are counted, else None; what :func:`mean_loss_grad` gives where gy is 1, or
        None. On a GPU the last two are None where there are too many elements.
    """
    check.loss(kind, x, t)
    return _module(x).training_loss(kind, x, t, divisor, ignore_nan, with_gradient)


def mean_loss_grad(
    kind: str, x: Any, t: Any, gy: Any, divisor: Any, ignore_nan: bool = False
) -> Any:
    """Return the gradient of :func:`mean_loss` by x, of any kind but the accuracy.

    Args:
        kind, x, t, ignore_nan: the same.
        gy (array): a scalar of x's dtype, the gradient by the loss.
        divisor (int or array): the one that was given or counted.
    """
    check.loss(kind, x, t)
    return _module(x).mean_loss_grad(kind, x, t, gy, divisor, ignore_nan)


def segment_sum(x: Any, offsets: Any, max_rows: int | None = None, weights: Any = None) -> Any:
    """Compute ``y[g] = sum of weights[i] x[i] over offsets[g] <= i < offsets[g + 1]``.

    An empty segment gives 0.

    Args:
        x (array): (n_rows, n_B) floats.
        offsets (array): (n_segments + 1,) int32, as ``BatchedCSR.row_offsets``.
        max_rows (int or None): the most rows that a segment has, if the host knows it. Without it
            a GPU prepares for a segment of all the rows, by a second launch.
        weights (array or None): (n_rows,) float32 for any dtype of ``x``, as
            ``BatchedCSR.row_weights``; None: all ones. A row of weight 0 contributes nothing, even
            if it holds NaN.

    Returns:
        array: (n_segments, n_B), of x's dtype.
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

    Args:
        x (array): (n_rows, n_B) floats.

    Returns:
        array: (n_B,), of x's dtype. Summed in a tree, which is more accurate than row after row,
        and on a GPU at the speed of memory, unlike CuPy's sum over the first axis.
    """
    check.rows(x)
    return _module(x).row_sum(x)


def segment_broadcast(
    y: Any, offsets: Any, n_rows: int, max_rows: int | None = None, weights: Any = None
) -> Any:
    """Compute ``x[i] = weights[i] y[g]`` for the rows of segment g: :func:`segment_sum` transposed.

    Args:
        y (array): (n_segments, n_B) floats.
        offsets (array): (n_segments + 1,) int32.
        n_rows (int): ``offsets[-1]``, known on the host, or more; rows past it get 0, as do those
            of weight 0, whatever ``y`` holds.
        max_rows, weights: as in :func:`segment_sum`.

    Returns:
        array: (n_rows, n_B), of y's dtype.
    """
    check.broadcast(y, offsets, n_rows, weights)
    return _module(y).segment_broadcast(y, offsets, n_rows, max_rows, weights)


def segment_softmax(x: Any, offsets: Any, weights: Any = None) -> Any:
    """Compute ``y[i, c] = exp(x[i, c]) / sum of weights[k] exp(x[k, c])``.

    The sum is over the rows k of i's segment. Rows of weight 0, and those of no segment, get 0. The
    maximum is subtracted first: nothing overflows. On a GPU one thread does a segment's column,
    which suits short segments such as the entries of a row.

    Args:
        x (array): (n_rows, n_B) floats.
        offsets (array): (n_segments + 1,) int32 from 0 to n_rows or less.
        weights (array or None): as in :func:`segment_sum`.

    Returns:
        array: (n_rows, n_B), of x's dtype; computed in float64.
    """
    check.segments(x, offsets, weights)
    return _module(x).segment_softmax(x, offsets, weights)


def segment_softmax_grad(y: Any, gy: Any, offsets: Any, weights: Any = None) -> Any:
    """Compute ``gx[i, c] = y[i, c] (gy[i, c] - weights[i] sum of y[k, c] gy[k, c])``.

    The sum is over the rows k of i's segment. Rows of weight 0, and those of no segment, get 0 and
    contribute nothing, even if ``gy`` is NaN there.

    Args:
        y (array): (n_rows, n_B), what :func:`segment_softmax` gave.
        gy (array): (n_rows, n_B) of y's dtype.
        offsets (array), weights (array or None): the same.

    Returns:
        array: (n_rows, n_B), of y's dtype.
    """
    check.segments(y, offsets, weights)
    return _module(y).segment_softmax_grad(y, gy, offsets, weights)


def dropout(x: Any, ratio: float, seed: int, stream: int, counter: Any) -> tuple[Any, Any]:
    """Compute ``y = x * mask``, the mask being 0 with probability ratio, else 1 / (1 - ratio).

    The same seed, stream and step give the same random numbers on every device;
    ``kernels/dropout.cu`` defines them.

    Args:
        x (array): floats of any shape, at most 2**34.
        ratio (float): in [0, 1).
        seed (int): in [0, 2**64).
        stream (int): number of the layer in the step, in [0, 2**32).
        counter (array): (1,) uint64 on x's device, number of the step.

    Returns:
        tuple of arrays: mask and y, of x's shape and dtype.
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

    One launch, and another for every two labels after the first two. Nothing is checked. The result
    has spare rows and entries where the buffers are larger.

    Args:
        source (Source): the data set.
        index (array): (n_graphs,) int32 on its device, at least one; every molecule is below the
            number that the data set has.
        buffers (Buffers): of the dtypes of the data set, on its device, C-contiguous. A folded
            batch has a row more for each molecule, and row_weights.
        padded_to (array or None): (1,) int32 on the device, the N of a folded batch, read when the
            launch runs; None: the batch is packed.
    """
    gpu.gather_batch(source, index, buffers, padded_to)
