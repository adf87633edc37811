"""cuBLAS batched GEMM as a peer, callable while a CUDA graph is captured.

CuPy refuses its own cuBLAS calls during capture, so this calls the library that CuPy has loaded.
"""
import ctypes
import pathlib
import re

import cupy

DEFAULT_MATH, TF32_MATH = 0, 3
WORKSPACE = 32 << 20  # bytes; NVIDIA recommends this much for Hopper


class BatchedGemm:
    """Compute C[b] = A[b] X[b] for all b by ``cublasSgemmStridedBatched``.

    Args:
        a (cupy.ndarray): (batch, m, k) float32, C-contiguous.
        x (cupy.ndarray): (batch, k, n) float32, C-contiguous.
        tf32 (bool): allow the matrix units, which round inputs to 10 bits.
    """

    def __init__(self, a, x, tf32=False):
        self._a, self._x = a, x
        self.c = cupy.empty((len(a), a.shape[1], x.shape[2]), 'f')
        self._workspace = cupy.empty(WORKSPACE, 'u1')
        self._library = ctypes.CDLL(_path())
        self._handle = ctypes.c_void_p()
        self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._check(self._library.cublasSetMathMode(
            self._handle, TF32_MATH if tf32 else DEFAULT_MATH))
        self._stream = None

    def __call__(self):
        stream = cupy.cuda.get_current_stream().ptr
        if stream != self._stream:
            self._check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))
            self._check(self._library.cublasSetWorkspace_v2(
                self._handle, ctypes.c_void_p(self._workspace.data.ptr),
                ctypes.c_size_t(WORKSPACE)))
            self._stream = stream
        batch, m, k = self._a.shape
        n = self._x.shape[2]
        # cuBLAS is column-major: seen that way the row-major arrays are C^T = X^T A^T.
        self._check(self._library.cublasSgemmStridedBatched(
            self._handle, 0, 0, n, m, k, ctypes.byref(ctypes.c_float(1)),
            ctypes.c_void_p(self._x.data.ptr), n, ctypes.c_longlong(k * n),
            ctypes.c_void_p(self._a.data.ptr), k, ctypes.c_longlong(m * k),
            ctypes.byref(ctypes.c_float(0)),
            ctypes.c_void_p(self.c.data.ptr), n, ctypes.c_longlong(m * n), batch))

    @staticmethod
    def _check(status):
        if status:
            raise RuntimeError('cuBLAS: status %d' % status)


def _path():
    cupy.ones((2, 2), 'f').dot(cupy.ones((2, 2), 'f'))  # makes CuPy load the library
    maps = pathlib.Path('/proc/self/maps').read_text()
    return re.search(r'\S*/libcublas\.so\S*', maps).group()
