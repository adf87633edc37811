"""cuSPARSE's sparse products as peers, callable while a CUDA graph is captured.

CuPy refuses its own cuSPARSE calls during capture, so this module calls the library that CuPy has
loaded, through its generic interface. All arrays are float32 or float64 and C-contiguous; indices
are int32.
"""

import collections.abc
import ctypes
import functools
import pathlib
import re

import cupy
import numpy

# Values of enumerations in cusparse.h and library_types.h.
INDEX_32I, INDEX_BASE_ZERO, NON_TRANSPOSE, ORDER_ROW = 2, 0, 0, 2
VALUE_TYPES = {'f': 0, 'd': 1}  # CUDA_R_32F, CUDA_R_64F
SPMM_ALGORITHMS = {'csr alg1': 4, 'csr alg2': 6, 'csr alg3': 12, 'bsr alg1': 14}
SCALARS = {'f': ctypes.c_float, 'd': ctypes.c_double}

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p


def csr(indptr, indices, data, n_cols):
    """Return a descriptor of an (n_rows, n_cols) matrix in CSR."""
    return _Descriptor(
        'cusparseCreateCsr',
        'cusparseDestroySpMat',
        data.dtype,
        [_int64(indptr.size - 1), _int64(n_cols), _int64(data.size)],
        [indptr, indices, data],
        [INDEX_32I, INDEX_32I, INDEX_BASE_ZERO, VALUE_TYPES[data.dtype.char]],
    )


def bsr(indptr, indices, data, n_block_cols):
    """Return a descriptor of a matrix in BSR; data (n_blocks, size, size), row-major blocks."""
    n_blocks, height, width = data.shape
    return _Descriptor(
        'cusparseCreateBsr',
        'cusparseDestroySpMat',
        data.dtype,
        [
            _int64(indptr.size - 1),
            _int64(n_block_cols),
            _int64(n_blocks),
            _int64(height),
            _int64(width),
        ],
        [indptr, indices, data],
        [INDEX_32I, INDEX_32I, INDEX_BASE_ZERO, VALUE_TYPES[data.dtype.char], ORDER_ROW],
    )


def version():
    """Return the version of the library (int), such as 12603."""
    number = ctypes.c_int()
    _call('cusparseGetVersion', _handle().number, ctypes.byref(number))
    return number.value


class _Product:
    """Compute y = A x by cuSPARSE, with descriptors, buffer and analysis made once.

    The analysis is stored in the matrix, from :func:`csr` or :func:`bsr`, so each product needs a
    separate matrix. `algorithm`: a key of `_algorithms`.
    """

    _name: str
    _algorithms: dict
    _n_operations: int
    _dense: collections.abc.Callable

    def __init__(self, matrix, x, y, algorithm):
        scalar = SCALARS[x.dtype.char]
        self._scalars = scalar(1), scalar(0)  # kept, because the library reads them at every call
        self._operands = matrix, self._dense(x), self._dense(y)
        self._number = self._algorithms[algorithm]
        self._y = y
        self._type = VALUE_TYPES[x.dtype.char]
        n_bytes = ctypes.c_size_t()
        self._run('_bufferSize', ctypes.byref(n_bytes))
        self._buffer = cupy.empty(max(n_bytes.value, 1), 'u1')
        self._run('_preprocess', _pointer(self._buffer.data.ptr))

    def __call__(self):
        """Launch the product on the current stream; return y."""
        self._run('', _pointer(self._buffer.data.ptr))
        return self._y

    def _run(self, step, last):
        alpha, beta = map(ctypes.byref, self._scalars)
        matrix, x, y = [operand.handle for operand in self._operands]
        _handle().use(cupy.cuda.get_current_stream().ptr)
        _call(
            self._name + step,
            _handle().number,
            *[NON_TRANSPOSE] * self._n_operations,
            alpha,
            matrix,
            x,
            beta,
            y,
            self._type,
            self._number,
            last,
        )


class SpMM(_Product):
    """Product with a matrix x, (n_cols, n_B), into y, (n_rows, n_B); see `_Product`."""

    _name = 'cusparseSpMM'
    _algorithms = SPMM_ALGORITHMS
    _n_operations = 2

    @staticmethod
    def _dense(array):
        return _Descriptor(
            'cusparseCreateDnMat',
            'cusparseDestroyDnMat',
            array.dtype,
            [_int64(array.shape[0]), _int64(array.shape[1]), _int64(array.shape[1])],
            [array],
            [VALUE_TYPES[array.dtype.char], ORDER_ROW],
        )


class _Descriptor:
    """A descriptor of the library, which keeps alive the arrays to which it points."""

    def __init__(self, create, destroy, dtype, sizes, arrays, numbers):
        self._arrays, self._destroy = arrays, destroy
        for array in arrays:
            assert array.flags.c_contiguous and array.dtype in (dtype, numpy.int32), array.dtype
        self.handle = _pointer()
        _call(
            create,
            ctypes.byref(self.handle),
            *sizes,
            *[_pointer(array.data.ptr) for array in arrays],
            *numbers,
        )

    def __del__(self):
        if self.handle:
            _call(self._destroy, self.handle)


@functools.lru_cache(maxsize=None)
def _library():
    cupy.cuda.device.get_cusparse_handle()  # makes CuPy load it
    # The library is found by its path, because its version number differs from CUDA's.
    maps = pathlib.Path('/proc/self/maps').read_text()
    return ctypes.CDLL(re.search(r'\S*/libcusparse\.so\S*', maps).group())


class _Handle:
    """The library's handle, and the stream on which it launches."""

    def __init__(self):
        self._stream = None
        self.number = _pointer()
        _call('cusparseCreate', ctypes.byref(self.number))

    def use(self, stream):
        if stream != self._stream:
            _call('cusparseSetStream', self.number, _pointer(stream))
            self._stream = stream


@functools.lru_cache(maxsize=None)
def _handle():
    return _Handle()


def _call(name, *arguments):
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError('%s: status %d' % (name, status))
