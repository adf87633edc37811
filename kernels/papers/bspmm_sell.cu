// Y = alpha A X + beta R for a batch of sparse matrices in slices of rows (SELL):
//
//     y[i, :] = alpha * sum over the entries k of row i of value(k) * x[column[k], :]  +  beta * r[i, :]
//
// With one column it is the SpMV of SELL; spmv_csr.cu is the SpMV of CSR.
// Source: IPSJ report 2018-HPC-164 No. 3 (figures 4 and 5). Departs from it in that beta scales r
// once, not in the loop; that slices end with their graph, and the last one of a graph has no rows
// beyond the graph's; that padding is skipped, not multiplied; and in the register tile below.
//
// slice_starts, slice_rows (n_slices + 1) int32: first stored entry and first row of every slice. A
// slice of h rows is column-major: its row j has the entries slice_starts[s] + j, + j + h, ...
// column (n_stored) int32, -1 where the row has ended; data (n_stored); x (n_cols, n_B);
// row_order (n_rows) int32 or null: the row of y that a row of the slices stands for;
// residual, y (n_rows, n_B); n_B = n_vectors * VECTOR.
// Empty rows give beta * r. beta = 0 never reads residual, which may then be null; it may be y itself:
// every element is read, if at all, by the thread that then writes it. y must not overlap the other
// inputs. Entries of a row are added in their order: deterministic, no atomics.
//
// A thread owns a row and TILE vectors of it in registers, so that column and data are read once for
// all these columns, by neighbouring threads at neighbouring addresses (a thread for each element
// would read them n_B times). Wider x is done in several tiles, each of which reads them again.
//
// -DWEIGHTS=0: value(k) = 1, data is not read. -DWEIGHTS=1: value(k) = data[k].
// -DTILE=n: vectors per thread; TILE * VECTOR accumulators.
// -DWHOLE_WARPS=1: n_slots is a multiple of 32, so a warp lies in one slice and reads its start
// through the read-only path once, at one address. 0: n_slots is any number, slices follow each
// other without regard to warps, and every thread reads the start of its slice (32 slices of one
// row, which is CSR, are two neighbouring loads).
//
// Launch: block (a multiple of 32), grid (ceil(n_slices * n_slots / block), any): n_slots threads
// for each slice, at least one for each of its rows; threads without a row leave. Fewer than 2**32
// threads in all. Block (b, t) owns the vectors t * TILE to t * TILE + TILE, in steps of gridDim.y
// * TILE. No shared memory.
#include "common.cuh"

// Entries of a row whose loads are issued before the first is used.
#define AHEAD 4

static_assert(TILE >= 1 && TILE * VECTOR <= 8, "the tile stays in registers");

extern "C" __global__ void bspmm_sell(
    const int *__restrict__ slice_starts, const int *__restrict__ slice_rows,
    const int *__restrict__ column, const STORAGE *__restrict__ data,
    const int *__restrict__ row_order, const Vector *__restrict__ x, const Vector *residual,
    Vector *y, const Real alpha, const Real beta, const unsigned n_slices,
    const unsigned n_slots, const int n_vectors)
{
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
#if WHOLE_WARPS
    const unsigned warp = thread / 32, warps = n_slots / 32;
    const unsigned slice = warp / warps;  // the same for all lanes
    const int place = warp % warps * 32 + thread % 32;
#else
    const unsigned slice = thread / n_slots;
    const int place = thread % n_slots;
#endif
    if (slice >= n_slices) return;
    const int first_row = __ldg(slice_rows + slice);
    const int height = __ldg(slice_rows + slice + 1) - first_row;
    if (place >= height) return;
    const long long begin = (long long)__ldg(slice_starts + slice) + place;
    const int end = __ldg(slice_starts + slice + 1);
    const long long row = row_order ? row_order[first_row + place] : first_row + place;

    for (int c = blockIdx.y * TILE; c < n_vectors; c += gridDim.y * TILE) {
        Real sum[TILE][VECTOR] = {};
        for (long long k = begin; k < end; k += (long long)AHEAD * height) {
            int from[AHEAD];
            Real value[AHEAD];
            Vector gathered[AHEAD][TILE];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const long long at = k + (long long)u * height;
                from[u] = at < end ? column[at] : -1;
#if WEIGHTS
                // Padding has a value too: waiting for the column first would add a latency.
                value[u] = at < end ? widen(data[at]) : Real(0);
#else
                value[u] = 1;
#endif
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
#pragma unroll
                for (int t = 0; t < TILE; ++t)
                    if (from[u] >= 0 && c + t < n_vectors)
                        gathered[u][t] = x[(long long)from[u] * n_vectors + c + t];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
#pragma unroll
                for (int t = 0; t < TILE; ++t)
                    if (from[u] >= 0 && c + t < n_vectors)
#pragma unroll
                        for (int e = 0; e < VECTOR; ++e)
                            sum[t][e] += value[u] * widen(gathered[u][t].element[e]);
        }
#pragma unroll
        for (int t = 0; t < TILE; ++t)
            if (c + t < n_vectors) {
                const long long at = row * n_vectors + c + t;
                Vector result;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum[t][e] *= alpha;
                if (beta != 0) {
                    const Vector added = residual[at];
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) sum[t][e] += beta * widen(added.element[e]);
                }
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) narrow(result.element[e], sum[t][e]);
                y[at] = result;
            }
    }
}
