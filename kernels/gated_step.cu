// Gates of the rows of x and m, and a step of a gated recurrent unit; both are linear maps of a row whose
// results are combined element by element. [x; m] is a row of x followed by the same row of m:
//
//     STATE=0:  z = sigmoid(W_z [x; m] + b_z), h = W_h [x; m] + b_h (TANH=1: its tanh), y = z h
//     STATE=1:  with a row s:
//               z = sigmoid(W_z [x; m] + b_z + U_z s + c_z), r = sigmoid(W_r [x; m] + b_r + U_r s + c_r)
//               h = tanh(W_h [x; m] + b_h + U_h (r s) + c_h), y = s + z (h - s)
//
//     GRADIENT=0:  y, and arrays for the gradient: h, z, and with a state r and reset = r s
//     GRADIENT=1:  from gy: gx, gm, gs; and g (2 or 3, n_rows, WIDTH_H), the gradients with respect
//                  to the arguments of h, z and r, from which gated_weights.cu computes the
//                  gradients of the parameters
//     SAME=1:      x is s. W and U of z and r are applied to the same row, so they are added first.
//                  gx is the sum of both gradients, gs is not touched
//
// x (n_rows, WIDTH_X), m (n_rows, WIDTH_M), all other rows (n_rows, WIDTH_H); W (WIDTH_H,
// WIDTH_X + WIDTH_M), U (WIDTH_H, WIDTH_H), biases (WIDTH_H), of one dtype. WIDTH_M may be 0. Biases may
// be NULL, for zero. Without a state: s, U, c and all arrays of r are not touched. Sums are of the
// arithmetic dtype in a fixed order: deterministic, no atomics. FP32 stays FP32: no tensor cores.
//
// A block owns ROWS rows, and takes the weights through shared memory, in chunks for CHUNK elements
// of each sum. While one chunk is used, the next STAGES - 1 are on their way. A thread sums four
// outputs of every map for PER rows, or PARTS quads of the gradients gx, gm and gs: with three maps
// or quads, these are 16 loads of 16 bytes for 192 multiplications. SPLIT threads share the
// elements of a sum; their parts are added in order.
//
// -DVECTOR=1, 2 or 4: divides all widths; addresses are aligned to a vector.
//
// Launch: block (THREADS), grid (ceil(n_rows / ROWS)), shared memory as computed by gated_launch, laid out
// by the constants below.
#include "common.cuh"
#include "copies.cuh"

static_assert(VECTOR <= 4, "a quad is a whole number of vectors");
static_assert(ROWS % PER == 0 && CHUNK % 4 == 0, "rows are dealt evenly, chunks are whole quads");
static_assert(STAGES >= 2, "a chunk is used while another one arrives");
static_assert(!SAME || (STATE && WIDTH_X == WIDTH_H), "x can be the state");
static_assert(!STATE || TANH, "the unit's candidate is a tanh");

// Widths in shared memory are rounded up to whole quads; elements beyond the true width are 0.
constexpr int padded(int n) { return (n + 3) / 4 * 4; }

constexpr int MAPS = STATE ? 3 : 2;  // h, z, r
constexpr int X = padded(WIDTH_X), XM = X + padded(WIDTH_M), OUT = padded(WIDTH_H);
constexpr bool APART = STATE && !SAME;  // s has separate columns
constexpr int ALL = XM + (APART ? OUT : 0);  // columns of [W | U], of [W + U] if x is s
constexpr int GROUPS = ROWS / PER;           // a thread owns rows g, g + GROUPS, ...
// Whether all rows of all matrices are whole quads, and nothing is padded.
constexpr bool WHOLE = WIDTH_X % 4 == 0 && WIDTH_M % 4 == 0 && WIDTH_H % 4 == 0;
// Elements added to each row, so that the rows of eight neighbouring threads lie in different banks.
constexpr int PAD = 4;

// Pieces of a row: a thread combines one at a time, element by element.
constexpr int PIECES = OUT / VECTOR;

__device__ inline Quad &quad(Real *at) { return *reinterpret_cast<Quad *>(at); }
__device__ inline Piece &piece(Real *at) { return *reinterpret_cast<Piece *>(at); }

