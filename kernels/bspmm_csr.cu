// Y = A X (+ R) for a batch of sparse matrices as one block-diagonal CSR matrix:
//
//     y[i, :] = r[i, :] + sum over k in [indptr[i], indptr[i + 1]) of value(k) * x[indices[k], :]
//
// Source: row-wise CSR of Batched SpMM (Nagasaka, Nukada, Kojima, Matsuoka 2019, section 3); departs
// from it in that a thread owns vectors of a row and keeps their sums in registers, not shared
// memory, and that offsets into the whole batch replace tables of pointers.
//
// indptr (n_rows + 1) int32, indices (nnz) int32, data (nnz), order (nnz) int32, x (n_cols, n_B),
// residual (n_rows, n_B) or null, y (n_rows, n_B); n_B = n_vectors * VECTOR.
// Empty rows give the residual or 0. Entries of a row are added to the residual in their order:
// deterministic, no atomics. y is written once and never read; it must not overlap the inputs.
//
// -DWEIGHTS=0: value(k) = 1, data and order are not read.
// -DWEIGHTS=1: value(k) = data[k], order is not read.
// -DWEIGHTS=2: value(k) = data[order[k]], the values of a matrix seen through its transpose.
// -DAHEAD=n: entries whose loads are issued before the first is used. Molecules have two to four a
//     row, so one round mostly suffices and its latency is paid once.
// -DCOLUMNS=n: vectors of a row that a thread owns, blockDim.x apart: they share what is read of A.
// -DPIPELINED=1: a thread goes through several rows and loads the next one's entries before it uses
//     those of this one, so that only gathers of x are waited for; 0: one row.
// -DSTREAM=1: write y past the L2 cache, for a y so large that it would push x out of it.
// -DOFFSET=unsigned: x and y have fewer than 2^32 vectors; unsigned long long: as many as you like.
//
// Launch: block (columns, rows), grid (row blocks, y, z) with at least ceil(n_vectors / (columns *
// COLUMNS)) blocks in y and z together, and row_blocks * rows * rows_per_thread >= n_rows (< 2^31;
// rows_per_thread is 1 unless PIPELINED). Thread (x, y) of block (b, t) owns the rows
// (b * rows_per_thread + i) * rows + y and the vectors (t * COLUMNS + j) * columns + x. No shared
// memory.
#include "common.cuh"

struct Entries {
    int column[AHEAD];
    Real value[AHEAD];
};

// Load the entries from k on. The last one is loaded again in place of those past the end: loads
// that depended on a condition would be issued one by one, each after the use of the one before.
__device__ inline void load(
    Entries &entries, const unsigned k, const unsigned end, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const int *__restrict__ order)
{
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        const unsigned at = k + u < end ? k + u : end - 1;
        entries.column[u] = indices[at];
#if WEIGHTS == 0
        entries.value[u] = 1;
#elif WEIGHTS == 1
        entries.value[u] = widen(data[at]);
#else
        entries.value[u] = widen(data[order[at]]);
#endif
    }
}

extern "C" __global__ void bspmm_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const int *__restrict__ order,
    const Vector *__restrict__ x, const Vector *__restrict__ residual, Vector *__restrict__ y,
    const unsigned n_rows, const unsigned n_vectors, const unsigned rows_per_thread)
{
    const unsigned step = blockDim.y;
    unsigned row = blockIdx.x * step * rows_per_thread + threadIdx.y;
    const unsigned tile = blockIdx.z * gridDim.y + blockIdx.y;
    const unsigned c = tile * blockDim.x * COLUMNS + threadIdx.x;
    if (row >= n_rows || c >= n_vectors) return;
    unsigned begin = indptr[row], end = indptr[row + 1];
#if PIPELINED
    const unsigned after = (blockIdx.x + 1) * step * rows_per_thread;
    const unsigned stop = after < n_rows ? after : n_rows;
    unsigned next_begin = 0, next_end = 0;
    if (row + step < stop) {
        next_begin = indptr[row + step];
        next_end = indptr[row + step + 1];
    }
#endif
    Entries entries;
    if (begin < end) load(entries, begin, end, indices, data, order);

    for (;;) {
        Real sum[COLUMNS][VECTOR] = {};
        if (residual) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (j == 0 || c + j * blockDim.x < n_vectors) {
                    const Vector added = residual[(OFFSET)row * n_vectors + (c + j * blockDim.x)];
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) sum[j][e] = widen(added.element[e]);
                }
        }
#if PIPELINED
        Entries next;
        if (next_begin < next_end) load(next, next_begin, next_end, indices, data, order);
        unsigned later_begin = 0, later_end = 0;
        if (row + 2 * step < stop) {
            later_begin = indptr[row + 2 * step];
            later_end = indptr[row + 2 * step + 1];
        }
#endif
#pragma unroll 1
        for (unsigned k = begin; k < end;) {
            Vector gathered[AHEAD][COLUMNS];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (u < end - k && (j == 0 || c + j * blockDim.x < n_vectors))
                        gathered[u][j] =
                            x[(OFFSET)entries.column[u] * n_vectors + (c + j * blockDim.x)];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (u < end - k && (j == 0 || c + j * blockDim.x < n_vectors))
#pragma unroll
                        for (int e = 0; e < VECTOR; ++e)
                            sum[j][e] += entries.value[u] * widen(gathered[u][j].element[e]);
            k += AHEAD;
            if (k < end) load(entries, k, end, indices, data, order);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (j == 0 || c + j * blockDim.x < n_vectors) {
                Vector result;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) narrow(result.element[e], sum[j][e]);
                store<STREAM>(y + ((OFFSET)row * n_vectors + (c + j * blockDim.x)), result);
            }
#if PIPELINED
        row += step;
        if (row >= stop) return;
        entries = next;
        begin = next_begin, end = next_end;
        next_begin = later_begin, next_end = later_end;
#else
        return;
#endif
    }
}
