"""Dense products that a CUDA graph may capture, by a separate cuBLAS handle.

CuPy refuses its cuBLAS calls during capture, because its handle may allocate. The handle made here
has its workspace from the start. Calls go through ctypes to the library that CuPy has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any
import weakref

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import step

WORKSPACE = 32 << 20  # bytes; NVIDIA recommends 32 MiB for Hopper, and 4 MiB for others

# Values of cudaDataType_t, cublasComputeType_t, cublasMath_t and cublasGemmAlgo_t in the headers.
DATA_TYPES = {'f': 0, 'd': 1, 'e': 2}
COMPUTE_32F, COMPUTE_32F_PEDANTIC, COMPUTE_32F_FAST_TF32 = 68, 69, 77
COMPUTE_64F, COMPUTE_64F_PEDANTIC = 70, 71
MATH_MODE = 16  # default (no TF32), and CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
DEFAULT_ALGORITHM = -1
LARGEST_INT = 2**31 - 1

# CuPy's compute types, which CUPY_TF32 or cupy._core.set_compute_type sets.
CUPY_PEDANTIC, CUPY_TF32 = 2, 7

# alpha and beta, adjacent in memory, in the compute type; cuBLAS reads them during the call.
FACTORS: dict[str, numpy.ndarray] = {
    'e': numpy.array([1, 0], numpy.float32),
    'f': numpy.array([1, 0], numpy.float32),
    'd': numpy.array([1, 0], numpy.float64),
}

STATUS = {
    1: 'NOT_INITIALIZED',
    3: 'ALLOC_FAILED',
    7: 'INVALID_VALUE',
    8: 'ARCH_MISMATCH',
    11: 'MAPPING_ERROR',
    13: 'EXECUTION_FAILED',
    14: 'INTERNAL_ERROR',
    15: 'NOT_SUPPORTED',
    16: 'LICENSE_ERROR',
}


class Library:
    """The few cuBLAS calls that are needed here; a failure raises RuntimeError with its status."""

    def __init__(self, name):
        library = ctypes.CDLL(name)

        def call(symbol, *types):
            function = getattr(library, symbol)
            function.argtypes, function.restype = types, ctypes.c_int
            return functools.partial(_checked, symbol, function)

        number, pointer = ctypes.c_int, ctypes.c_void_p
        self._create = call('cublasCreate_v2', pointer)
        self.destroy = call('cublasDestroy_v2', pointer)
        self.set_stream = call('cublasSetStream_v2', pointer, pointer)
        self.set_workspace = call('cublasSetWorkspace_v2', pointer, pointer, ctypes.c_size_t)
        self.set_math_mode = call('cublasSetMathMode', pointer, number)
        orders_and_sizes = [number] * 5  # transa, transb, m, n, k
        matrix = [pointer, number, number]  # address, type, leading dimension
        stack = [*matrix, ctypes.c_longlong]  # stride: elements from one matrix to the next

        def up_to_c(of_each):
            return [
                pointer,  # handle
                *orders_and_sizes,
                pointer,  # alpha
                *of_each,  # A
                *of_each,  # B
                pointer,  # beta
                *of_each,  # C
            ]

        count = number  # of matrices
        type_and_algorithm = [number, number]  # compute type, algorithm
        self.gemm_ex = call('cublasGemmEx', *up_to_c(matrix), *type_and_algorithm)
        self.gemm_strided_batched_ex = call(
            'cublasGemmStridedBatchedEx', *up_to_c(stack), count, *type_and_algorithm
        )
        # Here each pointer leads to an array on the device with the address of every matrix.
        self.gemm_batched_ex = call(
            'cublasGemmBatchedEx', *up_to_c(matrix), count, *type_and_algorithm
        )

    def create(self):
        handle = ctypes.c_void_p()
        self._create(ctypes.byref(handle))
        return handle.value


def _checked(symbol, function, *arguments):
    status = function(*arguments)
    if status:
        text = '%s: CUBLAS_STATUS_%s (%d)'
        raise RuntimeError(text % (symbol, STATUS.get(status, 'UNKNOWN'), status))


@functools.lru_cache(maxsize=None)
def cublas():
    """Return the `Library`, which is loaded once."""
    cuda.cupy.ones((2, 2), 'f').dot(cuda.cupy.ones((2, 2), 'f'))  # makes CuPy load cuBLAS
    return Library(name_of_library())


def name_of_library():
    """Return the file name of CuPy's cuBLAS; loading that again returns the loaded library."""
    # The version of CUDA that CuPy was built for.
    major = cuda.cupy.cuda.runtime.runtimeGetVersion() // 1000
    return ('cublas64_%d.dll' if sys.platform == 'win32' else 'libcublas.so.%d') % major


