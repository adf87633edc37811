// Sampled dense-dense product over the pattern of a block-diagonal CSR matrix, the gradient of its
// edge values:
//
//     w[k] = sum over c of u[row(k), c] * v[indices[k], c]      for every entry k
//
// indptr (n_rows + 1) int32, indices (nnz) int32, u (n_rows, n_B), v (n_cols, n_B), w (nnz);
// n_B = n_vectors * VECTOR. Every entry of a row is written once; where w is larger than the batch
// (indptr[n_rows] < nnz) the rest is left as it is. Deterministic: the lanes add in a fixed tree; no
// atomics.
//
// -DLANES=n: threads that share a row, a power of two up to 32.
//
// Launch: block (LANES, rows) with LANES * rows a multiple of 32, grid (ceil(n_rows / rows)). The
// lanes of one row lie in one warp. No shared memory.
#include "common.cuh"

static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "LANES divides a warp");

extern "C" __global__ void bsddmm_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const Vector *__restrict__ u, const Vector *__restrict__ v, STORAGE *__restrict__ w,
    const int n_rows, const int n_vectors)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    // All LANES threads of a row leave together, so the mask below names exactly those that stay.
    if (row >= n_rows) return;
    const unsigned lane = (threadIdx.y * LANES + threadIdx.x) % 32;
    const unsigned group = (LANES == 32 ? ~0u : (1u << (LANES % 32)) - 1u) << (lane - threadIdx.x);
    const Vector *const left = u + row * n_vectors;

    for (int k = indptr[row]; k < indptr[row + 1]; ++k) {
        const Vector *const right = v + (long long)indices[k] * n_vectors;
        Real sum = 0;
        for (int c = threadIdx.x; c < n_vectors; c += LANES) {
            const Vector a = left[c], b = right[c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sum += widen(a.element[e]) * widen(b.element[e]);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            sum += __shfl_down_sync(group, sum, step, LANES);
        if (threadIdx.x == 0) narrow(w[k], sum);
    }
}
