"""`Work`: the computation of a program on the arrays of a batch."""

import contextlib
from typing import Any

import numpy

import chainer

from chainer_bspmm.cuda import gemm

# Relative differences that spare rows may make, because products of another shape may round in
# another way.
SPARE_TOLERANCE = {'float16': 3e-2, 'float32': 1e-3, 'float64': 1e-6}


class Work:
    """A training step or a prediction: `compute`, then `complete`.

    With `is_split`, an `exchange` with other ranks comes between the two, outside of any graph.
    `has_others`: whether it is a part of a step of several ranks.
    """

    name: str  # word for it in messages
    n_numbers: int | None = None  # count of the optimizer's numbers that are sent with every batch
    refusal: str | None = None  # why trials have shown that the work cannot be captured
    copies_results = False  # whether results are copied; if not, the next replay overwrites them
    changes_parameters = True
    is_split: Any = False
    has_others = False
    is_done = False  # whether an update was run since the caller set this to False

    def under_way(self, step, alone) -> contextlib.AbstractContextManager:
        """Context in which a `cuda.step.Step` is current; `alone`: without other ranks."""
        raise NotImplementedError

    def compute(self, arrays, mode, alone=False) -> dict[str, Any]:
        """Run on the arrays (tuple) of a batch; return name -> array.

        `mode` is 'eager', 'trial' (the run will be undone), 'captured' (no kernel runs), or
        'forward' (the run only makes parameters, and its result is not used).
        """
        raise NotImplementedError

    def load_kernels(self):
        """Compile the kernels that `complete` launches."""

    def complete(self, numbers):
        """Run the part after `compute`, the update; `numbers`: (n_numbers,) on the device."""

    def exchange(self):
        """Exchange data with other ranks between both parts; all ranks call it equally often."""

    def outcome(self, results) -> dict[str, Any]:
        """Return name -> array, in which a replay and an eager run must be equal bit for bit."""
        return results

    def summary(self, results) -> dict[str, Any]:
        """Return name -> array, in which trials with and without spare rows are compared."""
        return results

    def difference(self, actual, expected):
        """Describe (str or None) a difference of two summaries that spare rows must not make."""
        raise NotImplementedError


def spare_tolerance(dtype, model):
    """Return the relative difference (float) that spare rows may make in results of a dtype."""
    names = {dtype.name, *(param.dtype.name for param in model.params(include_uninit=False))}
    # Where TF32 is allowed, cuBLAS may take it for one number of rows and not for another. It
    # rounds factors to as many bits as float16 has.
    if 'float32' in names and model.device.xp is not numpy and gemm.is_tf32(numpy.dtype('f')):
        names.add('float16')
    return max(SPARE_TOLERANCE[name] for name in names)


def as_arrays(values):
    """Convert name -> variable or array to name -> array."""
    return {name: chainer.as_array(value) for name, value in values.items()}
