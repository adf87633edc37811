"""Rows of an embedding table, with a gradient that is deterministic, and fast on a host."""

import numpy

from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import launch
from chainer_bspmm.cuda.partial_sums import sum_partials
from chainer_bspmm.cuda import plans
from chainer_bspmm.ops.elementwise import compute_dtype
from chainer_bspmm.ops.node import AccumulateInPlace, FusedNode
from chainer_bspmm.ops.segments import sum_at

EMBED_WARPS = 8
EMBED_CHUNK = 160  # rows of a block in shared memory; 42 KB in float64, and the limit is 48
EMBED_ROWS = 64  # least rows of a run, because every run writes sums for all types
EMBED_RUNS = 128  # most runs, about one for each multiprocessor
EMBED_SUMS = 2**21  # most elements of the sums of all runs


@plans.kept
def embed_launch(n_rows, n_types, n_channels) -> plans.Launch:
    """Plan embed_grad: a block per run of rows and 32 channels."""
    runs = min(-(-n_rows // EMBED_ROWS), EMBED_RUNS, max(EMBED_SUMS // (n_types * n_channels), 1))
    length = -(-n_rows // (runs * plans.WARP)) * plans.WARP
    return plans.Launch(
        (('VECTOR', 1), ('WARPS', EMBED_WARPS), ('ROWS', EMBED_CHUNK)),
        (-(-n_rows // length), -(-n_channels // plans.WARP), 1),
        (plans.WARP, EMBED_WARPS, 1),
        arguments=tuple(map(numpy.int32, (n_rows, n_channels, n_types, length))),
    )


def embed_rows_backward(ids, gy, n_types):
    """Compute ``y[t] = sum of gy[i] where ids[i] == t``, (n_types, n_B): an embedding's gradient.

    Rows whose id is not in [0, n_types) are ignored. On a GPU the result comes from
    :func:`sum_partials`, so in a captured step it may be uninitialised until the backward pass
    ends.
    """
    if not launch.on_gpu(gy):
        is_type = (ids >= 0) & (ids < n_types)
        if not is_type.all():  # SciPy would write past its arrays
            ids, gy = ids[is_type], gy[is_type]
        sums = sum_at(ids, gy.astype(compute_dtype(gy), copy=False), n_types)
        return sums.astype(gy.dtype, copy=False)
    n_rows, n_channels = gy.shape
    with launch.device_of(gy):
        if not gy.size or not n_types:
            return cuda.cupy.zeros((n_types, n_channels), gy.dtype)
        plan = embed_launch(n_rows, n_types, n_channels)
        dtype = launch.arithmetic(gy.dtype)
        partials = cuda.cupy.empty((plan.grid[0], n_types * n_channels), dtype)
        ids, gy = launch.contiguous(ids.astype(numpy.int32, copy=False)), launch.contiguous(gy)
        launch.run('embed_grad', gy, plan, ids, gy, partials)
    return sum_partials(partials, [(0, (n_types, n_channels), gy.dtype)])[0]


class EmbedRows(AccumulateInPlace, FusedNode):
    """Node of :func:`embed_rows` with input W.

    Chainer's own gradient loops over rows on a host, and adds with atomics on a GPU.
    """

    def __init__(self, ids):
        self._ids = ids

    def _output(self, inputs):
        return inputs[0].take(self._ids, axis=0)

    def _gradients(self, inputs, gy, indexes):
        return (embed_rows_backward(self._ids, gy, len(inputs[0])),)

    def _composed(self, W):
        one_hot = self._ids[:, None] == W.xp.arange(len(W))
        return functions.matmul(one_hot.astype(W.dtype), W)


def embed_rows(ids, W):
    """Take rows of a table: ``y[i] = W[ids[i]]``. Deterministic; ids are not checked."""
    return EmbedRows(ids).apply((W,))[0]