__device__ inline Piece read(const STORAGE *from)
{
    const Vector vector = *reinterpret_cast<const Vector *>(from);
    Piece result;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) result.element[e] = widen(vector.element[e]);
    return result;
}

// Write the bits of a vector. The compiler would store separately calculated elements one by one.
template <typename Bits> __device__ inline void put(STORAGE *to, const Bits &bits)
{
    *reinterpret_cast<Bits *>(to) = bits;
}

#if __CUDA_ARCH__
__device__ inline void put(STORAGE *to, const uint2 &bits)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(bits.x), "r"(bits.y)
                 : "memory");
}

__device__ inline void put(STORAGE *to, const uint4 &bits)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y),
                 "r"(bits.z), "r"(bits.w)
                 : "memory");
}
#endif

__device__ inline void write(STORAGE *to, const Piece &piece)
{
    Vector vector;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) narrow(vector.element[e], piece.element[e]);
    put(to, reinterpret_cast<const Word<sizeof(Vector)>::type &>(vector));
}

__device__ inline Piece operator+(const Piece &a, const Piece &b)
{
    Piece result;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) result.element[e] = a.element[e] + b.element[e];
    return result;
}

// Copy a quad of a row that has `left` columns from there on; zeros beyond them.
__device__ inline void fetch(Real *to, const STORAGE *from, const int left)
{
#pragma unroll
    for (int v = 0; v < 4; v += VECTOR)
        if (v < left)
            bring(to + v, from + v);
        else
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) to[v + e] = 0;
}

// Do as `fetch`, for the sum of two matrices.
__device__ inline void fetch_sum(
    Real *to, const STORAGE *one, const STORAGE *other, const int left)
{
#pragma unroll
    for (int v = 0; v < 4; v += VECTOR)
        piece(to + v) = v < left ? read(one + v) + read(other + v) : Piece{};
}

// Place in memory of the columns [k, k + 4) of [W | U].
struct Place {
    bool is_state;
    int at, left;  // column, and how many the matrix has from there on

    __device__ explicit Place(const int k)
        : is_state(k >= XM),
          at(k < X ? k : k < XM ? WIDTH_X + k - X : k - XM),
          left(k < X ? WIDTH_X - k : k < XM ? WIDTH_X + WIDTH_M - at : WIDTH_H - at)
    {
    }

    // The first row of W or U, at these columns; and the length of a row.
    __device__ const STORAGE *in(const STORAGE *W, const STORAGE *U) const
    {
        return (is_state ? U : W) + at;
    }
    __device__ int stride() const { return is_state ? WIDTH_H : WIDTH_X + WIDTH_M; }
};

// Whether the columns [k, k + 4) of a map belong to W + U.
__device__ inline bool is_sum(const int map, const int k) { return SAME && map && k < X; }

// Call copy(i) for i = 0, STEP, ... where row + i < COUNT, row < STEP.
template <int COUNT, int STEP, typename Copy>
__device__ inline void every(const int row, const Copy &copy)
{
#pragma unroll 8
    for (int i = 0; i < COUNT; i += STEP)
        if (i + STEP <= COUNT || row + i < COUNT) copy(i);
}

// Copy all of U_h.
__device__ inline void fetch_whole(Real *to, const STORAGE *U)
{
    constexpr int STEP = THREADS / (OUT / 4);
    const int row = threadIdx.x / (OUT / 4), k = threadIdx.x % (OUT / 4) * 4;
    if (row < STEP)
        every<OUT, STEP>(row, [&](const int i) {
            fetch(to + (row + i) * (OUT + PAD) + k, U + (row + i) * WIDTH_H + k,
                  WHOLE ? 4 : row + i < WIDTH_H ? WIDTH_H - k : 0);
        });
}

__device__ inline Piece bias(const STORAGE *b, const int o) { return b ? read(b + o) : Piece{}; }

__device__ inline Real sigmoid(const Real x) { return tanh(x * Real(0.5)) * Real(0.5) + Real(0.5); }

