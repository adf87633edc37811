// Y = A X (+ R) for a batch of sparse matrices as one block-diagonal CSR matrix:
//
//     y[i, :] = r[i, :] + sum over k in [indptr[i], indptr[i + 1]) of value(k) * x[indices[k], :]
//
// Source: row-wise CSR of Batched SpMM (Nagasaka, Nukada, Kojima, Matsuoka 2019, section 3); departs
// from it in that a thread owns a vector of a row and keeps its sum in registers, not shared memory,
// and that offsets into the whole batch replace tables of pointers.
//
// indptr (n_rows + 1) int32, indices (nnz) int32, data (nnz), order (nnz) int32, x (n_cols, n_B),
// residual (n_rows, n_B) or null, y (n_rows, n_B); n_B = n_vectors * VECTOR.
// Empty rows give the residual or 0. Entries of a row are added in their order: deterministic, no
// atomics. y is written once and never read; it must not overlap the inputs.
//
// -DWEIGHTS=0: value(k) = 1, data and order are not read.
// -DWEIGHTS=1: value(k) = data[k], order is not read.
// -DWEIGHTS=2: value(k) = data[order[k]], the values of a matrix seen through its transpose.
//
// Launch: block (columns, rows), grid (ceil(n_rows / rows), any): thread (x, y) of block (b, t)
// owns row b * rows + y and the vectors t * columns + x, in steps of gridDim.y * columns. No shared
// memory.
#include "common.cuh"

// Entries whose loads are issued before the first is used. Molecules have two to four a row, so one
// round mostly suffices and its latency is paid once.
#define AHEAD 4

extern "C" __global__ void bspmm_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const int *__restrict__ order,
    const Vector *__restrict__ x, const Vector *__restrict__ residual, Vector *__restrict__ y,
    const int n_rows, const int n_vectors)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= n_rows) return;
    const int begin = indptr[row];
    const int end = indptr[row + 1];

    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors; c += gridDim.y * blockDim.x) {
        Real sum[VECTOR] = {};
        // k stops at end: a step past it could overflow where the batch is as large as allowed.
        for (int k = begin; k < end; k = end - k > AHEAD ? k + AHEAD : end) {
            int column[AHEAD];
            Real value[AHEAD];
            Vector gathered[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                column[u] = u < end - k ? indices[k + u] : -1;
#if WEIGHTS == 0
                value[u] = 1;
#elif WEIGHTS == 1
                value[u] = u < end - k ? widen(data[k + u]) : Real(0);
#else
                value[u] = u < end - k ? widen(data[order[k + u]]) : Real(0);
#endif
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (column[u] >= 0) gathered[u] = x[(long long)column[u] * n_vectors + c];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (column[u] >= 0)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        sum[e] += value[u] * widen(gathered[u].element[e]);
        }
        const long long at = row * n_vectors + c;
        Vector result;
        if (residual) {
            const Vector added = residual[at];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sum[e] += widen(added.element[e]);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) narrow(result.element[e], sum[e]);
        y[at] = result;
    }
}
