"""Sizes of the buffers of a captured step, which have room to spare.

A graph reads the same memory at every launch, so buffers have a fixed `Capacity`, a little larger
than the batches. Rows and entries past a batch are called spare.
"""

import math
import operator

import numpy

from chainer_bspmm.dataset.batch_form import Capacity

STEP = 64  # rows and entries are multiples of it
SPARE = 1.1  # factor for a size that is derived from a batch instead of a data set
DEVIATIONS = 1, 4  # standard deviations above the mean batch, for the two sizes of a data set


def bound(values, n_graphs, deviations):
    """Return a multiple of ``STEP`` that bounds most sums of n_graphs of the values, (M,)."""
    # If no molecule is repeated, the n_graphs largest values are a bound, too.
    return round_up(
        min(
            n_graphs * values.mean() + deviations * numpy.sqrt(n_graphs) * values.std(),
            numpy.sort(values)[-n_graphs:].sum() + 1,
        )
    )


def round_up(number):
    """Return the smallest positive multiple of ``STEP`` (int) that is at least `number`."""
    return max(1, -(-int(numpy.ceil(number)) // STEP)) * STEP


class Capacities:
    """Choose a capacity for each batch of n_graphs molecules.

    `sizes` and `entries`, (M,), are the numbers of rows and entries of all molecules of the data
    set, if known; `largest` has the bounds that hold for every molecule. Sums over n_graphs random
    molecules have nearly a normal distribution. So there are two sizes: one holds five batches in
    six, the other all but one in 30,000. Without a data set's sizes, or if a batch exceeds both, a
    size is derived from the batch.
    """

    def __init__(self, n_graphs, sizes=None, entries=None, largest=None):
        self._levels = []
        if sizes is None or not len(sizes):
            return
        for deviations in DEVIATIONS:
            rows = bound(sizes, n_graphs, deviations)
            total = bound(entries, n_graphs, deviations)
            self._levels.append(largest._replace(rows=rows, entries=total))

    def of(self, need):
        """Return the smallest known capacity that holds a batch, or add one."""
        # There is always a spare row and a spare entry, so that a trial with and without them can
        # detect their effect.
        rows, entries, *bounds = need
        needed = rows + 1, entries + 1, *bounds
        for level in self._levels:
            if all(map(operator.ge, level, needed)):
                return level
        largest = self._levels[-1] if self._levels else Capacity(0, 0, 0, 0, -1)
        max_rows, max_entries, max_atom_id = bounds
        with_spare = Capacity(
            round_up((rows + 1) * SPARE),
            round_up((entries + 1) * SPARE),
            math.ceil(max_rows * SPARE),
            math.ceil(max_entries * SPARE),
            max_atom_id,
        )
        self._levels.append(Capacity(*map(max, largest, with_spare)))
        return self._levels[-1]