// The sum of the parts of SPLIT threads, which lie `stride` elements apart.
__device__ inline Piece total(Real *parts, const int stride)
{
    Piece sum = piece(parts);
#pragma unroll
    for (int part = 1; part < SPLIT; ++part) sum = sum + piece(parts + part * stride);
    return sum;
}

#if !GRADIENT

constexpr int COLUMNS = OUT / 4;  // threads side by side; a thread owns outputs c, c + COLUMNS, ...
static_assert(THREADS == COLUMNS * GROUPS * SPLIT, "every thread has its outputs");
// A row in shared memory: x, m, s; later r s, the argument of h, s. If x is s: s, r s, the argument of h.
constexpr int STATE_AT = SAME ? 0 : STATE && XM < 2 * OUT ? 2 * OUT : XM;
constexpr int PRODUCT_AT = SAME ? OUT : 0, ARGUMENT_AT = PRODUCT_AT + OUT;
constexpr int USED = SAME ? ARGUMENT_AT + OUT : STATE_AT + (STATE ? OUT : 0);
constexpr int ROW = (USED < XM ? XM : USED) + PAD;
constexpr int STRIDE = CHUNK + PAD;

// Copy rows [first, first + ROWS) of a matrix; zeros beyond its last row.
template <int WIDTH>
__device__ inline void fetch_rows(
    Real *to, const STORAGE *matrix, const long long first, const int n_rows)
{
    constexpr int QUADS = (WIDTH + 3) / 4;
    if constexpr (QUADS > 0)
        for (int i = threadIdx.x; i < ROWS * QUADS; i += THREADS) {
            const int row = i / QUADS, k = i % QUADS * 4;
            fetch(to + row * ROW + k, matrix + (first + row) * WIDTH + k,
                  first + row < n_rows ? WIDTH - k : 0);
        }
}

