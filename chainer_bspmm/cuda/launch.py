"""Launch a kernel on arrays: on their device and its current stream, without synchronising."""

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, plans

NULL = numpy.uintp(0)


def on_gpu(x):
    """Return whether an array is on a GPU."""
    return isinstance(x, cuda.ndarray)


def contiguous(array):
    """Return the array, or a C-contiguous copy if it is not C-contiguous; None stays None."""
    if array is None or array.flags.c_contiguous:
        return array
    return cuda.cupy.ascontiguousarray(array)


def address_bits(*arrays):
    """Return the bits (int) that are set in any of the arrays' addresses; None has no address."""
    bits = 0
    for array in arrays:
        if array is not None:
            bits |= array.data.ptr
    return bits


def vector_width(n_channels, *arrays):
    """Return the number of elements of a row that a thread moves at once.

    All arrays but the first may be None.
    """
    return plans.widest_vector(n_channels, arrays[0].itemsize, address_bits(*arrays))


def arithmetic(dtype):
    """Return the NumPy type in which kernels calculate for a storage dtype, common.cuh's `Real`."""
    return numpy.float64 if dtype == numpy.float64 else numpy.float32


class device_of:
    """Context in which the device of an array is current; costs nothing if it is already."""

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


def run(name, like, plan: plans.Launch, *arguments, numbers=(), storage=None, **constants):
    """Launch the kernel of a file by a plan; `constants` are compiled in, like the plan's.

    `like` is an array on the device. Its dtype is the kernel's storage dtype, unless `storage` is
    the letter of another one. The kernel gets `arguments` (None is a null pointer), then the sizes
    of the plan, then `numbers`.
    """
    defines = plan.defines + tuple(constants.items())
    kernel = kernels.load(like.data.device_id, name, storage or like.dtype.char, defines)
    pointers = [NULL if x is None else x for x in arguments]
    kernel(plan.grid, plan.block, (*pointers, *plan.arguments, *numbers), plan.shared_bytes)
