"""`Session`: objects that all programs of a driver share, made and dropped together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer

from chainer_bspmm.cuda import gemm
from chainer_bspmm.training.cuda_graphs import CannotCapture, Capturer
from chainer_bspmm.training.guards import Guards

CHECK_EVERY = 2000  # replays from one regular check to the next


class Session:
    """The stream and memory of the graphs, cuBLAS, the function of the programs, and its guards.

    `target` is the link that is trained or predicts. `function` runs on the arrays of a batch.
    `update` is the `Update` of a training step, or None for predictions. A session is over when the
    function, the target, an update rule or a hook is replaced, or when the `Update` no longer fits.
    """

    update: Any = None
    gives_copies = False  # whether arrays that graphs write are copied for Python, see `Effects`

    def __init__(
        self,
        device: chainer.backend.GpuDevice,
        target: chainer.Link,
        function: Callable,
        optimizer: chainer.Optimizer | None = None,
        seed: int = 0,
        check_every: int = CHECK_EVERY,
    ):
        self.device = device
        self.target = target
        self.function = function
        self.seed = seed
        self.check_every = check_every
        self.capturer = Capturer(device)
        try:
            with chainer.using_device(device), self.capturer.stream:
                self.blas = gemm.Blas()
                self.blas.use(self.capturer.stream)
        except Exception as error:
            text = 'no cuBLAS handle could be made with the library that CuPy has loaded: %r'
            raise CannotCapture(text % error) from error
        self.guards = Guards(target, function, optimizer)
        self._made_for = self._identity(self.guards.key(), target, function)

    def key(self, target, function):
        """Return the `Key` of the values that the guards watch, or None if the session is over."""
        key = self.guards.key()
        if self.update is not None and self.update.is_over:
            return None
        return key if self._identity(key, target, function) == self._made_for else None

    @staticmethod
    def _identity(key, target, function):
        """Return the objects whose replacement ends a session."""
        return [*key.update, function, target]