// sum[j][i] += the products of row j of a and row i of b.
__device__ inline void multiply(Real (&sum)[PER][4], const Quad (&a)[PER], const Quad (&b)[4])
{
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < PER; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][i] += a[j].element[e] * b[i].element[e];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gated_step(
    const STORAGE *__restrict__ x, const STORAGE *__restrict__ m, const STORAGE *__restrict__ s,
    const STORAGE *__restrict__ W_h, const STORAGE *__restrict__ W_z,
    const STORAGE *__restrict__ W_r, const STORAGE *__restrict__ U_h,
    const STORAGE *__restrict__ U_z, const STORAGE *__restrict__ U_r,
    const STORAGE *__restrict__ b_h, const STORAGE *__restrict__ b_z,
    const STORAGE *__restrict__ b_r, const STORAGE *__restrict__ c_h,
    const STORAGE *__restrict__ c_z, const STORAGE *__restrict__ c_r, STORAGE *__restrict__ y,
    STORAGE *__restrict__ h, STORAGE *__restrict__ z, STORAGE *__restrict__ r,
    STORAGE *__restrict__ reset, const int n_rows)
{
    extern __shared__ Quad shared[];
    Real *const rows = shared->element;            // (ROWS, ROW)
    Real *const candidate = rows + ROWS * ROW;     // U_h: (OUT, OUT + PAD)
    Real *const weights = candidate + (STATE ? OUT * (OUT + PAD) : 0);  // (STAGES, MAPS * OUT, STRIDE)
    Real *const sums = weights;                    // (SPLIT, ROWS, MAPS * OUT), after the weights
    const long long first = (long long)blockIdx.x * ROWS;

    const auto load = [&](const int chunk) {
        // A thread copies the same columns of every STEP-th row.
        constexpr int STEP = THREADS / (CHUNK / 4);
        static_assert(STEP >= 1, "a row of a chunk has a thread for every quad");
        const int q = threadIdx.x % (CHUNK / 4), row = threadIdx.x / (CHUNK / 4);
        const int k = chunk * CHUNK + 4 * q;
        if (k < ALL && row < STEP) {
            const Place place(k);
            const int stride = place.stride();
            Real *const to = weights + chunk % STAGES * (MAPS * OUT * STRIDE) + row * STRIDE + 4 * q;
            const auto left = [&](const int i) {
                return WHOLE ? 4 : row + i < WIDTH_H ? place.left : 0;
            };
#pragma unroll
            for (int map = 0; map < MAPS; ++map) {
                if (map == 0 && place.is_state) continue;  // U of h is multiplied by r s, not by s
                Real *const at = to + map * OUT * STRIDE;
                const STORAGE *const from = (map == 0   ? place.in(W_h, U_h)
                                             : map == 1 ? place.in(W_z, U_z)
                                                        : place.in(W_r, U_r)) + row * stride;
                if (is_sum(map, k)) {
                    const STORAGE *const more = (map == 1 ? U_z : U_r) + row * WIDTH_H + k;
                    every<OUT, STEP>(row, [&](const int i) {
                        fetch_sum(at + i * STRIDE, from + i * stride, more + i * WIDTH_H, left(i));
                    });
                } else {
                    every<OUT, STEP>(row, [&](const int i) {
                        fetch(at + i * STRIDE, from + i * stride, left(i));
                    });
                }
            }
        }
        sent();
    };
    fetch_rows<WIDTH_X>(rows, x, first, n_rows);
    fetch_rows<WIDTH_M>(rows + X, m, first, n_rows);
    if (APART) fetch_rows<WIDTH_H>(rows + STATE_AT, s, first, n_rows);
    for (int chunk = 0; chunk < STAGES - 1; ++chunk) load(chunk);

    const int c = threadIdx.x % COLUMNS, g = threadIdx.x / COLUMNS % GROUPS;
    const int part = threadIdx.x / (COLUMNS * GROUPS);
    constexpr int CHUNKS = (ALL + CHUNK - 1) / CHUNK;
    Real sum[MAPS][PER][4] = {};
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        arrived<STAGES - 2>();
        __syncthreads();  // and the chunk before has been used
        if (STATE && chunk == 0) fetch_whole(candidate, U_h);
        load(chunk + STAGES - 1);
        const Real *const from = weights + chunk % STAGES * (MAPS * OUT * STRIDE);
#pragma unroll 1
        for (int q = part; q < CHUNK / 4; q += SPLIT) {
            const int k = chunk * CHUNK + 4 * q;
            if (ALL % CHUNK && k >= ALL) break;
            const int at = !APART || k < XM ? k : k + STATE_AT - XM;
            Quad a[PER], b[4];
#pragma unroll
            for (int j = 0; j < PER; ++j) a[j] = quad(rows + (g + j * GROUPS) * ROW + at);
#pragma unroll
            for (int map = 0; map < MAPS; ++map) {
                if (APART && map == 0 && k >= XM) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    b[i] = reinterpret_cast<const Quad &>(
                        from[(map * OUT + c + i * COLUMNS) * STRIDE + 4 * q]);
                multiply(sum[map], a, b);
            }
        }
    }
    arrived<0>();
    __syncthreads();  // the sums take the weights' place
#pragma unroll
    for (int j = 0; j < PER; ++j)
#pragma unroll
        for (int map = 0; map < MAPS; ++map)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[((part * ROWS + g + j * GROUPS) * MAPS + map) * OUT + c + i * COLUMNS] =
                    sum[map][j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, o = i % PIECES * VECTOR;
        const bool is_row = first + row < n_rows && o < WIDTH_H;
        const long long at = (first + row) * WIDTH_H + o;
        Real *const from = sums + row * MAPS * OUT + o;
        constexpr int BETWEEN = ROWS * MAPS * OUT;
        if (!STATE) {
            if (!is_row) continue;
            Piece value = total(from, BETWEEN) + bias(b_h, o);
            Piece gate = total(from + OUT, BETWEEN) + bias(b_z, o), result;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                if (TANH) value.element[e] = tanh(value.element[e]);
                gate.element[e] = sigmoid(gate.element[e]);
                result.element[e] = gate.element[e] * value.element[e];
            }
            write(h + at, value);
            write(z + at, gate);
            write(y + at, result);
        } else {
            Real *const to = rows + row * ROW + o;
            Piece argument = {}, product = {};
            if (is_row) {
                argument = total(from, BETWEEN) + (bias(b_h, o) + bias(c_h, o));
                Piece update = total(from + OUT, BETWEEN) + (bias(b_z, o) + bias(c_z, o));
                Piece keep = total(from + (MAPS - 1) * OUT, BETWEEN) + (bias(b_r, o) + bias(c_r, o));
                const Piece state = piece(to + STATE_AT);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    update.element[e] = sigmoid(update.element[e]);
                    keep.element[e] = sigmoid(keep.element[e]);
                    product.element[e] = keep.element[e] * state.element[e];
                }
                write(z + at, update);
                write(r + at, keep);
                write(reset + at, product);
            }
            piece(to + PRODUCT_AT) = product;
            piece(to + ARGUMENT_AT) = argument;
        }
    }
    if (!STATE) return;
    __syncthreads();
    Real last[PER][4] = {};
