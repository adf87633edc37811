"""`Work`: what a program does with the arrays of a batch."""

import contextlib
from typing import Any

import chainer

# Between a batch and the same batch with spare rows: products of other shapes round differently.
SPARE_TOLERANCE = {'float16': 3e-2, 'float32': 1e-3, 'float64': 1e-6}


class Work:
    """A training step or a prediction: `compute`, then `complete` what follows it.

    Where `is_split`, an `exchange` with other ranks comes between the two, which no graph has.
    `has_others`: what is computed is a part of a step of several ranks.
    """

    name: str  # in messages
    n_numbers: int | None = None  # of the optimizer, that are sent with every batch
    copies_results = False  # or the next replay overwrites them
    changes_parameters = True
    is_split: Any = False
    has_others = False
    is_done = False  # whether an update was run since the caller has set this to False

    def under_way(self, step, alone) -> contextlib.AbstractContextManager:
        """Make a `cuda.step.Step` current; alone: without other ranks."""
        raise NotImplementedError

    def compute(self, arrays, mode, alone=False) -> dict[str, Any]:
        """Run on the arrays (tuple) of a batch; return name -> array.

        `mode` is 'eager', 'trial' (what it does is undone), 'captured' (nothing runs), or 'forward'
        (which is to make parameters; the result is of no use).
        """
        raise NotImplementedError

    def load_kernels(self):
        """Compile the kernels that `complete` launches."""

    def complete(self, numbers):
        """Run what follows; numbers: (n_numbers,) on the device."""

    def exchange(self):
        """Do what comes between; all ranks call it as often."""

    def outcome(self, results) -> dict[str, Any]:
        """Return name -> array: what a replay and an eager run give to the bit, beside state."""
        return results

    def summary(self, results) -> dict[str, Any]:
        """Return name -> array: what a trial gives with and without spare rows."""
        return results

    def difference(self, actual, expected):
        """Return how (str or None) two summaries differ by more than what spare rows may change."""
        raise NotImplementedError


def spare_tolerance(dtype, model):
    """Return how much (float) spare rows may change results of a dtype."""
    dtypes = dtype, *(param.dtype for param in model.params(include_uninit=False))
    return max(SPARE_TOLERANCE[each.name] for each in dtypes)


def as_arrays(values):
    """Return name -> array of name -> variable or array."""
    return {name: chainer.as_array(value) for name, value in values.items()}
