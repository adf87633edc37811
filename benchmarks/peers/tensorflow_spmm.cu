// C += A B for one sparse matrix in the SparseTensor layout (COO), a thread per (entry, column):
//
//     c[row(k), j] += values[k] * b[column(k), j]      for every entry k and column j
//
// Source: TensorFlow's SparseTensorDenseMatMul as Nagasaka, Nukada, Kojima, Matsuoka 2019 describe it
// (section 2.3, figure 2): nnz_A * n_B threads, each of which divides to find its entry and adds one
// product with an atomic on global memory. A peer of the benchmarks, no part of the package.
//
// ids (nnz, 2) int32, row and column interleaved; values (nnz), b (n_A, n_B), c (m_A, n_B) float32,
// C-contiguous. c must hold 0 before the launch. nnz * n_B < 2**31. The order of summation, so the
// last bits, change from run to run.
//
// Launch: any block; nnz * n_B threads or more. No shared memory.
extern "C" __global__ void tensorflow_spmm(
    const int *__restrict__ ids, const float *__restrict__ values, const float *__restrict__ b,
    float *__restrict__ c, const int nnz, const int n_b)
{
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= nnz * n_b) return;
    const int k = thread / n_b, j = thread % n_b;
    atomicAdd(&c[ids[2 * k] * n_b + j], values[k] * b[ids[2 * k + 1] * n_b + j]);
}