#pragma unroll 1
    for (int q = part; q < OUT / 4; q += SPLIT) {
        Quad a[PER], b[4];
#pragma unroll
        for (int j = 0; j < PER; ++j)
            a[j] = quad(rows + (g + j * GROUPS) * ROW + PRODUCT_AT + 4 * q);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            b[i] = quad(candidate + (c + i * COLUMNS) * (OUT + PAD) + 4 * q);
        multiply(last, a, b);
    }
#pragma unroll
    for (int j = 0; j < PER; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[(part * ROWS + g + j * GROUPS) * OUT + c + i * COLUMNS] = last[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, o = i % PIECES * VECTOR;
        if (first + row >= n_rows || o >= WIDTH_H) continue;
        const long long at = (first + row) * WIDTH_H + o;
        Real *const from = rows + row * ROW + o;
        Piece value = total(sums + row * OUT + o, ROWS * OUT) + piece(from + ARGUMENT_AT), result;
        const Piece state = piece(from + STATE_AT), gate = read(z + at);  // z: this thread's
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            value.element[e] = tanh(value.element[e]);
            result.element[e] =
                state.element[e] + gate.element[e] * (value.element[e] - state.element[e]);
        }
        write(h + at, value);
        write(y + at, result);
    }
}

#else

constexpr int PARTS = APART ? 3 : 2;                    // quads of the result of a thread
constexpr int COLUMNS = (ALL / 4 + PARTS - 1) / PARTS;  // it owns quads c, c + COLUMNS, ...
constexpr int WIDE = COLUMNS * PARTS * 4;
static_assert(THREADS == COLUMNS * GROUPS * SPLIT, "every thread has its outputs");
// A row in shared memory: the gradients with respect to the arguments of h, z, r, and gs without U's part.
constexpr int G = MAPS * OUT;
constexpr int ROW = G + (STATE ? OUT : 0) + PAD;

// The map of a chunk of the weights, and the chunk's first row. Both are counted up, because NVRTC 13
// computes a wrong address from `chunk % n * CHUNK` if n is not a power of two: it calculates in eight
// bits, with a constant factored out.
struct Chunk {
    int map = 0, begin = 0;

    __device__ void advance()
    {
        begin += CHUNK;
        if (begin < OUT) return;
        begin = 0;
        ++map;
    }
};

