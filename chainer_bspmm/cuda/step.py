"""The current training step, if it is one that a CUDA graph may capture (see ``training/``).

CuPy refuses its own cuBLAS and cuRAND calls during capture, and a graph repeats the values that the
host passed during the capture. So products and random numbers ask here whether they run in such a
step; outside of one nothing changes. Captured or not, a step runs the same kernels, and its results
have the same bits.
"""

import contextlib
import threading
from typing import Any

import chainer


class Step:
    """State that products, random numbers and sums read inside a step."""

    one: Any  # training.training_step.SeedGradient, which has the gradient of the loss, or None
    sums: Any  # cuda.partial_sums.PendingSums, deferred to the end of the backward pass, or None
    peer_sums: Any  # training.peer_memory.PeerSums, for sums over several ranks, or None

    def __init__(self, blas, seed, counter):
        self.blas = blas  # cuda.gemm.Blas, bound to the step's stream
        self.seed = seed  # for random numbers, below 2**64
        self.counter = counter  # (1,) uint64 on the device, which the host writes before every run
        self.one = self.sums = self.peer_sums = None
        self.losses = []  # losses and other results of their launches; see training.chainer_nodes
        self._n_streams = 0

    def next_stream(self):
        """Return the number (int) of the next layer's random stream, from 0 in every step."""
        number = self._n_streams
        self._n_streams += 1
        return number


class _Local(threading.local):
    step = None


_local = _Local()


def current():
    """Return the current `Step` of this thread, or None."""
    return _local.step


@contextlib.contextmanager
def under_way(step):
    """Run this thread's products and random draws in `step`; layers are numbered from 0.

    Inside, Chainer's functions do not use cuDNN, because CuPy before 14 cannot capture its calls.
    """
    previous, _local.step = _local.step, step
    step._n_streams = 0
    try:
        with chainer.using_config('use_cudnn', 'never'):
            yield step
    finally:
        _local.step = previous
        step.losses.clear()  # a graph may reuse the memory of these arrays