class Blas:
    """Products of CuPy arrays on the current stream, which may be under capture.

    The arrays must be on the device that is current at construction. Make a `Blas` outside of
    capture, and keep it as long as any graph that captured its calls, because the graph's kernels
    use its workspace. It must not be collected during a capture either: its finalizer destroys the
    handle, which synchronises the device.

    float16 is multiplied and summed in float32, partial sums included. TF32 is requested only where
    CuPy would request it: if ``CUPY_TF32=1`` or ``cupy._core.set_compute_type`` says so, and never
    for stacks. Deterministic on one kind of device and version of cuBLAS.
    """

    def __init__(self):
        self.device = cuda.cupy.cuda.runtime.getDevice()
        self._stream = None
        self._library = cublas()
        self._workspace = cuda.cupy.empty(WORKSPACE, numpy.uint8)
        self._handle = self._library.create()
        # The finalizer does not run at exit, when CUDA may be gone already; the driver cleans up.
        weakref.finalize(self, self._library.destroy, self._handle).atexit = False
        self._library.set_math_mode(self._handle, MATH_MODE)
        self.use(cuda.cupy.cuda.get_current_stream())

    def use(self, stream):
        """Launch on a stream from now on; called before a capture, not by every product."""
        if stream.ptr != self._stream:
            self._library.set_stream(self._handle, stream.ptr)
            # With a new stream, cuBLAS forgets the workspace.
            self._library.set_workspace(self._handle, self._workspace.data.ptr, WORKSPACE)
            self._stream = stream.ptr

    def dot(self, a, b, to=None):
        """Multiply two matrices or vectors, as ``cupy.dot`` does; the result is C-contiguous.

        Row-major and column-major arrays are read in place; all others are copied first. If `to` is
        given, a C-contiguous array, the product of two matrices is added to it in place.
        """
        if a.ndim == b.ndim == 2:
            return self._matrices(a, b, to)
        if not 1 <= a.ndim <= 2 or not 1 <= b.ndim <= 2:
            text = 'a, b: expected one or two dimensions, got shapes %s and %s'
            raise ValueError(text % (a.shape, b.shape))
        return _of_vectors(self._matrices, a, b)

    def matmul(self, a, b):
        """Multiply stacks of matrices, as ``cupy.matmul`` does, with the errors of :meth:`dot`."""
        if a.ndim <= 2 and b.ndim <= 2:
            return self.dot(a, b)
        if a.ndim == 1 or b.ndim == 1:
            return _of_vectors(self.matmul, a, b)
        lead = numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        stacks = []
        for array in (a, b):
            shape = array.shape[-2:]
            if array.shape[:-2] != lead:
                array = cuda.cupy.broadcast_to(array, lead + shape)
            stacks.append(array.reshape((int(numpy.prod(lead)),) + shape))
        return self._matrices(*stacks).reshape(lead + (a.shape[-2], b.shape[-1]))

    def dot_selected(self, a, matrices, which):
        """Multiply a stack of matrices as :func:`dot_selected` does."""
        self._check(a, matrices)
        for name, array in (('a', a), ('matrices', matrices)):
            if array.dtype.char not in 'fd':
                text = '%s: expected float32 or float64, got %s'
                raise TypeError(text % (name, array.dtype))
        count, m, k = a.shape
        n = matrices.shape[-1]
        with cuda.cupy.cuda.Device(self.device):
            if 0 in (count, m, n, k):
                return cuda.cupy.zeros((count, m, n), a.dtype)
            self.use(cuda.cupy.cuda.get_current_stream())
            a, is_a_transposed, lda = _laid_out(a)
            b, is_b_transposed, ldb = _laid_out(matrices)
            c = cuda.cupy.empty((count, m, n), a.dtype)
            table = _addresses(which, a, b, c)
            of_a, of_b, of_c = (table.data.ptr + i * count * table.itemsize for i in range(3))
            type_, factors = DATA_TYPES[a.dtype.char], FACTORS[a.dtype.char]
            # The addresses are on the device, so cuBLAS cannot check their alignment, although in
            # TF32 it reads 16 bytes at a time.
            are_aligned = not any((x.data.ptr | x.strides[0]) % 16 for x in (a, b, c))
            # As in `_matrices`, cuBLAS computes C^T = B^T A^T.
            self._library.gemm_batched_ex(
                self._handle,
                is_b_transposed,
                is_a_transposed,
                n,
                m,
                k,
                factors.ctypes.data,
                of_b,
                type_,
                ldb,
                of_a,
                type_,
                lda,
                factors.ctypes.data + factors.itemsize,
                of_c,
                type_,
                n,
                count,
                compute_type(a.dtype) if are_aligned or not is_tf32(a.dtype) else COMPUTE_32F,
                DEFAULT_ALGORITHM,
            )
        return c

    def _matrices(self, a, b, to=None):
        """Multiply two matrices, or two stacks of the same number of matrices.

        `to` is as in :meth:`dot`, for two matrices only.
        """
        self._check(a, b)
        dtype = a.dtype if a.dtype == b.dtype else numpy.promote_types(a.dtype, b.dtype)
        shape = a.shape[:-1] + b.shape[-1:]
        m, k = a.shape[-2:]
        n = b.shape[-1]
        with cuda.cupy.cuda.Device(self.device):
            if 0 in (*shape, k):
                return cuda.cupy.zeros(shape, dtype) if to is None else to
            self.use(cuda.cupy.cuda.get_current_stream())
            a, is_a_transposed, lda = _laid_out(a.astype(dtype, copy=False))
            b, is_b_transposed, ldb = _laid_out(b.astype(dtype, copy=False))
            if max(*shape, k, lda, ldb) > LARGEST_INT:
                text = 'a, b: expected dimensions and strides below 2**31, got shapes %s and %s'
                raise ValueError(text % (a.shape, b.shape))
            c = cuda.cupy.empty(shape, dtype) if to is None else to
            type_, factors = DATA_TYPES[dtype.char], FACTORS[dtype.char]
            one = factors.ctypes.data
            zero = factors.ctypes.data + factors.itemsize
            beta = zero if to is None else one
            # cuBLAS is column-major. It computes C^T = B^T A^T, so b comes first, and n before m.
            if a.ndim == 2:
                self._library.gemm_ex(
                    self._handle,
                    is_b_transposed,
                    is_a_transposed,
                    n,
                    m,
                    k,
                    one,
                    b.data.ptr,
                    type_,
                    ldb,
                    a.data.ptr,
                    type_,
                    lda,
                    beta,
                    c.data.ptr,
                    type_,
                    n,
                    compute_type(dtype),
                    DEFAULT_ALGORITHM,
                )
            else:
                self._library.gemm_strided_batched_ex(
                    self._handle,
                    is_b_transposed,
                    is_a_transposed,
                    n,
                    m,
                    k,
                    one,
                    b.data.ptr,
                    type_,
                    ldb,
                    b.strides[0] // b.itemsize,
                    a.data.ptr,
                    type_,
                    lda,
                    a.strides[0] // a.itemsize,
                    zero,
                    c.data.ptr,
                    type_,
                    n,
                    m * n,
                    len(a),
                    COMPUTE_64F if dtype.char == 'd' else COMPUTE_32F,
                    DEFAULT_ALGORITHM,
                )
        return c

    def _check(self, a, b):
        for name, array in (('a', a), ('b', b)):
            if array.dtype.char not in DATA_TYPES:
                text = '%s: expected float16, float32 or float64, got %s'
                raise TypeError(text % (name, array.dtype))
            if array.data.device_id != self.device:
                text = '%s: expected an array on device %d, like the cuBLAS handle, got device %d'
                raise ValueError(text % (name, self.device, array.data.device_id))
        if a.shape[-1] != b.shape[-2]:
            text = 'b: expected %d rows to go with a of shape %s, got shape %s'
            raise ValueError(text % (a.shape[-1], a.shape, b.shape))


