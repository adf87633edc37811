"""The optimizer of ChainerMN, with gradients that are weighted by molecules."""

import contextlib
import functools
import zlib
from typing import Any

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.multi_node import communicators, faults
from chainer_bspmm.multi_node.start import agree
from chainer_bspmm.multi_node.statistics import weighted_by
from chainer_bspmm.sparse import BatchedCSR

# Numbers that ranks send each other before the gradients: number of molecules, loss, whether
# parameters have been made or removed, checksum of the names of parameters without a gradient.
N_FIELDS = 4


class Weighted:
    """Update all ranks alike, by the mean gradient of the molecules in all of their batches.

    ``chainermn.create_multi_node_optimizer`` makes it, as a subclass of this class and ChainerMN's.
    In a step rank i has w_i molecules, and its loss is a mean over them. The update uses
    ``sum_i(w_i g_i) / sum_i(w_i)``, the gradient of one batch of all molecules; ChainerMN's own
    optimizer counts every rank once, whatever its batch. A rank without a batch (:meth:`join`)
    counts 0 times. If the loss of any rank is not finite, all ranks raise FloatingPointError.

    Before the first update, and whenever parameters have been made or removed, all ranks get the
    state of one rank (`start.agree`). Parameters that the first batch makes are made by a trial in
    test mode, so that the update by this batch is done, too; ChainerMN's own optimizer loses it.
    """

    # Attributes of ChainerMN's class, which is the other base.
    actual_optimizer: chainer.Optimizer
    communicator: Any
    target: chainer.Link
    zero_fill: bool
    known: list | None

    def __init__(self, *args):
        super().__init__(*args)
        object.__setattr__(self, 'known', None)  # the parameters that all ranks agree on

    def setup(self, link):
        """Set up as ``chainer.Optimizer.setup``; the ranks must agree again on the new model."""
        super().setup(link)
        object.__setattr__(self, 'known', None)
        return self

    def update(self, lossfun=None, *args, **kwds):
        """Update as ``chainer.Optimizer.update`` by the batches of all ranks.

        Without a loss function the gradients in the parameters are used, and all ranks have the
        same weight. If parameters have to be sent first, nothing is updated.
        """
        if lossfun is None:
            if self.known is None:
                self._take_part()
            else:
                self._mean_and_update(1, 0)
            return
        self.start(lossfun, *args, **kwds)
        weight = n_molecules([*args, *kwds.values()])
        with weighted_by(weight):
            loss = lossfun(*args, **kwds)
            if getattr(self, '_use_cleargrads', True):
                self.target.cleargrads()
            else:
                self.target.zerograds()
            loss.backward(loss_scale=self.actual_optimizer._loss_scale)
        value = 0  # with several losses their sum, which is finite if all are
        if not self.actual_optimizer._loss_scaling_is_dynamic:
            value = float(cuda.to_cpu(loss.array).sum())
        del loss
        self._mean_and_update(weight, value)

    def join(self):
        """Take part in an update without a batch; RuntimeError if batch normalisation needs one."""
        from chainermn.links import MultiNodeBatchNormalization

        for path, link in self.target.namedlinks():
            if isinstance(link, MultiNodeBatchNormalization) and link.comm.size > 1:
                raise RuntimeError(
                    "join: expected a batch, because the link '%s' normalises over the batches "
                    'of all ranks' % path
                )
        self._take_part()

    def start(self, lossfun, *args, **kwds):
        """Make lazy parameters, and give all ranks one state, unless that has been done."""
        if self.known is not None:
            return
        if not all(param.is_initialized for param in self.target.params()):
            reporters = chainer.reporter._get_reporters()
            unreported = reporters[-1].scope({}) if reporters else contextlib.nullcontext()
            with chainer.using_config('train', False), chainer.no_backprop_mode(), unreported:
                lossfun(*args, **kwds)
        self._agree()

    @property
    def has_new_parameters(self):
        """Whether parameters have been made or removed since all ranks agreed on them."""
        return self.known != _made(self.target)

    def _take_part(self):
        if self.known is None:
            self._agree()
        self.target.cleargrads()
        self._mean_and_update(0, 0)

    def _agree(self):
        _check_device(self.communicator, self.target)
        agree(self.communicator, self.actual_optimizer)
        object.__setattr__(self, 'known', _made(self.target))

    def _mean_and_update(self, weight, loss):
        comm, optimizer = self.communicator, self.actual_optimizer
        table = numpy.empty((comm.size, N_FIELDS))
        mine = weight, loss, self.has_new_parameters, self._missing()
        comm.mpi_comm.Allgather(numpy.array(mine, table.dtype), table)
        weights, losses, is_new, missing = table.T
        for rank in numpy.flatnonzero(~numpy.isfinite(losses)).tolist():
            text = 'the loss of rank %d is %s in step %d' % (rank, losses[rank], optimizer.t + 1)
            faults.raise_on(comm, rank, FloatingPointError(text))
        if is_new.any():
            self._agree()
        elif weights.all() and len(set(missing)) > 1:
            text = 'expected True where ranks have gradients of different parameters, got False'
            faults.raise_on(comm, 0, ValueError('zero_fill: ' + text))
        elif weights.any():
            # A rank without gradients cannot tell which ones the others lack, so all are filled.
            self._mean(weight / weights.sum(), self.zero_fill or not weights.all())
            optimizer.update(None)

    def _missing(self):
        """Return a checksum of the parameters without a gradient, or 0 if they get zeros anyway."""
        if self.zero_fill:
            return 0
        params = sorted(self.target.namedparams(include_uninit=False))
        return zlib.crc32('\n'.join(path for path, p in params if p.grad is None).encode())

    def _mean(self, share, zero_fill):
        """Replace the gradients by their sum over the ranks, each multiplied by its share."""
        comm = self.communicator
        params = [param for _, param in sorted(self.target.namedparams(include_uninit=False))]
        for param in params:
            if param.grad is None and zero_fill:
                param.grad = param.xp.zeros_like(param.array)
        params = [param for param in params if param.grad is not None]
        if _is_naive(comm) and all(param.device.xp is numpy for param in params):
            _mean_on_host(comm, params, share)
            return
        if share * comm.size != 1:
            for param in params:
                # This is not done in place, because several parameters may share a gradient array.
                param.grad = param.grad * param.dtype.type(share * comm.size)
        comm.multi_node_mean_grad(self.target, zero_fill)


