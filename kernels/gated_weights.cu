// Partial sums of the gradients of the parameters of gated_step.cu: for each of its 2 or 3 maps,
//
//     gW = g^T [x; m], with a state gU = g^T s (of h: g^T reset), gb = the sum of g over the rows
//
// g (MAPS, n_rows, WIDTH_H) from gated_step.cu; x, m, s, reset as there; all of one dtype. Row p of
// partials, of the arithmetic dtype, has the sums of the blocks (any, p) over the rows
// [p each, (p + 1) each): for one map after the other gW (WIDTH_H, WIDTH_X + WIDTH_M),
// gU (WIDTH_H, WIDTH_H), gb (WIDTH_H). Every element is written once. SAME=1: x is s, so gU of z
// and r equals the columns of gW for x: it is summed once and written to both. All rows count, even
// spare ones: there g must be 0.
//
// A block owns a tile of TILE x TILE elements of one matrix; each of 64 threads has PER x PER of them.
// Four groups of 64 threads take the rows in turn, and their sums are added pair by pair in a fixed
// order: deterministic, no atomics. Blocks of the first tile of a row of W also add up g itself.
//
// -DVECTOR=1, 2 or 4: divides all widths; addresses are aligned to a vector.
//
// Launch: block (256), grid (tiles, parts), shared memory as computed by gated_weights_launch.
#include "common.cuh"
#include "copies.cuh"

static_assert(VECTOR <= 4, "a quad is a number of vectors");
static_assert(PER == 4 || PER == 8, "a thread's elements are quads");

constexpr int MAPS = STATE ? 3 : 2;
constexpr int TILE = 8 * PER, THREADS = 256, GROUPS = 4, CHUNK = 32;
constexpr int QUADS = PER / 4;
constexpr int ACROSS = TILE / VECTOR, STEP = THREADS / ACROSS;  // a thread copies from every STEP-th row
// Whether all tiles are full: none has columns that its matrix lacks.
constexpr bool WHOLE = WIDTH_H % TILE == 0 && WIDTH_X % TILE == 0 && WIDTH_M % TILE == 0;
constexpr int SUMMED = THREADS / TILE;  // threads that share a column of g
static_assert(CHUNK % STEP == 0, "threads have equally many copies");
// Blocks per multiprocessor that registers must suffice for; copies of single elements need a few more
// registers.
constexpr int RESIDENT = VECTOR > 1 ? 2 : 1;

constexpr int tiles(int n) { return (n + TILE - 1) / TILE; }

constexpr int OUT_TILES = tiles(WIDTH_H);
constexpr int X_TILES = tiles(WIDTH_X), XM_TILES = X_TILES + tiles(WIDTH_M);
constexpr int W_TILES = MAPS * OUT_TILES * XM_TILES;  // before the tiles of U
constexpr int U_AT = WIDTH_H * (WIDTH_X + WIDTH_M);
constexpr int B_AT = U_AT + (STATE ? WIDTH_H * WIDTH_H : 0), OF_MAP = B_AT + WIDTH_H;