def _addresses(which, a, b, c):
    """Return the addresses (3, n) uint64 of a[i], b[which[i]] and c[i]."""
    table = cuda.cupy.empty((3, len(which)), numpy.uint64)
    cuda.elementwise(
        'S which, uint64 a, uint64 b, uint64 c, uint64 step_a, uint64 step_b, uint64 step_c',
        'raw uint64 table',
        """
        table[i] = a + i * step_a;
        table[_ind.size() + i] = b + which * step_b;
        table[2 * _ind.size() + i] = c + i * step_c;""",
        'bspmm_addresses',
    )(which, *(array.data.ptr for array in (a, b, c)), *(x.strides[0] for x in (a, b, c)), table)
    return table


def _of_vectors(product, a, b):
    """Return the product if a, b or both are vectors, computed as a product of matrices."""
    c = product(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
    shape = c.shape[:-1] if b.ndim == 1 else c.shape
    if a.ndim == 1:
        at = c.ndim - 2
        shape = shape[:at] + shape[at + 1 :]
    return c.reshape(shape)


def _laid_out(a):
    """Return (array that cuBLAS can read, order, leading dimension) for a matrix or stack."""
    # The order is 0 for row-major, 1 for column-major. It is also the operation to pass to cuBLAS,
    # which is asked for the transposed product, and reads a row-major matrix as its transpose.
    size = a.itemsize
    n_rows, n_columns = a.shape[-2:]
    *stack, down, along = a.strides
    if min(stack, default=0) >= 0 and not any(stride % size for stride in a.strides):
        if (along == size or n_columns == 1) and (down >= n_columns * size or n_rows == 1):
            return a, 0, n_columns if n_rows == 1 else down // size
        if down == size and along >= n_rows * size:
            return a, 1, along // size
    return cuda.cupy.ascontiguousarray(a), 0, n_columns


def compute_type(dtype):
    """Return the cublasComputeType_t that CuPy would request for a product of this dtype."""
    chosen = cuda.cupy._core.get_compute_type(dtype)
    if dtype.char == 'd':
        return COMPUTE_64F_PEDANTIC if chosen == CUPY_PEDANTIC else COMPUTE_64F
    if chosen == CUPY_PEDANTIC:
        return COMPUTE_32F_PEDANTIC
    return COMPUTE_32F_FAST_TF32 if is_tf32(dtype) else COMPUTE_32F


def is_tf32(dtype):
    """Return whether CuPy is asked for products of this dtype in TF32."""
    return dtype.char == 'f' and cuda.cupy._core.get_compute_type(dtype) == CUPY_TF32


# Sizes of layers that are faster as products by cuBLAS, with launches before and after them, than
# as one kernel: (least width of the narrower side, least number of rows, most matrices). Measured
# on an H200 in steps of RSGCN, GIN and GGNN.
ANY = 1 << 30
FASTER_IN_FLOAT32 = (256, 1024, ANY), (192, 4096, ANY), (96, 8192, 1)
# Only cuBLAS multiplies in TF32. If TF32 is on, the number of rows must not decide, because spare
# rows would then change a layer's precision. These are the least width of the narrower side, and
# the fewest elements of a matrix. RelGCN's readout, which maps 64 channels to 256, is such a layer.
NARROWEST_IN_TF32 = 64
LEAST_IN_TF32 = 128 * 128


def products_are_faster(dtype, n_rows, n_in, n_out, n_matrices) -> bool:
    """Return whether cuBLAS computes a layer of this size faster; False except in float32."""
    if dtype.char != 'f':
        return False
    narrower = min(n_in, n_out)
    if is_tf32(dtype):
        return narrower >= NARROWEST_IN_TF32 and n_in * n_out >= LEAST_IN_TF32
    return any(
        narrower >= width and n_rows >= rows and n_matrices <= matrices
        for width, rows, matrices in FASTER_IN_FLOAT32
    )


_of_thread = threading.local()  # `of_device`: number of a device -> `Blas` of this thread


def _blas_of_thread():
    """Return a `Blas` for products outside of captured steps, on the current device."""
    of_device = vars(_of_thread).setdefault('of_device', {})
    device = cuda.cupy.cuda.runtime.getDevice()
    if device not in of_device:
        of_device[device] = Blas()
    return of_device[device]


def step_for(array):
    """Return the current step for products with an array on a GPU; None for a NumPy array."""
    return None if isinstance(array, numpy.ndarray) else step.current()


def dot(a: Any, b: Any, to: Any = None) -> Any:
    """Compute ``a.dot(b)`` of NumPy or CuPy arrays; in a captured step the step's `Blas` does it.

    If `to` is given, a C-contiguous matrix of the product's shape and dtype, the product is added
    to it in place, and `to` is returned.
    """
    current = step_for(a)
    if current is not None:
        return current.blas.dot(a, b, to)
    product = a.dot(b)
    if to is None:
        return product
    to += product
    return to


def dot_selected(a: Any, matrices: Any, which: Any) -> Any:
    """Compute ``a[i].dot(matrices[which[i]])`` for each i, in one call of cuBLAS on a GPU.

    Args:
        a (array): stack of matrices (n, m, k), float32 or float64.
        matrices (array): matrices (any number, k, n_out) of the same dtype.
        which (array): (n,) int32, positions in `matrices`.

    Returns:
        array: (n, m, n_out).
    """
    if isinstance(a, numpy.ndarray):
        return numpy.matmul(a, matrices[which])
    current = step_for(a)
    with cuda.cupy.cuda.Device(a.data.device_id):
        blas = _blas_of_thread() if current is None else current.blas
        return blas.dot_selected(a, matrices, which)