def _mean_on_host(comm, params, share):
    """Replace gradients by ``sum_i(share_i * g_i)`` over all ranks, as new arrays.

    All ranks have the same parameters, on the host. There is one message per dtype, whereas
    ChainerMN's `naive` sends one for each parameter, and waits for each. float16 is sent as
    float32, which MPI can add.
    """
    from mpi4py import MPI

    of_dtype = {}
    for param in params:
        of_dtype.setdefault(numpy.promote_types(param.dtype, numpy.float32), []).append(param)
    for dtype, alike in sorted(of_dtype.items(), key=str):
        total = numpy.concatenate([param.grad.ravel() for param in alike], dtype=dtype)
        total *= share
        comm.mpi_comm.Allreduce(MPI.IN_PLACE, total)
        ends = numpy.cumsum([param.size for param in alike]).tolist()
        for param, first, last in zip(alike, [0, *ends], ends):
            param.grad = total[first:last].reshape(param.shape).astype(param.dtype, copy=False)


def weighted(create, base):
    """Wrap ``create_multi_node_optimizer``: make `Weighted` ones, except with double buffering."""
    kind = type('MultiNodeOptimizer', (Weighted, base), {})

    @functools.wraps(create)
    def create_multi_node_optimizer(
        actual_optimizer, communicator, double_buffering=False, zero_fill=True
    ):
        if double_buffering:
            return create(actual_optimizer, communicator, double_buffering, zero_fill)
        return kind(actual_optimizer, communicator, zero_fill)

    return create_multi_node_optimizer


def of_nccl(optimizer):
    """Return the optimizer if it is `Weighted` over NCCL, which can be captured, otherwise None."""
    is_one = isinstance(optimizer, Weighted) and communicators.is_nccl(optimizer.communicator)
    return optimizer if is_one else None


def n_molecules(arguments):
    """Return the number of molecules in the arguments of a loss function, or 1 if it is unknown."""
    for value in arguments:
        if isinstance(value, BatchedCSR):
            return value.n_graphs
    lengths = {len(value) for value in arguments if getattr(value, 'ndim', 0)}
    return lengths.pop() if len(lengths) == 1 else 1


def _made(target):
    return [(path, param.is_initialized) for path, param in sorted(target.namedparams())]


def _check_device(comm, target):
    """Refuse arrays on a GPU if MPI would take their addresses for addresses on the host."""
    on_gpu = [param for param in target.params() if param.device.xp is cuda.cupy]
    if on_gpu and _is_naive(comm) and not communicators.knows_gpus():
        raise RuntimeError(
            "communicator: 'naive' sends arrays of the host, the model is on %s; use "
            "create_communicator('pure_nccl')" % on_gpu[0].device.name
        )


def _is_naive(comm):
    from chainermn.communicators.naive_communicator import NaiveCommunicator

    return type(comm) is NaiveCommunicator
