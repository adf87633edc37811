// Sums of the partial results that blocks of other kernels have left, such as gradients of weights:
//
//     to[i] = sum over the sources of a target, and over their rows p, of
//             from[p * stride + first + i]
//
// from (n_rows, stride) of the arithmetic dtype; to (size), which may also be its own first source, of
// one row. Every element is summed in a fixed order: lanes take the rows of each source in turn, and are
// added one after the other. Deterministic, no atomics.
//
// table, passed by value: n_targets targets, at most N_TARGETS - 1. A target has the sources from
// its first_source to the next target's, and the chunks, of EACH * COLUMNS elements, from its
// first_chunk to the next target's. One more target marks the end.
//
// -DEACH=n: elements of a thread, COLUMNS apart. -DN_SOURCES, -DN_TARGETS: how many a table has room
// for. -DTABLE_BYTES: its size on the host.
//
// Launch: block (COLUMNS, LANES), grid (n_chunks). No dynamic shared memory.
#include "common.cuh"

const int COLUMNS = 32;
const int LANES = 8;
const int AHEAD = EACH > 1 ? 4 : 8;  // rows of a lane whose loads are issued before the first is added

struct Source {
    const Real *from;
    int first, stride, n_rows, unused;
};

struct Target {
    STORAGE *to;
    int size, first_chunk, first_source, unused;
};

struct Table {
    Source source[N_SOURCES];
    Target target[N_TARGETS];
    int n_targets, unused;
};
static_assert(sizeof(Table) == TABLE_BYTES, "the host has the same layout");

extern "C" __global__ void __launch_bounds__(256) sum_partials(const Table table)
{
    __shared__ Real of_lane[LANES][EACH * COLUMNS];
    const int chunk = blockIdx.x;
    int low = 0, high = table.n_targets - 1;  // the last one that begins at or before the chunk
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.target[middle].first_chunk <= chunk) low = middle; else high = middle - 1;
    }
    const Target &target = table.target[low];
    const int stop = table.target[low + 1].first_source;
    const int i = (chunk - target.first_chunk) * EACH * COLUMNS + threadIdx.x;
    Real sum[EACH] = {};
    for (int s = target.first_source; s < stop; ++s) {
        const Real *from = table.source[s].from + table.source[s].first + i;
        const long long stride = table.source[s].stride;
        const int n_rows = table.source[s].n_rows;
        for (int row = threadIdx.y; row < n_rows; row += AHEAD * LANES) {
            Real value[EACH][AHEAD];
#pragma unroll
            for (int e = 0; e < EACH; ++e)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const int at = row + a * LANES;
                    const bool is_there = at < n_rows && i + e * COLUMNS < target.size;
                    value[e][a] = is_there ? from[at * stride + e * COLUMNS] : 0;
                }
#pragma unroll
            for (int e = 0; e < EACH; ++e)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) sum[e] += value[e][a];
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) of_lane[threadIdx.y][e * COLUMNS + threadIdx.x] = sum[e];
    __syncthreads();
    if (threadIdx.y == 0) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            if (i + e * COLUMNS >= target.size) break;
#pragma unroll
            for (int lane = 1; lane < LANES; ++lane)
                sum[e] += of_lane[lane][e * COLUMNS + threadIdx.x];
            narrow(target.to[i + e * COLUMNS], sum[e]);
        }
    }
}
