// Sampled dense-dense product over the entries of a batch in the SparseTensor layout, the gradient
// of its edge values:
//
//     w[k] = sum over c of u[ids[k, 0], c] * v[ids[k, 1], c]      for every entry k
//
// ids (nnz, 2) int32, row and column interleaved; entry_offsets (n_graphs + 1) int32, of which only
// the last, the number of entries, is read; u (n_rows, n_B), v (n_cols, n_B), w (nnz);
// n_B = n_vectors * VECTOR. Every entry is written once; where w is larger than the batch the rest is
// left as it is. Deterministic: the lanes add in a fixed tree; no atomics.
//
// -DLANES=n: threads that share an entry, a power of two up to 32.
// -DTILE=n: vectors of a row that a lane loads at once, as in bsddmm_csr.cu.
//
// Launch: block (LANES, entries) with LANES * entries a multiple of 32, grid (ceil(nnz / entries)).
// The lanes of one entry lie in one warp. No shared memory.
#include "common.cuh"
#include "lanes.cuh"

extern "C" __global__ void bsddmm_coo(
    const int *__restrict__ ids, const int *__restrict__ entry_offsets,
    const Vector *__restrict__ u, const Vector *__restrict__ v, STORAGE *__restrict__ w,
    const int n_graphs, const int n_vectors)
{
    const long long k = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    // All LANES threads of an entry leave together, so the group is exactly those that stay.
    if (k >= entry_offsets[n_graphs]) return;
    const unsigned group = lanes_of_row();
    const Vector *const left = u + (long long)ids[2 * k] * n_vectors;
    const Vector *const right = v + (long long)ids[2 * k + 1] * n_vectors;

    Real sum = 0;
    for (int c = threadIdx.x; c < n_vectors; c += TILE * LANES) {
        Vector a[TILE], b[TILE];
#pragma unroll
        for (int t = 0; t < TILE; ++t)
            if (c + t * LANES < n_vectors) {
                a[t] = left[c + t * LANES];
                b[t] = right[c + t * LANES];
            }
#pragma unroll
        for (int t = 0; t < TILE; ++t)
            if (c + t * LANES < n_vectors)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    sum += widen(a[t].element[e]) * widen(b[t].element[e]);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_down_sync(group, sum, step, LANES);
    if (threadIdx.x == 0) narrow(w[k], sum);
}
