"""Statistics of batch normalisation over the batches of all ranks, eager or in a captured step."""

import contextlib
import threading

import numpy

import chainer
from chainer import functions
from chainer.backends import cuda

from chainer_bspmm.cuda import step
from chainer_bspmm.ops.batch_norm import normalise, ONE_RANK, OneRank


class _Local(threading.local):
    weight = 1


_local = _Local()


@contextlib.contextmanager
def weighted_by(n_molecules):
    """Context in which this rank's loss has the weight `n_molecules`; elsewhere it has weight 1."""
    previous, _local.weight = _local.weight, max(n_molecules, 1)
    try:
        yield
    finally:
        _local.weight = previous


class AllRanks(OneRank):
    """The ranks of a communicator, whose batches a node treats as one batch.

    In a step that may be captured, sums are computed on the device (``peer_sums`` of the step). All
    others go through MPI on the host, which synchronises with a GPU.
    """

    def __init__(self, comm):
        self._comm = comm

    def sum(self, array):
        """Return the sum of the ranks' arrays; all ranks must call it in the same order."""
        if step.current() is not None:
            if step.current().peer_sums is None:
                raise RuntimeError(
                    'statistics over several ranks: expected an update over several ranks, got one '
                    'of a single rank'
                )
            return step.current().peer_sums.sum(array)
        from mpi4py import MPI

        total = cuda.to_cpu(array).copy()
        self._comm.mpi_comm.Allreduce(MPI.IN_PLACE, total)
        if isinstance(array, cuda.ndarray):
            with cuda.get_device_from_array(array):
                return cuda.cupy.asarray(total)
        return total

    def sum_of_gradients(self, array):
        """Return the weighted sum of all ranks' gradients, as a part of this rank's gradient."""
        # The common loss is the mean of the ranks' losses with the weights w of
        # :func:`weighted_by`. So the gradient of rank j needs the factor ``w_j / sum(w)``. The
        # result on rank i is later multiplied by ``w_i / sum(w)``, hence the factor ``w_j / w_i``.
        return self.sum(array * array.dtype.type(_local.weight)) / _local.weight

    def refuse_derivatives(self):
        """Raise RuntimeError: higher derivatives would need the gradients of other ranks."""
        raise RuntimeError('statistics over several ranks have first derivatives only')


def ranks_of(link):
    """Return the ranks whose batches a MultiNodeBatchNormalization treats as one batch."""
    # ChainerMN's own forward pass gives every rank the same weight. Gradients fit the weighted mean
    # over ranks that `multi_node.optimizer` takes.
    return AllRanks(link.comm) if link.comm.size > 1 else ONE_RANK


def batch_norm_of_ranks(link, x, finetune=False):
    """Normalise any array (n, c, ...) over the batches of all ranks, in training.

    It stands in for ChainerMN's MultiNodeBatchNormalization on arrays that are not of graphs, with
    the gradients of `ops.batch_norm`. With `finetune`, running averages are means of all batches
    since ``link.start_finetuning()``.
    """
    n_axes = link.avg_mean.ndim
    if x.shape[1 : 1 + n_axes] != link.avg_mean.shape:
        text = 'x: expected shape (n, %s, ...), got %s'
        raise ValueError(text % (', '.join(map(str, link.avg_mean.shape)), x.shape))
    decay = link.decay
    if finetune:
        link.N += 1
        decay = 1 - 1 / link.N
    order = (0, *range(1 + n_axes, x.ndim), *range(1, 1 + n_axes))
    rows = functions.transpose(x, order)
    h = functions.reshape(rows, (-1, link.avg_mean.size))
    with chainer.using_device(link.device):
        weights = link.xp.ones(len(h), numpy.float32)
    y = functions.reshape(normalise(link, h, weights, decay, ranks_of(link)), rows.shape)
    return functions.transpose(y, numpy.argsort(order).tolist())
