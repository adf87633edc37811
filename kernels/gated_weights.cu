// Partial sums of the gradients of the parameters of gated_step.cu: for each of its 2 or 3 maps,
//
//     gW = g^T [x; m], with a state gU = g^T s (of h: g^T reset), gb = the sum of g over the rows
//
// g (MAPS, n_rows, WIDTH_H) from gated_step.cu; x, m, s, reset as there; all of one dtype. Row p of
// partials, of the arithmetic dtype, has what block row p adds up over rows [p each, (p + 1) each): of
// one map after the other gW (WIDTH_H, WIDTH_X + WIDTH_M), gU (WIDTH_H, WIDTH_H), gb (WIDTH_H). Every
// element is written once. SAME=1: x is s, and gU of z and r are the columns of gW that x has: what is
// summed once is written to both. Rows of g that are not rows of a batch must be 0, or NaN meets them.
//
// A block owns a tile of TILE x TILE elements of one matrix, 64 threads with PER x PER each; four groups
// of 64 take the rows in turn and are added in order: deterministic, no atomics.
//
// -DVECTOR=1, 2 or 4: divides all widths; addresses are aligned to a vector.
//
// Launch: block (256), grid (tiles, parts), shared memory as cuda/policy.py, gated_weights_launch, has it.
#include "common.cuh"
#include "copies.cuh"

static_assert(VECTOR <= 4, "a quad is a number of vectors");
static_assert(PER == 4 || PER == 8, "a thread's elements are quads");

constexpr int MAPS = STATE ? 3 : 2;
constexpr int TILE = 8 * PER, THREADS = 256, GROUPS = 4, CHUNK = 32;
constexpr int QUADS = PER / 4;
// Blocks that registers must be enough for; copies of single elements need a few more.
constexpr int RESIDENT = VECTOR > 1 ? 2 : 1;

constexpr int tiles(int n) { return (n + TILE - 1) / TILE; }

constexpr int OUT_TILES = tiles(WIDTH_H);
constexpr int X_TILES = tiles(WIDTH_X), XM_TILES = X_TILES + tiles(WIDTH_M);
constexpr int W_TILES = MAPS * OUT_TILES * XM_TILES;  // before those of U
constexpr int U_AT = WIDTH_H * (WIDTH_X + WIDTH_M);
constexpr int B_AT = U_AT + (STATE ? WIDTH_H * WIDTH_H : 0), OF_MAP = B_AT + WIDTH_H;

struct alignas(16) Quad {
    Real element[4];
};

__device__ inline void arrived()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Copy columns [first, first + TILE) of CHUNK rows from `row` on; zeros for what is not there.
__device__ inline void load(
    Real *to, const STORAGE *matrix, const int width, const int first, const int row, const int end)
{
    for (int i = threadIdx.x; i < CHUNK * TILE / VECTOR; i += THREADS) {
        const int j = i / (TILE / VECTOR), c = i % (TILE / VECTOR) * VECTOR;
        if (row + j < end && first + c < width)
            bring(to + j * TILE + c, matrix + (long long)(row + j) * width + first + c);
        else
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) to[j * TILE + c + e] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gated_weights(
    const STORAGE *__restrict__ g, const STORAGE *__restrict__ x, const STORAGE *__restrict__ m,
    const STORAGE *__restrict__ s, const STORAGE *__restrict__ reset, Real *__restrict__ partials,
    const int n_rows, const int each)
{
    extern __shared__ Quad shared[];
    Real *const memory = shared->element;  // (2, CHUNK, TILE) of g, then as much of the input
    const bool is_state = blockIdx.x >= W_TILES;
    const int tile = blockIdx.x - (is_state ? W_TILES : 0);
    const int columns = is_state ? OUT_TILES : XM_TILES;
    const int column = tile % columns, line = tile / columns;
    const int first_out = line % OUT_TILES * TILE, map = line / OUT_TILES;
    const bool is_x = !is_state && column < X_TILES;
    const STORAGE *const by = g + (long long)map * n_rows * WIDTH_H;
    const STORAGE *const input = is_x ? x : !is_state ? m : map ? s : reset;
    const int width = is_x ? WIDTH_X : is_state ? WIDTH_H : WIDTH_M;
    const int first = (column - (is_x || is_state ? 0 : X_TILES)) * TILE;
    const int begin = blockIdx.y * each, end = n_rows - begin > each ? begin + each : n_rows;

    const int group = threadIdx.x / 64, across = threadIdx.x % 8, down = threadIdx.x / 8 % 8;
    const auto fetch = [&](const int half, const int row) {
        load(memory + half * CHUNK * TILE, by, WIDTH_H, first_out, row, end);
        load(memory + (2 + half) * CHUNK * TILE, input, width, first, row, end);
    };
    // Of eight threads' quads, neighbours lie side by side: element i of a thread is that at
    // i / 4 * 32 + 4 * thread + i % 4.
    Real sum[PER][PER] = {}, bias[PER] = {};
    int half = 0;
    fetch(0, begin);
    for (int row = begin; row < end; row += CHUNK) {
        arrived();
        __syncthreads();  // and the other half has been used
        if (row + CHUNK < end) fetch(1 - half, row + CHUNK);
        const Real *const of_g = memory + half * CHUNK * TILE;
        const Real *const of_input = of_g + 2 * CHUNK * TILE;
#pragma unroll 2
        for (int j = group; j < (end - row < CHUNK ? end - row : CHUNK); j += GROUPS) {
            Quad a[QUADS], b[QUADS];
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                a[q] = reinterpret_cast<const Quad &>(of_g[j * TILE + 32 * q + 4 * down]);
                b[q] = reinterpret_cast<const Quad &>(of_input[j * TILE + 32 * q + 4 * across]);
            }
#pragma unroll
            for (int o = 0; o < PER; ++o) {
                const Real factor = a[o / 4].element[o % 4];
                bias[o] += factor;
#pragma unroll
                for (int k = 0; k < PER; ++k) sum[o][k] += factor * b[k / 4].element[k % 4];
            }
        }
        half = 1 - half;
    }
    Real *const total = memory, *const total_bias = memory + TILE * TILE;
    for (int turn = 0; turn < GROUPS; ++turn) {
        __syncthreads();
        if (group != turn) continue;
#pragma unroll
        for (int o = 0; o < PER; ++o) {
            const int to = o / 4 * 32 + 4 * down + o % 4;
#pragma unroll
            for (int k = 0; k < PER; ++k) {
                Real &element = total[to * TILE + k / 4 * 32 + 4 * across + k % 4];
                element = turn ? element + sum[o][k] : sum[o][k];
            }
            if (across == 0) total_bias[to] = turn ? total_bias[to] + bias[o] : bias[o];
        }
    }
    __syncthreads();
    Real *const out = partials + ((long long)blockIdx.y * MAPS + map) * OF_MAP;
    const int stride = is_state ? WIDTH_H : WIDTH_X + WIDTH_M;
    const int start = is_state ? U_AT : is_x ? 0 : WIDTH_X;
    for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
        const int o = first_out + i / TILE, k = first + i % TILE;
        if (o < WIDTH_H && k < width) {
            out[start + (long long)o * stride + k] = total[i];
            if (SAME && is_x && map) out[U_AT + (long long)o * WIDTH_H + k] = total[i];
        }
    }
    if (!is_state && column == 0)
        for (int i = threadIdx.x; i < TILE; i += THREADS)
            if (first_out + i < WIDTH_H) out[B_AT + first_out + i] = total_bias[i];
}
