"""Launch a kernel on arrays: on their device and its current stream, without synchronising."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels

NULL = numpy.uintp(0)


def or_null(array):
    """Return the array, or the null pointer for None, as kernels take it."""
    return NULL if array is None else array


def contiguous(array):
    """Return the array C-contiguous, copied only where it is not; None stays None."""
    if array is None or array.flags.c_contiguous:
        return array
    return cuda.cupy.ascontiguousarray(array)


def address_bits(*arrays):
    """Return the bits (int) that are set in any of the addresses; None has no address."""
    bits = 0
    for array in arrays:
        if array is not None:
            bits |= array.data.ptr
    return bits


def arithmetic(dtype):
    """Return the NumPy type that kernels calculate in for a storage dtype: `Real` of common.cuh."""
    return numpy.float64 if dtype == numpy.float64 else numpy.float32


class device_of:
    """Make the device of an array current; costs nothing if it is current already."""

    def __init__(self, x):
        self._id = x.data.device_id

    def __enter__(self):
        runtime = cuda.cupy.cuda.runtime
        self._previous = runtime.getDevice()
        if self._previous != self._id:
            runtime.setDevice(self._id)

    def __exit__(self, *_):
        if self._previous != self._id:
            cuda.cupy.cuda.runtime.setDevice(self._previous)


def run(device_id, name, dtype_char, launch, arguments, defines=()):
    """Launch a kernel as planned; the first call with these constants compiles it.

    `arguments` include ``launch.arguments``; `defines` are in addition to those of the plan.
    """
    kernel = kernels.load(device_id, name, dtype_char, launch.defines + defines)
    kernel(launch.grid, launch.block, arguments, launch.shared_bytes)
