"""Partial sums, such as every block's part of the gradient of a weight, and their addition.

A captured step (`cuda.step`) defers them, and adds them up together before anything reads them.
"""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import launch, plans, step

# Shape of a block of threads, as in the kernel.
COLUMNS = 32
LANES = 8
# Columns of a thread: one if there are few columns, so that many threads share the work. If there
# are many, a thread adds several, because every block has to find its target first.
EACH, EACH_OF_MANY = 1, 4
MANY = 1 << 17  # columns in all
# Kernel arguments may have 4 KB. The last target in use is followed by one that marks the end.
N_SOURCES, N_TARGETS = 80, 80
_SOURCE = numpy.dtype([('from', 'P'), ('first', 'i'), ('stride', 'i'), ('n_rows', 'i')], align=True)
_TARGET = numpy.dtype(
    [('to', 'P'), ('size', 'i'), ('first_chunk', 'i'), ('first_source', 'i')], align=True
)
_TABLE = numpy.dtype(
    [('source', _SOURCE, N_SOURCES), ('target', _TARGET, N_TARGETS), ('n_targets', 'i')], align=True
)


def defines(each):
    """Return the kernel's constants for threads of `each` columns."""
    return (
        ('VECTOR', 1),
        ('EACH', each),
        ('N_SOURCES', N_SOURCES),
        ('N_TARGETS', N_TARGETS),
        ('TABLE_BYTES', _TABLE.itemsize),
    )


class PendingSums:
    """Deferred sums: the arrays to be written, and the partial sums of each."""

    def __init__(self, shows_reads=False):
        self._sums = {}  # id of an array -> (array, [(partials, first column), ...])
        self._shows_reads = shows_reads

    def add(self, partials, first, shape, dtype):
        """Return a new array for a sum; it is uninitialised until the sum is computed.

        With `shows_reads` it holds NaN until then, for :meth:`are_read_by`.
        """
        array = cuda.cupy.empty(shape, dtype)
        if self._shows_reads:
            array.fill(numpy.nan)
        if array.size:
            self._sums[id(array)] = array, [(partials, first)]
        return array

    def keep(self, array):
        """Register a C-contiguous array that is a sum already; others may be added to it in place.

        Returns the array, or with `shows_reads` another one, as :meth:`add` does.
        """
        if self._shows_reads:
            return self.add(array.reshape(1, -1), 0, array.shape, array.dtype)
        if array.size:
            self._sums[id(array)] = array, [(array.reshape(1, -1), 0)]
        return array

    def chain(self, array, other):
        """Let `array` become the sum of two deferred sums; return False if that is not possible."""
        if id(array) not in self._sums or id(other) not in self._sums or array is other:
            return False
        sources, others = self._sums[id(array)][1], self._sums[id(other)][1]
        if len(sources) + len(others) > N_SOURCES or array.dtype != other.dtype:
            return False
        sources += others
        del self._sums[id(other)]
        return True

    def settle(self, array):
        """Compute the sum of an array now, if it is deferred, because it is about to be read."""
        pending = self._sums.pop(id(array), None)
        if pending is not None:
            _launch([pending])

    def launch(self):
        """Compute all sums, with a launch for up to 79 arrays (or 80 sources) of a dtype."""
        sums = list(self._sums.values())
        self._sums.clear()
        _launch(sums)

    def others_than(self, arrays):
        """Return whether an array outside of `arrays` is deferred; something may have read it."""
        return not self._sums.keys() <= {id(array) for array in arrays}

    def defers(self, array):
        """Return whether an array is a deferred sum."""
        return id(array) in self._sums

    def are_read_by(self, arrays):
        """Return whether an array that is not deferred has a NaN, maybe from a deferred one.

        If a layer's weight is W + B A, for example, the gradient of W is read to compute the
        gradients of A and B. Synchronises.
        """
        return any(id(array) not in self._sums and bool((array != array).any()) for array in arrays)


def _launch(sums):
    by_dtype = {}
    for array, parts in sums:
        # Otherwise the array already holds the sum.
        if len(parts) > 1 or parts[0][0].data.ptr != array.data.ptr:
            by_dtype.setdefault(array.dtype.char, []).append((array, parts))
    for group in by_dtype.values():
        batch = []
        n_sources = 0
        for pending in group:
            n_sources += len(pending[1])
            if len(batch) == N_TARGETS - 1 or n_sources > N_SOURCES:
                _launch_batch(batch)
                batch = []
                n_sources = len(pending[1])
            batch.append(pending)
        _launch_batch(batch)


def _launch_batch(sums):
    each = EACH_OF_MANY if sum(array.size for array, _ in sums) >= MANY else EACH
    sources, targets = [], []
    n_chunks = 0
    for array, parts in sums:
        targets.append((array.data.ptr, array.size, n_chunks, len(sources)))
        for partials, first in parts:
            n_rows, stride = partials.shape
            sources.append((partials.data.ptr, first, stride, n_rows))
        n_chunks += -(-array.size // (COLUMNS * each))
    targets.append((0, 0, n_chunks, len(sources)))
    table = numpy.zeros(1, _TABLE)
    table['source'][0, : len(sources)] = sources
    table['target'][0, : len(targets)] = targets
    table['n_targets'] = len(sums)
    first_array = sums[0][0]
    with launch.device_of(first_array):
        plan = plans.Launch(defines(each), (n_chunks, 1, 1), (COLUMNS, LANES, 1))
        launch.run('sum_partials', first_array, plan, table)


def shared(gradient, n_blocks=1):
    """Split a product into equal blocks of rows, each the gradient of a parameter.

    In a step that defers sums the blocks are deferred sums, so that one launch adds the gradients
    of all layers that share a parameter. Until that launch a block holds one layer's product.
    """
    n = len(gradient) // n_blocks
    blocks = [gradient[i * n : (i + 1) * n] for i in range(n_blocks)]
    current = step.current()
    defers = current is not None and current.sums is not None and launch.on_gpu(gradient)
    if not defers or gradient.dtype == numpy.float16:
        return blocks
    return [current.sums.keep(launch.contiguous(block)) for block in blocks]


def sum_partials(partials, parts):
    """Sum columns of an array on a GPU over its rows.

    For each (first, shape, dtype) of `parts` the result is ``partials[:, first : first +
    prod(shape)].sum(axis=0)``, of that shape and dtype. `partials` has the dtype in which kernels
    calculate. Deterministic: rows are added in a fixed order, without atomics.

    Inside a captured step the sums may be deferred. Then the returned arrays are uninitialised
    until the backward pass ends, so they must be gradients of parameters, which only the update
    reads.
    """
    current = step.current()
    deferred = None if current is None else current.sums
    pending = PendingSums() if deferred is None else deferred
    with launch.device_of(partials):
        arrays = [pending.add(partials, *part) for part in parts]
    if deferred is None:
        pending.launch()
    return arrays
