// Sampled dense-dense product over the pattern of a block-diagonal CSR matrix, the gradient of its
// edge values:
//
//     w[k] = sum over c of u[row(k), c] * v[indices[k], c]      for every entry k
//
// indptr (n_rows + 1) int32, indices (nnz) int32, u (n_rows, n_B), v (n_cols, n_B), w (nnz);
// n_B = n_vectors * VECTOR. Every entry of a row is written once. If w is larger than the batch
// (indptr[n_rows] < nnz), the rest of it is left as it is. Deterministic: lanes are added in a fixed
// tree; no atomics.
//
// -DPIECES=1: other threads process rows of more than `piece` entries, in pieces; see pieces.cuh.
// Without it the kernel does not take `piece` and `n_pieces`.
// -DLANES=n: threads that share a row, a power of two up to 32.
// -DTILE=n: vectors of a row that a lane loads at once. Fewer lanes with larger tiles have as many
// loads in flight, and fewer partial sums to shuffle.
//
// Launch: block (LANES, rows) with LANES * rows a multiple of 32, grid (ceil(n_rows / rows)); with
// PIECES, ceil(n_pieces / rows) more blocks come first. The lanes of one row lie in one warp. No
// shared memory.
#include "common.cuh"
#include "lanes.cuh"
#include "pieces.cuh"

// Entries of a row that are processed together: their loads are in flight at once, and u is loaded
// once for all of them.
#define AHEAD 4

extern "C" __global__ void bsddmm_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const Vector *__restrict__ u, const Vector *__restrict__ v, STORAGE *__restrict__ w,
    const int n_rows, const int n_vectors
#if PIECES
    , const int piece, const unsigned n_pieces
#endif
    )
{
    // All LANES threads of a row leave together, so the group below is exactly those that stay.
#if PIECES
    const unsigned piece_blocks = (n_pieces + blockDim.y - 1) / blockDim.y;
    long long row;
    int begin, end;
    if (blockIdx.x < piece_blocks) {
        const unsigned number = blockIdx.x * blockDim.y + threadIdx.y;
        if (number >= n_pieces) return;
        const RowPiece of_row = piece_of(indptr, n_rows, number, piece);
        if (of_row.row < 0) return;
        row = of_row.row, begin = of_row.begin, end = of_row.end;
    } else {
        row = (long long)(blockIdx.x - piece_blocks) * blockDim.y + threadIdx.y;
        if (row >= n_rows) return;
        begin = indptr[row], end = indptr[row + 1];
        if (end - begin > piece) return;
    }
#else
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= n_rows) return;
#endif
    const unsigned group = lanes_of_row();
    const Vector *const left = u + row * n_vectors;
#if !PIECES
    const int end = indptr[row + 1], begin = indptr[row];
#endif

    // k stops at end: a step past it could overflow in a batch of the largest size allowed.
    for (int k = begin; k < end; k = end - k > AHEAD ? k + AHEAD : end) {
        int column[AHEAD];
        Real sum[AHEAD] = {};
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) column[n] = n < end - k ? indices[k + n] : -1;
        for (int c = threadIdx.x; c < n_vectors; c += TILE * LANES) {
            Vector a[TILE], b[AHEAD][TILE];
#pragma unroll
            for (int t = 0; t < TILE; ++t)
                if (c + t * LANES < n_vectors) {
                    a[t] = left[c + t * LANES];
#pragma unroll
                    for (int n = 0; n < AHEAD; ++n)
                        if (column[n] >= 0)
                            b[n][t] = v[(long long)column[n] * n_vectors + c + t * LANES];
                }
#pragma unroll
            for (int t = 0; t < TILE; ++t)
                if (c + t * LANES < n_vectors)
#pragma unroll
                    for (int n = 0; n < AHEAD; ++n)
                        if (column[n] >= 0)
#pragma unroll
                            for (int e = 0; e < VECTOR; ++e)
                                sum[n] += widen(a[t].element[e]) * widen(b[n][t].element[e]);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
                sum[n] += __shfl_down_sync(group, sum[n], step, LANES);
        if (threadIdx.x == 0)
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
                if (column[n] >= 0) narrow(w[k + n], sum[n]);
    }
}