// sum[j] += the four rows of b, each times an element of row j of a.
__device__ inline void multiply(Quad (&sum)[PER], const Quad (&a)[PER], const Quad (&b)[4])
{
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < PER; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum[j].element[i] += a[j].element[e] * b[e].element[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gated_step(
    const STORAGE *__restrict__ gy, const STORAGE *__restrict__ s, const STORAGE *__restrict__ h,
    const STORAGE *__restrict__ z, const STORAGE *__restrict__ r,
    const STORAGE *__restrict__ W_h, const STORAGE *__restrict__ W_z,
    const STORAGE *__restrict__ W_r, const STORAGE *__restrict__ U_h,
    const STORAGE *__restrict__ U_z, const STORAGE *__restrict__ U_r, STORAGE *__restrict__ gx,
    STORAGE *__restrict__ gm, STORAGE *__restrict__ gs, STORAGE *__restrict__ g_all,
    const int n_rows)
{
    extern __shared__ Quad shared[];
    Real *const rows = shared->element;         // (ROWS, ROW)
    Real *const candidate = rows + ROWS * ROW;  // U_h: (OUT, OUT + PAD)
    Real *const weights = candidate + (STATE ? OUT * (OUT + PAD) : 0);  // (STAGES, CHUNK, WIDE)
    // (SPLIT, ROWS, OUT), before the last stage is used
    Real *const by_reset = weights + (STAGES - 1) * CHUNK * WIDE;
    Real *const sums = weights;                     // (SPLIT, ROWS, WIDE), after the last chunk
    const long long first = (long long)blockIdx.x * ROWS, size = (long long)n_rows * WIDTH_H;

    constexpr int STEP = THREADS / (ALL / 4);
    static_assert(STEP >= 1, "a row of the weights has a thread for every quad");
    // A thread copies the same columns of every STEP-th row. No chunk has rows of two maps.
    constexpr int OF_MAP = (OUT + CHUNK - 1) / CHUNK;
    const int k = threadIdx.x % (ALL / 4) * 4, line = threadIdx.x / (ALL / 4);
    const Place place(k);
    Chunk ahead;
    const auto load = [&](const int chunk) {
        const int map = ahead.map, o = ahead.begin + line;
        ahead.advance();
        if (map < MAPS && line < STEP) {
            Real *const to = weights + chunk % STAGES * (CHUNK * WIDE) + line * WIDE + k;
            const int stride = place.stride();
            const STORAGE *const from = (map == 0   ? place.in(W_h, U_h)
                                         : map == 1 ? place.in(W_z, U_z)
                                                    : place.in(W_r, U_r)) + o * stride;
            // U of h is multiplied by r s, not by s.
            const int columns = map || !place.is_state ? WHOLE ? 4 : place.left : 0;
            const auto left = [&](const int i) {
                return WIDTH_H % CHUNK == 0 || o + i < WIDTH_H ? columns : 0;
            };
            if (is_sum(map, k)) {
                const STORAGE *const more = (map == 1 ? U_z : U_r) + o * WIDTH_H + k;
                every<CHUNK, STEP>(line, [&](const int i) {
                    fetch_sum(to + i * WIDE, from + i * stride, more + i * WIDTH_H, left(i));
                });
            } else {
                every<CHUNK, STEP>(line, [&](const int i) {
                    fetch(to + i * WIDE, from + i * stride, left(i));
                });
            }
        }
        sent();
    };
    if (STATE) {
        fetch_whole(candidate, U_h);
        sent();
    } else {
        for (int chunk = 0; chunk < STAGES - 1; ++chunk) load(chunk);
    }
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, o = i % PIECES * VECTOR;
        const long long at = (first + row) * WIDTH_H + o;
        Piece by_h = {}, by_z = {}, by_s = {};
        if (first + row < n_rows && o < WIDTH_H) {
            const Piece of_y = read(gy + at), of_h = read(h + at), of_z = read(z + at);
            const Piece of_s = STATE ? read(s + at) : Piece{};
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const Real upstream = of_y.element[e], value = of_h.element[e];
                const Real gate = of_z.element[e];
                const Real slope = TANH ? 1 - value * value : Real(1);
                by_h.element[e] = upstream * gate * slope;
                by_z.element[e] = upstream * (value - of_s.element[e]) * gate * (1 - gate);
                by_s.element[e] = upstream - upstream * gate;
            }
            write(g_all + at, by_h);
            write(g_all + size + at, by_z);
        }
        Real *const to = rows + row * ROW + o;
        piece(to) = by_h;
        piece(to + OUT) = by_z;
        if (STATE) piece(to + G) = by_s;
    }
    if (STATE) {
        arrived<0>();
        __syncthreads();
        for (int chunk = 0; chunk < STAGES - 1; ++chunk) load(chunk);
        constexpr int UNITS = OUT / 4 * GROUPS;
        for (int unit = threadIdx.x; unit < UNITS * SPLIT; unit += THREADS) {
            const int k = unit % (OUT / 4) * 4, g = unit / (OUT / 4) % GROUPS;
            const int part = unit / UNITS;
            Quad sum[PER] = {};
#pragma unroll 1
            for (int o = 4 * part; o < OUT; o += 4 * SPLIT) {
                Quad a[PER], b[4];
#pragma unroll
                for (int j = 0; j < PER; ++j) a[j] = quad(rows + (g + j * GROUPS) * ROW + o);
#pragma unroll
                for (int e = 0; e < 4; ++e) b[e] = quad(candidate + (o + e) * (OUT + PAD) + k);
                multiply(sum, a, b);
            }
#pragma unroll
            for (int j = 0; j < PER; ++j)
                quad(by_reset + (part * ROWS + g + j * GROUPS) * OUT + k) = sum[j];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
            const int row = i / PIECES, o = i % PIECES * VECTOR;
            const long long at = (first + row) * WIDTH_H + o;
            Real *const to = rows + row * ROW + o;
            Piece by_r = {};
            if (first + row < n_rows && o < WIDTH_H) {
                const Piece of_r = read(r + at), of_s = read(s + at);
                Piece by_product = total(by_reset + row * OUT + o, ROWS * OUT);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    const Real keep = of_r.element[e];
                    by_r.element[e] =
                        by_product.element[e] * of_s.element[e] * keep * (1 - keep);
                    by_product.element[e] *= keep;
                }
                piece(to + G) = piece(to + G) + by_product;
                write(g_all + 2 * size + at, by_r);
            }
            piece(to + 2 * OUT) = by_r;
        }
    }

    const int c = threadIdx.x % COLUMNS, g = threadIdx.x / COLUMNS % GROUPS;
    const int part = threadIdx.x / (COLUMNS * GROUPS);
    Quad sum[PARTS][PER] = {};
    Chunk current;
    for (int chunk = 0; chunk < MAPS * OF_MAP; ++chunk) {
        arrived<STAGES - 2>();
        __syncthreads();  // and the chunk before has been used
        load(chunk + STAGES - 1);
        const int map = current.map, begin = current.begin;
        current.advance();
        const Real *const from = weights + chunk % STAGES * (CHUNK * WIDE);
#pragma unroll 1
        for (int q = part; q < CHUNK / 4; q += SPLIT) {
            const int o = begin + 4 * q;
            if (OUT % CHUNK && o >= OUT) break;
            Quad a[PER], b[4];
#pragma unroll
            for (int j = 0; j < PER; ++j)
                a[j] = quad(rows + (g + j * GROUPS) * ROW + map * OUT + o);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (APART && map == 0 && 4 * p * COLUMNS >= XM) continue;  // no U of h here
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    b[e] = reinterpret_cast<const Quad &>(
                        from[(4 * q + e) * WIDE + 4 * (c + p * COLUMNS)]);
                multiply(sum[p], a, b);
            }
        }
    }
    arrived<0>();
    __syncthreads();  // the sums take the weights' place
#pragma unroll
    for (int j = 0; j < PER; ++j)
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            quad(sums + (part * ROWS + g + j * GROUPS) * WIDE + 4 * (c + p * COLUMNS)) = sum[p][j];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * (ALL / VECTOR); i += THREADS) {
        const int row = i / (ALL / VECTOR), k = i % (ALL / VECTOR) * VECTOR;
        const long long at = first + row;
        if (at >= n_rows) continue;
        Real *const by_s = rows + row * ROW + G;
        const Piece value = total(sums + row * WIDE + k, ROWS * WIDE);
        if (k < X) {
            if (k < WIDTH_X) write(gx + at * WIDTH_X + k, SAME ? value + piece(by_s + k) : value);
        } else if (k < XM) {
            if (k - X < WIDTH_M) write(gm + at * WIDTH_M + k - X, value);
        } else {
            if (k - XM < WIDTH_H) write(gs + at * WIDTH_H + k - XM, value + piece(by_s + k - XM));
        }
    }
}

#endif
