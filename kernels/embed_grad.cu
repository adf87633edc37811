// Sums of rows by type, the gradient of a table of embeddings, of every run of rows:
//
//     partial[p, t, c] = sum of gy[i, c] over the rows i of run p with ids[i] == t
//
// ids (n_rows) int32: rows whose id is not in [0, n_types) take no part. gy (n_rows, n_channels);
// partial (n_runs, n_types, n_channels) of the arithmetic dtype, to be summed over the runs by
// sum_partials. Run p is rows [p * run, (p + 1) * run). Every element of partial is written once. Rows
// are added in a fixed order: deterministic, no atomics.
//
// A warp owns the types whose number in the block's table is its own modulo WARPS, a lane one channel
// of them. No thread reads what another one wrote, so there are no barriers. Warps find their rows by
// a vote on 32 ids at a time.
//
// -DWARPS=n: of a block, a power of two.
//
// Launch: block (32, WARPS), grid (n_runs, ceil(n_channels / 32), ceil(n_types / tile)); shared memory
// of `tile` times 32 values of the arithmetic dtype: block (p, c, t) does channels from 32 c on of
// types from t * tile on.
#include "common.cuh"

static_assert((WARPS & (WARPS - 1)) == 0, "the low bits of an id are its warp");

const int WARP = 32;
const int AHEAD = 16;  // rows whose loads are issued before the first is added

extern "C" __global__ void embed_grad(
    const int *__restrict__ ids, const STORAGE *__restrict__ gy, Real *__restrict__ partial,
    const int n_rows, const int n_channels, const int n_types, const int run, const int tile)
{
    extern __shared__ Real table[];
    const unsigned lane = threadIdx.x, warp = threadIdx.y;
    const int channel = blockIdx.y * WARP + lane;
    const bool is_inside = channel < n_channels;
    const int first_type = blockIdx.z * tile;
    const unsigned n_here = n_types - first_type < tile ? n_types - first_type : tile;
    const long long begin = (long long)blockIdx.x * run;
    const int count = n_rows - begin < run ? n_rows - begin : run;
    // A lane without a channel reads the last one, and writes nothing: loads are not conditional.
    const STORAGE *const from = gy + begin * n_channels + (is_inside ? channel : n_channels - 1);

    for (unsigned t = warp; t < n_here; t += WARPS) table[t * WARP + lane] = 0;

    unsigned current = warp;  // the type that `sum` is of
    Real sum = 0;
    for (int base = 0; base < count; base += WARP) {
        // What is below the first type is a large number without its sign.
        const unsigned id =
            base + int(lane) < count ? unsigned(ids[begin + base + lane]) - first_type : ~0u;
        unsigned rows = __ballot_sync(~0u, id < n_here && id % WARPS == warp);
        while (rows) {
            unsigned type[AHEAD];
            int n = 0, row = 0;
            Real value[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                // Past the end the last one again.
                if (rows) {
                    row = __ffs(rows) - 1;
                    rows &= rows - 1;
                    ++n;
                }
                type[u] = __shfl_sync(~0u, id, row);
                value[u] = widen(from[(long long)(base + row) * n_channels]);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                if (u >= n) continue;
                if (type[u] != current) {
                    table[current * WARP + lane] += sum;
                    current = type[u];
                    sum = 0;
                }
                sum += value[u];
            }
        }
    }
    if (current < n_here) table[current * WARP + lane] += sum;

    if (!is_inside) return;
    Real *const to = partial + ((long long)blockIdx.x * n_types + first_type) * n_channels + channel;
    for (unsigned t = warp; t < n_here; t += WARPS)
        to[(long long)t * n_channels] = table[t * WARP + lane];
}