// Copy a vector of every STEP-th row of a chunk; zeros for rows beyond the `left` that exist.
__device__ inline void load(Real *to, const STORAGE *from, const int width, const int left)
{
    if (left > CHUNK - STEP) {  // all
#pragma unroll
        for (int j = 0; j < CHUNK; j += STEP) bring(to + j * TILE, from + j * width);
        return;
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j += STEP)
        if (j < left)
            bring(to + j * TILE, from + j * width);
        else
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) to[j * TILE + e] = 0;
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

    // The vector of the first row that this thread copies.
    const int own = threadIdx.x / ACROSS, c = threadIdx.x % ACROSS * VECTOR;
    const STORAGE *next_g = by + (long long)(begin + own) * WIDTH_H + first_out + c;
    const STORAGE *next_input = input + (long long)(begin + own) * width + first + c;
    const bool is_of_g = WHOLE || first_out + c < WIDTH_H, is_of_input = WHOLE || first + c < width;
    const auto fetch = [&](const int half, const int row) {
        const int left = end - row - own;
        Real *const to = memory + (half * CHUNK + own) * TILE + c;
        load(to, next_g, WIDTH_H, is_of_g ? left : 0);
        load(to + 2 * CHUNK * TILE, next_input, width, is_of_input ? left : 0);
        next_g += CHUNK * WIDTH_H;
        next_input += CHUNK * width;
    };
    // The quads of eight neighbouring threads lie side by side: element i of a thread is at
    // i / 4 * 32 + 4 * thread + i % 4.
    const int group = threadIdx.x / 64, across = threadIdx.x % 8, down = threadIdx.x / 8 % 8;
    const bool has_bias = !is_state && column == 0;
    Real sum[PER][PER] = {}, bias = 0;
    int half = 0;
    fetch(0, begin);
    for (int row = begin; row < end; row += CHUNK) {
        wait_for_copies();
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
            for (int o = 0; o < PER; ++o)
#pragma unroll
                for (int k = 0; k < PER; ++k)
                    sum[o][k] += a[o / 4].element[o % 4] * b[k / 4].element[k % 4];
        }
        if (has_bias)
#pragma unroll
            for (int j = 0; j < CHUNK; j += SUMMED) bias += of_g[j * TILE + threadIdx.x];
        half = 1 - half;
    }
    // The second half of the groups passes its sums to the first half.
    const auto quads = [&](const int tile, const int o, const int q) -> Quad & {
        Real *const at = memory + (tile * TILE + o / 4 * 32 + 4 * down + o % 4) * TILE;
        return reinterpret_cast<Quad &>(at[32 * q + 4 * across]);
    };
    for (int others = GROUPS / 2; others > 0; others /= 2) {
        __syncthreads();
        if (group >= others && group < 2 * others)
#pragma unroll
            for (int o = 0; o < PER; ++o)
#pragma unroll
                for (int k = 0; k < PER; k += 4)
                    quads(group - others, o, k / 4) = {
                        sum[o][k], sum[o][k + 1], sum[o][k + 2], sum[o][k + 3]};
        __syncthreads();
        if (group < others)
#pragma unroll
            for (int o = 0; o < PER; ++o)
#pragma unroll
                for (int k = 0; k < PER; k += 4) {
                    const Quad more = quads(group, o, k / 4);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[o][k + e] += more.element[e];
                }
    }
    // No other group has read the memory that group 0 overwrites here.
    Real *const total = memory, *const total_bias = memory + TILE * TILE;
    if (group == 0)
#pragma unroll
        for (int o = 0; o < PER; ++o)
#pragma unroll
            for (int k = 0; k < PER; k += 4)
                quads(0, o, k / 4) = {sum[o][k], sum[o][k + 1], sum[o][k + 2], sum[o][k + 3]};
    total_bias[threadIdx.x] = bias;
    __syncthreads();
    Real *const out = partials + ((long long)blockIdx.y * MAPS + map) * OF_MAP;
    const int stride = is_state ? WIDTH_H : WIDTH_X + WIDTH_M;
    const int start = is_state ? U_AT : is_x ? 0 : WIDTH_X;
    for (int i = threadIdx.x; i < TILE * ACROSS; i += THREADS) {
        const int o = first_out + i / ACROSS, k = first + i % ACROSS * VECTOR;
        if (o < WIDTH_H && k < width) {
            const Piece piece = reinterpret_cast<const Piece &>(total[i * VECTOR]);
            reinterpret_cast<Piece &>(out[start + (long long)o * stride + k]) = piece;
            if (SAME && is_x && map)
                reinterpret_cast<Piece &>(out[U_AT + (long long)o * WIDTH_H + k]) = piece;
        }
    }
    if (has_bias)
        for (int i = threadIdx.x; i < TILE; i += THREADS) {
            Real value = 0;
#pragma unroll
            for (int part = 0; part < SUMMED; ++part) value += total_bias[part * TILE + i];
            if (first_out + i < WIDTH_H) out[B_AT + first_out + i] = value;
        }
}
