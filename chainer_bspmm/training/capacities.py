"""Buffer sizes for batches of a data set: few of them, so that few graphs are captured."""

import collections

import numpy

# What a batch asks of its buffers; every number is an upper bound.
Capacity = collections.namedtuple('Capacity', 'rows entries max_rows max_entries max_atom_id')

STEP = 64  # rows and entries come in multiples of it
SPARE = 1.1  # a size made from a batch, not from a data set, holds one so much larger
DEVIATIONS = 1, 4  # standard deviations above the mean batch that the two sizes of a data set hold


def needs(sizes, entries, max_atom_id):
    """Return the `Capacity` that a batch just fills.

    Args:
        sizes, entries (array): (n_graphs,) nodes and adjacency entries of its molecules.
        max_atom_id (int or None): the largest atom id; None where nodes have features.
    """
    return Capacity(
        int(sizes.sum()),
        int(entries.sum()),
        int(sizes.max(initial=0)),
        int(entries.max(initial=0)),
        -1 if max_atom_id is None else max_atom_id,
    )


def bound(values, n_graphs, deviations):
    """Return a size that holds sums which lie so many standard deviations above the mean one.

    Args:
        values (array): (M,) what is summed up, of all molecules of a data set.
        n_graphs (int): molecules of a batch.
        deviations (float): of such sums.

    Returns:
        int: a multiple of ``STEP``; not 0.
    """
    # No batch without repeated molecules holds more than the largest n_graphs of them.
    return round_up(
        min(
            n_graphs * values.mean() + deviations * numpy.sqrt(n_graphs) * values.std(),
            numpy.sort(values)[-n_graphs:].sum() + 1,
        )
    )


def round_up(number):
    """Return the multiple of ``STEP`` (int) that a number of rows or entries needs; not 0."""
    return max(1, -(-int(numpy.ceil(number)) // STEP)) * STEP


class Capacities:
    """Choose a capacity for each batch of one number of graphs.

    Args:
        sizes, entries (array or None): (M,) nodes and adjacency entries of all molecules of the
            data set, where they are known. Sums over n_graphs of them drawn at random are close to
            normal: one size holds five batches of six, the next all but one of 30,000.
        n_graphs (int): molecules of a batch.
        max_atom_id (int or None): the largest atom id of the data set.

    Without a data set's sizes, and for a batch that is larger still, a size is made from the batch.
    """

    def __init__(self, n_graphs, sizes=None, entries=None, max_atom_id=None):
        self._levels = []
        if sizes is None or not len(sizes):
            return
        largest = needs(sizes, entries, max_atom_id)
        for deviations in DEVIATIONS:
            rows, total = (bound(values, n_graphs, deviations) for values in (sizes, entries))
            self._levels.append(largest._replace(rows=rows, entries=total))

    def of(self, need):
        """Return the smallest size that holds a batch.

        Args:
            need (Capacity): of :func:`needs`.

        Returns:
            Capacity: at least ``need``, number by number; there are always rows and entries to
            spare, so that a model whom those disturb is found out.
        """
        need = need._replace(rows=need.rows + 1, entries=need.entries + 1)
        for level in self._levels:
            if all(has >= asked for has, asked in zip(level, need)):
                return level
        largest = self._levels[-1] if self._levels else Capacity(0, 0, 0, 0, -1)
        self._levels.append(
            Capacity(
                max(largest.rows, round_up(need.rows * SPARE)),
                max(largest.entries, round_up(need.entries * SPARE)),
                *(max(pair) for pair in zip(largest[2:], need[2:])),
            )
        )
        return self._levels[-1]
