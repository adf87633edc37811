"""The optimizer of ChainerMN, with gradients that are weighted by molecules."""

import contextlib
import functools

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.multi_node import communicators
from chainer_bspmm.multi_node import faults
from chainer_bspmm.multi_node.start import agree
from chainer_bspmm.sparse import BatchedCSR

N_FIELDS = 3  # that ranks tell each other before gradients: molecules, loss, whether to start again


class Weighted:
    """Update all ranks alike, by the mean gradient of the molecules in all of their batches.

    ``chainermn.create_multi_node_optimizer`` makes it, of this class and ChainerMN's. In a step
    rank i has w_i molecules, and its loss is a mean over them. The update uses
    ``sum_i(w_i g_i) / sum_i(w_i)``, the gradient of one batch of all molecules; ChainerMN's own
    counts every rank once, whatever its batch. A rank without a batch (:meth:`join`) counts 0
    times.

    Before the first update, and whenever parameters have been made or removed, all ranks get the
    state of one (`start.agree`). Parameters that are made by the first batch are made by a trial in
    test mode, so that this update is not lost, as it is in ChainerMN's own.

    Raises (by `update`, on all ranks):
        FloatingPointError: a loss is not finite, unless the optimizer scales it dynamically.
        RuntimeError: parameters are on a GPU, and the communicator cannot send them.
        ValueError: models or optimizers differ.
    """

    def __init__(self, *args):
        super().__init__(*args)
        object.__setattr__(self, 'known', None)  # the parameters that all ranks agree on

    def update(self, lossfun=None, *args, **kwds):
        """Do ``chainer.Optimizer.update`` on the batches of all ranks.

        Without a loss function gradients are given, and all ranks count alike; nothing is updated
        where parameters had to be sent first.
        """
        if lossfun is None:
            self._mean_and_update(1, 0)
            return
        self.start(lossfun, *args, **kwds)
        loss = lossfun(*args, **kwds)
        if getattr(self, '_use_cleargrads', True):
            self.target.cleargrads()
        else:
            self.target.zerograds()
        loss.backward(loss_scale=self.actual_optimizer._loss_scale)
        value = 0 if self.actual_optimizer._loss_scaling_is_dynamic else _mean(loss)
        del loss
        self._mean_and_update(n_molecules([*args, *kwds.values()]), value)

    def join(self):
        """Take part in an update of the other ranks, without a batch."""
        if self.known is None:
            self._agree()
        self.target.cleargrads()
        self._mean_and_update(0, 0)

    def start(self, lossfun, *args, **kwds):
        """Make lazy parameters, and let all ranks start alike, if that has not been done."""
        if self.known is not None:
            return
        if not all(param.is_initialized for param in self.target.params()):
            with chainer.using_config('train', False), chainer.no_backprop_mode(), _unreported():
                lossfun(*args, **kwds)
        self._agree()

    def _agree(self):
        _check_device(self.communicator, self.target)
        agree(self.communicator, self.actual_optimizer)
        object.__setattr__(self, 'known', _made(self.target))

    def _mean_and_update(self, weight, loss):
        comm = self.communicator
        table = numpy.empty((comm.size, N_FIELDS))
        mine = numpy.array([weight, loss, self.known != _made(self.target)], table.dtype)
        comm.mpi_comm.Allgather(mine, table)
        weights, losses, is_new = table.T
        for rank in numpy.flatnonzero(~numpy.isfinite(losses)).tolist():
            faults.raise_on(
                comm,
                rank,
                FloatingPointError(
                    'the loss of rank %d is %s in step %d'
                    % (rank, losses[rank], self.actual_optimizer.t + 1)
                ),
            )
        if is_new.any():
            self._agree()
            return
        scale = weight * comm.size / weights.sum()
        if scale != 1:
            for param in self.target.params(include_uninit=False):
                if param.grad is not None:
                    # Not in place: gradients of several parameters may be one array.
                    param.grad = param.grad * param.dtype.type(scale)
        # Where a rank has no gradients it cannot tell which ones the others lack.
        zero_fill = self.zero_fill or not weights.all()
        comm.multi_node_mean_grad(self.target, zero_fill)
        self.actual_optimizer.update(None)


def weighted(create, base):
    """Wrap ``chainermn.create_multi_node_optimizer``: make a `Weighted` one.

    With ``double_buffering`` it stays ChainerMN's own.

    Args:
        create (callable): the function.
        base (type): the class of its results.
    """
    kind = type('MultiNodeOptimizer', (Weighted, base), {})

    @functools.wraps(create)
    def create_multi_node_optimizer(
        actual_optimizer, communicator, double_buffering=False, zero_fill=True
    ):
        if double_buffering:
            return create(actual_optimizer, communicator, double_buffering, zero_fill)
        return kind(actual_optimizer, communicator, zero_fill)

    return create_multi_node_optimizer


def n_molecules(arguments):
    """Return the number of molecules in the arguments of a loss function.

    Of a dense batch, in which all arrays have a row for each; 1 for anything else.
    """
    for value in arguments:
        if isinstance(value, BatchedCSR):
            return value.n_graphs
    lengths = {len(value) for value in arguments if getattr(value, 'ndim', 0)}
    return lengths.pop() if len(lengths) == 1 else 1


def _unreported():
    reporters = chainer.reporter._get_reporters()
    return reporters[-1].scope({}) if reporters else contextlib.nullcontext()


def _mean(loss):
    """Return the loss as a float, of several losses one that is finite if all are."""
    return float(cuda.to_cpu(loss.array).sum())


def _made(target):
    return [(path, param.is_initialized) for path, param in sorted(target.namedparams())]


def _check_device(comm, target):
    """Refuse to send arrays of a GPU by an MPI that takes their addresses for the host's."""
    from chainermn.communicators.naive_communicator import NaiveCommunicator

    on_gpu = [param for param in target.params() if param.device.xp is cuda.cupy]
    if on_gpu and isinstance(comm, NaiveCommunicator) and not communicators.knows_gpus():
        raise RuntimeError(
            "communicator: 'naive' sends arrays of the host, the model is on %s; use "
            "create_communicator('pure_nccl')" % on_gpu[0].device.name
        )
