// Sums of the rows of every run, by type, for the gradient of a table of embeddings:
//
//     partial[p, t, c] = sum of gy[i, c] over the rows i of run p with ids[i] == t
//
// ids (n_rows) int32: rows whose id is not in [0, n_types) are ignored. gy (n_rows, n_channels);
// partial (n_runs, n_types, n_channels) of the arithmetic dtype, to be summed over the runs by
// sum_partials. Run p is rows [p * run, (p + 1) * run). Every element of partial is written. Rows are
// added in a fixed order: deterministic, no atomics.
//
// A block loads ROWS rows into shared memory at once, because a load takes far longer than an addition:
// most atoms are carbon, and a single warp would load their rows one after the other. Warp w owns
// the types t with t % WARPS == w, and each of its lanes one channel. It sets the sums of its types
// to 0, then adds up each type that occurs: it compares 32 ids at a time with the type, and adds
// the rows of this type, and 0 for the others. If a run has more than ROWS rows, later rows are
// added to the sums that the same thread wrote before.
//
// -DWARPS=n: warps of a block. -DROWS=n: a multiple of 32, at most 32 * WARPS.
//
// Launch: block (32, WARPS), grid (n_runs, ceil(n_channels / 32)): block (p, c) owns the 32 channels
// from 32 c on. No dynamic shared memory.
#include "common.cuh"

const int WARP = 32;
const int THREADS = WARP * WARPS;
const int AT_ONCE = 16;  // rows that are loaded from shared memory without a test of each
const int SUMS = 4;      // sums of a thread, so that an addition does not wait for the one before

static_assert(ROWS % WARP == 0 && ROWS % WARPS == 0, "whole words of ids, rows for every warp");
static_assert(ROWS <= THREADS, "a thread for every id");
static_assert(ROWS <= WARP * WARP, "a bit for every word of ids");

extern "C" __global__ void __launch_bounds__(THREADS, 2) embed_grad(
    const int *__restrict__ ids, const STORAGE *__restrict__ gy, Real *__restrict__ partial,
    const int n_rows, const int n_channels, const int n_types, const int run)
{
    __shared__ Real rows[ROWS][WARP];
    __shared__ unsigned types[ROWS];
    const unsigned lane = threadIdx.x, warp = threadIdx.y;
    const int thread = warp * WARP + lane;
    const int channel = blockIdx.y * WARP + lane;
    const bool is_inside = channel < n_channels;
    const long long begin = (long long)blockIdx.x * run;
    const int count = n_rows - begin < run ? n_rows - begin : run;
    // A lane without a channel reads the last one, and writes nothing.
    const STORAGE *const from = gy + begin * n_channels + (is_inside ? channel : n_channels - 1);
    Real *const to = partial + (long long)blockIdx.x * n_types * n_channels + channel;

    for (int base = 0; base < count; base += ROWS) {
        const int here = count - base < ROWS ? count - base : ROWS;
        // Past the end the type is ~0u. As unsigned numbers, this and negative ids are too large,
        // so they are ignored.
        const unsigned type = thread < here ? ids[begin + base + thread] : ~0u;
        Real value[ROWS / WARPS];
#pragma unroll
        for (int u = 0; u < ROWS / WARPS; ++u) {
            const int row = warp + u * WARPS;
            value[u] = row < here ? widen(from[(long long)(base + row) * n_channels]) : Real(0);
        }
        if (base == 0 && is_inside) {
            for (int t = warp; t < n_types; t += WARPS) to[(long long)t * n_channels] = 0;
        }
        if (base) __syncthreads();  // all threads have added the previous rows
        if (thread < ROWS) types[thread] = type;
#pragma unroll
        for (int u = 0; u < ROWS / WARPS; ++u) rows[warp + u * WARPS][lane] = value[u];
        __syncthreads();

        unsigned added = 0;  // bit w: the lane's row of word w
        for (int word = 0; word * WARP < here; ++word) {
            const unsigned own = types[word * WARP + lane];
            unsigned left = __ballot_sync(
                ~0u, own < unsigned(n_types) && own % WARPS == warp && !(added >> word & 1));
            while (left) {
                const unsigned t = __shfl_sync(~0u, own, __ffs(left) - 1);
                Real *const sum_of_type = to + (long long)t * n_channels;
                const Real before = base && is_inside ? *sum_of_type : Real(0);
                Real sums[SUMS] = {};
                for (int w = word; w * WARP < here; ++w) {
                    const bool is_same = types[w * WARP + lane] == t;
                    const unsigned same = __ballot_sync(~0u, is_same);
                    added |= unsigned(is_same) << w;
                    if (w == word) left &= ~same;
                    for (int first = 0; first < WARP; first += AT_ONCE) {
                        const unsigned taken = same >> first & ((1u << AT_ONCE) - 1);
                        if (!taken) continue;
#pragma unroll
                        for (int u = 0; u < AT_ONCE; ++u) {
                            const Real x = rows[w * WARP + first + u][lane];
                            sums[u % SUMS] += taken >> u & 1 ? x : Real(0);
                        }
                    }
                }
                if (is_inside) *sum_of_type = before + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
            }
        }
    }
}
