"""Numbers that a captured step reports, which its graph writes to a new row at each replay."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.compat import late_sums
from chainer_bspmm.cuda import kernels, plans
from chainer_bspmm.cuda.launch import run

N_ROWS = 256  # rows that are allocated at once; a replay takes one
WIDTH = 8  # bytes of a number, whatever its dtype
_N_VALUES = 128  # most numbers that one launch writes
_TABLE = numpy.dtype(
    [('value', numpy.uintp, _N_VALUES), ('bytes', numpy.int32, _N_VALUES)], align=True
)
_STORAGE = 'f'  # any dtype will do, because the kernel copies bytes
DEFINES = (('VECTOR', 1), ('N_VALUES', _N_VALUES), ('TABLE_BYTES', _TABLE.itemsize))


def host_numbers(values):
    """Select the plain numbers of Python and NumPy from a dict; return them as arrays, ()."""
    plain = {
        name: numpy.asarray(value)
        for name, value in values.items()
        if type(value) in (bool, int, float, complex) or isinstance(value, numpy.generic)
    }
    # Text and dates are no numbers, and integers of more than 64 bits become objects.
    return {name: array for name, array in plain.items() if array.dtype.kind in 'biufc'}


class Reports:
    """Numbers that the replays of one captured step report, without a launch for each number.

    A reported number is a view of the replay's row, which is never overwritten.
    """

    def __init__(self, device):
        self._device = device
        self._kinds = []  # (name, dtype) of every number
        self._table = None  # (N_ROWS, n) uint64
        self._rows = None  # the memory of the table
        self._stream = None  # the stream on which the rows were allocated
        self._row = N_ROWS  # index of the next row
        self._load()  # compiles the kernel now, because a capture should not

    def among(self, values):
        """Select the single numbers on the device from a dict; the caller copies other arrays."""
        kind = self._device.xp.ndarray
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, kind) and value.ndim == 0 and value.itemsize <= WIDTH
        }

    def write(self, numbers, row_address):
        """Launch the kernel that writes numbers of shape () to the row at an address."""
        self._kinds = [(name, array.dtype) for name, array in numbers.items()]
        arrays = list(numbers.values())
        for first in range(0, len(arrays), _N_VALUES):
            part = arrays[first : first + _N_VALUES]
            table = numpy.zeros(1, _TABLE)
            table['value'][0, : len(part)] = [array.data.ptr for array in part]
            table['bytes'][0, : len(part)] = [array.itemsize for array in part]
            run(
                'report',
                row_address,
                plans.Launch(DEFINES, (1, 1, 1), (_N_VALUES, 1, 1)),
                row_address,
                table,
                numbers=(numpy.int32(first), numpy.int32(len(part))),
                storage=_STORAGE,
            )

    def next_row(self):
        """Return the address (int) of a new row, for the next replay on the current stream."""
        if not self._kinds:
            return 0
        stream = cuda.cupy.cuda.get_current_stream().ptr
        # CuPy reuses freed memory on the stream where it was allocated, so a new stream needs new
        # rows.
        if self._row == N_ROWS or stream != self._stream:
            self._table = cuda.cupy.empty((N_ROWS, len(self._kinds)), numpy.uint64)
            late_sums.never_overwritten(self._table)
            self._rows = self._table.data
            self._row = 0
            self._stream = stream
        self._row += 1
        return self._rows.ptr + self._offset()

    def numbers(self):
        """Return name -> array of shape (), the numbers in the last row."""
        if not self._kinds:
            return {}
        start = self._rows + self._offset()
        ndarray = cuda.cupy.ndarray
        return {
            name: ndarray((), dtype, start + WIDTH * i)
            for i, (name, dtype) in enumerate(self._kinds)
        }

    def _offset(self):
        return (self._row - 1) * len(self._kinds) * WIDTH

    def _load(self):
        kernels.load(self._device.device.id, 'report', _STORAGE, DEFINES)
