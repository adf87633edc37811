"""TensorFlow's SparseTensorDenseMatMul as the papers describe it, matrix by matrix."""

import pathlib

import cupy
import numpy

THREADS = 256


class Loop:
    """Compute Y = A X with a zeroing and a launch of ``tensorflow_spmm.cu`` for every matrix.

    `adj` is a float32 BatchedCSR on the host, whose entries keep their order. `x` is C-contiguous.
    """

    def __init__(self, adj, x):
        text = pathlib.Path(__file__).with_suffix('.cu').read_text()
        module = cupy.RawModule(code=text, options=('-std=c++17',))
        self._kernel = module.get_function('tensorflow_spmm').kernel
        self.y = cupy.full((adj.n_rows, x.shape[1]), numpy.nan, 'f')
        self._launches = []
        ids = numpy.stack([adj.entry_rows(), adj.indices], axis=1)
        for graph in range(adj.n_graphs):
            first, last = adj.row_offsets[graph : graph + 2].tolist()
            entries = slice(adj.indptr[first], adj.indptr[last])
            values = cupy.asarray(adj.data[entries])
            y = self.y[first:last]
            n_threads = values.size * x.shape[1]
            self._launches.append(
                (
                    y,
                    (-(-n_threads // THREADS), 1, 1),
                    (
                        cupy.asarray(ids[entries] - first),
                        values,
                        x[first:last],
                        y,
                        numpy.int32(values.size),
                        numpy.int32(x.shape[1]),
                    ),
                )
            )

    def __call__(self):
        for y, grid, arguments in self._launches:
            y.data.memset_async(0, y.nbytes)
            self._kernel(grid, (THREADS, 1, 1), arguments)
        return self.y
