"""cuBLAS's batched GEMM as a peer, callable while a CUDA graph is captured.

CuPy refuses its own cuBLAS calls during capture, so this module calls the library that CuPy has
loaded.
"""

import ctypes
import functools

import cupy
import numpy

from benchmarks.peers.tables import Tables
from chainer_bspmm.cuda.gemm import name_of_library, WORKSPACE

DEFAULT_MATH, TF32_MATH = 0, 3


class BatchedGemm:
    """Compute C[b] = A[b] X[b] for all b by ``cublasSgemmStridedBatched``.

    A and X are float32 and C-contiguous. `tf32` allows matrix units, which round inputs to 10 bits.
    """

    def __init__(self, a, x, tf32=False):
        self._a, self._x = a, x
        self.c = cupy.full((len(a), a.shape[1], x.shape[2]), numpy.nan, 'f')
        self._library, self._handle = _handle(tf32)

    def __call__(self):
        self._handle.use(cupy.cuda.get_current_stream().ptr)
        self._multiply(*self._a.shape, n=self._x.shape[2])
        return self.c

    def _multiply(self, batch, m, k, n):
        # cuBLAS is column-major: it reads row-major arrays as transposed, so C^T = X^T A^T.
        _check(
            self._library.cublasSgemmStridedBatched(
                self._handle.number,
                0,
                0,
                n,
                m,
                k,
                ctypes.byref(ctypes.c_float(1)),
                ctypes.c_void_p(self._x.data.ptr),
                n,
                ctypes.c_longlong(k * n),
                ctypes.c_void_p(self._a.data.ptr),
                k,
                ctypes.c_longlong(m * k),
                ctypes.byref(ctypes.c_float(0)),
                ctypes.c_void_p(self.c.data.ptr),
                n,
                ctypes.c_longlong(m * n),
                batch,
            )
        )


class PointerGemm(BatchedGemm):
    """Compute the same in float32 by ``cublasSgemmBatched``, which takes tables of pointers.

    `move_tables`: every call copies the three tables to the device; otherwise they stay there.
    """

    def __init__(self, a, x, move_tables):
        super().__init__(a, x)
        self._tables = Tables([_pointers(array) for array in (x, a, self.c)])
        self._move_tables = move_tables

    def _multiply(self, batch, m, k, n):
        if self._move_tables:
            self._tables.move()
        x, a, c = [ctypes.c_void_p(table.data.ptr) for table in self._tables.device]
        _check(
            self._library.cublasSgemmBatched(
                self._handle.number,
                0,
                0,
                n,
                m,
                k,
                ctypes.byref(ctypes.c_float(1)),
                x,
                n,
                a,
                k,
                ctypes.byref(ctypes.c_float(0)),
                c,
                n,
                batch,
            )
        )


def _pointers(batch):
    step = batch.nbytes // len(batch)
    return numpy.arange(len(batch), dtype=numpy.uint64) * step + batch.data.ptr


class _Handle:
    """A handle of the library, its workspace, and the stream on which it launches."""

    def __init__(self, library, tf32):
        self._library = library
        self._stream = None
        self._workspace = cupy.empty(WORKSPACE, 'u1')
        self.number = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(self.number)))
        _check(library.cublasSetMathMode(self.number, TF32_MATH if tf32 else DEFAULT_MATH))

    def use(self, stream):
        if stream != self._stream:
            _check(self._library.cublasSetStream_v2(self.number, ctypes.c_void_p(stream)))
            _check(
                self._library.cublasSetWorkspace_v2(
                    self.number,
                    ctypes.c_void_p(self._workspace.data.ptr),
                    ctypes.c_size_t(WORKSPACE),
                )
            )
            self._stream = stream


@functools.lru_cache(maxsize=None)
def _handle(tf32):
    """Return the library, and one handle for all products of a kind."""
    cupy.ones((2, 2), 'f').dot(cupy.ones((2, 2), 'f'))  # makes CuPy load the library
    library = ctypes.CDLL(name_of_library())
    return library, _Handle(library, tf32)


def _check(status):
    if status:
        raise RuntimeError('cuBLAS: status %d' % status)
