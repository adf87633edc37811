// A whole layer of a graph convolution: sums over neighbours, linear maps, bias, activation, dropout.
//
//     forward   y[i] = act( sum_r W_r sum_j A_r[i, j] x[j] + W_self x[i]
//                           + sum_r b_r sum_j A_r[i, j] + sum_e b_self_e )
//     backward  z[i] = gy[i] act'(y[i]),   S_r[j] = sum_i A_r[i, j] z[i]
//               gx[j] = sum_r W_r^T S_r[j] + W_self^T z[j]
//               gW_r = sum_j S_r[j] x[j]^T,  gW_self = sum_j z[j] x[j]^T,
//               gb_r = sum_j S_r[j],         gb_self = sum_j z[j]
//
// The gradient sums neighbours before it maps, as the layer itself does. So both directions do the
// same: they gather rows through a CSR matrix for each relation, and multiply the sums by matrices
// in shared memory. With LOOP the row itself is one more neighbour of relation 0, with value 1.
// Without relations it is a linear layer.
//
// Source: the graph convolutions of Kipf, Welling 2016 (RSGCN), Schlichtkrull et al. 2017 (RelGCN),
// Xu et al. 2019 (GIN), Duvenaud et al. 2015 (NFP: the degree of a node as its relation).
//
// indptr (n_rows * RELATIONS + 1) int32: rows i * RELATIONS + r; indices (nnz) int32: rows of x;
// data (nnz): values. Forward: A. Backward: its transpose, rows j * RELATIONS + r, indices: rows of gy.
// rows (n_rows, GATHERED): forward x (WIDTH_IN), backward gy (WIDTH_OUT); y (n_rows, WIDTH_OUT), the
// result of the layer, backward only. x (n_rows, WIDTH_IN), backward only.
// W: RELATIONS matrices (WIDTH_OUT, WIDTH_IN), row c of W_r is row c * RELATIONS + r, with
// -DBY_RELATION=1 row r * WIDTH_OUT + c; b (WIDTH_OUT * RELATIONS) in the same order. W_self
// (WIDTH_OUT, WIDTH_IN), b_self (BIASES, WIDTH_OUT).
// result (n_rows, PRODUCED): forward y, backward gx, to which `more`, if it is not NULL, is added; it
// may be the same array. partials (grid.x, all parameters, rounded up to quads) of the arithmetic
// dtype: each block's part of the gradients of W, W_self, b and b_self, in that order and in the
// parameters' own layout; b_self once for all its BIASES. Every element is written, except for
// those at the end that fill the last quad; b and b_self are the same in all slices and written by
// the first.
// Rows without entries sum to 0. If a row has no entries of a relation, it is left out of the
// relation's products and of its matrix's gradient, or takes part in them with zeros, so infinities
// and NaN in the matrix and in x may have an effect there or none. Deterministic, no atomics.
//
// Activation and dropout are as in layer_end.cuh. counter (1) uint64, the step.
//
// -DRELATIONS=n, 0: none, indptr to data are not read. -DSELF=1: with W_self. -DLOOP=1, with one
// relation: see above. -DWEIGHTED=0: A holds ones, data is not read.
// -DRELATION_BIAS=1: with b. -DBIASES=n: rows of b_self, 0: none.
// -DBACKWARD=1.
// -DFEATURES=0: backward without gx.
// -DQUADS=1: rows of all arrays are multiples of four elements, aligned to these; 0: any widths.
// -DSLICES=n: blocks share the columns of a result that is too wide for one.
// -DROWS=n: rows of a tile. -DTHREADS=n: of a block. -DSPLITS=n: threads share each element's sum.
//
// Launch: block (THREADS), grid (from one to as many as there are tiles, SLICES): blocks take tiles of
// rows in turn. Shared memory, in elements of the arithmetic dtype: the matrices, MAPPED * W_ROWS *
// W_STRIDE; a tile's products, SPLITS * ROWS * PQ * 4; its sums, ROWS * STRIDE; backward its rows of x,
// ROWS * X_STRIDE; forward with b the degrees, ROWS * RELATIONS.
#include "common.cuh"
#include "copies.cuh"
#include "layer_end.cuh"
#include "random.cuh"

#define NEEDS_Y (BACKWARD && (ACTIVATION != IDENTITY || DROPOUT))

const int GATHERED = BACKWARD ? WIDTH_OUT : WIDTH_IN;
const int PRODUCED = BACKWARD ? WIDTH_IN : WIDTH_OUT;
// The part of one block: some columns of the result, and of the matrices.
const int SLICE = PRODUCED / SLICES;
const int SLICE_IN = BACKWARD ? SLICE : WIDTH_IN, SLICE_OUT = BACKWARD ? WIDTH_OUT : SLICE;
static_assert(!LOOP || RELATIONS == 1, "LOOP needs one relation, which every tile then uses");
static_assert(SLICES == 1 || PRODUCED % (4 * SLICES) == 0, "slices are equally wide, whole quads");
const int GQ = (GATHERED + 3) / 4, PQ = (SLICE + 3) / 4;  // quads: four elements
const int MAPPED = RELATIONS + SELF;  // terms: sums that have a matrix
// The gradient of b_self needs z as a term, even if there is no W_self by which to multiply it.
[[maybe_unused]] const int LONE = BACKWARD && BIASES && !SELF;
const int TERMS = MAPPED + LONE;
// Rows in shared memory are four elements longer, so that neighbours lie in different banks.
const int W_STRIDE = (SLICE_IN + 3) / 4 * 4 + 4, W_ROWS = (SLICE_OUT + 3) / 4 * 4;
const int STRIDE = TERMS * GQ * 4 + 4;
[[maybe_unused]] const int X_STRIDE = PQ * 4 + 4;
[[maybe_unused]] const int AHEAD = NEEDS_Y ? 2 : BACKWARD ? 3 : 4;  // entries whose loads are issued together
[[maybe_unused]] const int BIAS_COLUMNS = BACKWARD && (BIASES || RELATION_BIAS) ? TERMS * GQ * 4 : 0;

// A thread calculates 4 x 4 elements of a tile's product, from one part in SPLITS of the sums.
const int ROW_STEP = ROWS / 4;
const int ITEMS = PQ * ROW_STEP;
[[maybe_unused]] const int GROUPS = PQ < 32 ? 32 / PQ : 1;  // of four rows, that a warp has
// The gradients of several matrices leave no registers for unrolling.
[[maybe_unused]] const int UNROLLED = BACKWARD && RELATIONS > 1 ? 1 : 2;
// A row's pattern says which of several relations it has entries of; r and r + 32 share a bit.
[[maybe_unused]] const int PATTERN_BITS = RELATIONS < 32 ? RELATIONS : 32;
static_assert(ROWS <= 32 && THREADS % 32 == 0, "a tile has a lane of every warp for each row");
static_assert(ROWS % 4 == 0 && SPLITS >= 1 && (SPLITS == 1 || SPLITS * ITEMS <= THREADS),
              "if sums have several parts, a thread has at most one of them");

struct alignas(sizeof(STORAGE) * 4 < 16 ? sizeof(STORAGE) * 4 : 16) Stored {
    STORAGE element[4];
};

// Four elements of a row of a matrix in memory, 0 past its end.
__device__ inline Quad load(const STORAGE *__restrict__ row, const int quad, const int width)
{
    Quad values;
#if QUADS
    const Stored stored = reinterpret_cast<const Stored *>(row)[quad];
#pragma unroll
    for (int e = 0; e < 4; ++e) values.element[e] = widen(stored.element[e]);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e)
        values.element[e] = quad * 4 + e < width ? widen(row[quad * 4 + e]) : Real(0);
#endif
    return values;
}

__device__ inline void store(STORAGE *row, const int quad, const int width, const Quad &values)
{
#if QUADS
    Stored stored;
#pragma unroll
    for (int e = 0; e < 4; ++e) narrow(stored.element[e], values.element[e]);
    reinterpret_cast<Stored *>(row)[quad] = stored;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (quad * 4 + e < width) narrow(row[quad * 4 + e], values.element[e]);
#endif
}

// The row of W, or the element of b, for row c of the matrix of a relation.
__device__ inline int weight_row(const int c, const int relation)
{
    return BY_RELATION ? relation * WIDTH_OUT + c : c * RELATIONS + relation;
}

// The bit of a relation in a pattern.
__device__ inline unsigned bit_of(const int relation) { return 1u << relation % 32; }

// A row that is gathered: of x, or of z.
struct Gathered {
    Quad rows;
#if NEEDS_Y
    Quad y;
#endif
};

__device__ inline Gathered gather(
    const STORAGE *__restrict__ rows, const STORAGE *__restrict__ y, const long long row,
    const int quad)
{
    Gathered found;
    found.rows = load(rows + row * GATHERED, quad, GATHERED);
#if NEEDS_Y
    found.y = load(y + row * GATHERED, quad, GATHERED);
#endif
    return found;
}

__device__ inline Real value_of(const Gathered &found, const int e, const Real scale)
{
#if NEEDS_Y
    return before(found.rows.element[e], found.y.element[e], scale);
#else
    return found.rows.element[e];
#endif
}

// Copy 16 bytes to shared memory while the thread continues, until wait_for_copies().
__device__ inline void copy_ahead(Real *to, const STORAGE *from)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (unsigned)__cvta_generic_to_shared(to)),
                 "l"(from));
#else
    *reinterpret_cast<Quad *>(to) = load(from, 0, 4);
#endif
}

// Copy a quad of a row of a matrix in memory to shared memory, 0 past the row's end.
__device__ inline void copy(Real *to, const STORAGE *row, const int quad, const int width)
{
    if constexpr (QUADS && sizeof(STORAGE) == 4)
        copy_ahead(to, row + quad * 4);
    else
        *reinterpret_cast<Quad *>(to) = load(row, quad, width);
}

// Load the block's slice of the matrices of all terms into (MAPPED, W_ROWS, W_STRIDE); rows stay
// rows, and elements past the ends of the slice are 0.
__device__ inline void load_matrices(
    Real *matrices, const STORAGE *__restrict__ W, const STORAGE *__restrict__ W_self,
    const int first_in, const int first_out)
{
    const int IQ = (SLICE_IN + 3) / 4;
#pragma unroll 4
    for (int u = threadIdx.x; u < MAPPED * W_ROWS * IQ; u += THREADS) {
        const int quad = u % IQ, c = u / IQ % W_ROWS, term = u / (IQ * W_ROWS);
        Real *const to = matrices + (term * W_ROWS + c) * W_STRIDE + quad * 4;
        const bool is_self = term == RELATIONS;
        const long long row = is_self ? first_out + c : weight_row(first_out + c, term);
        if (c < SLICE_OUT)
            copy(to, (is_self ? W_self : W) + row * WIDTH_IN + first_in, quad, SLICE_IN);
        else
            *reinterpret_cast<Quad *>(to) = {};
    }
}

// Sum neighbours into sums (ROWS, STRIDE) for the rows from `first` on; patterns (ROWS): which
// relations they have entries of. degrees (ROWS, RELATIONS): sums of the values.
__device__ inline void sum_neighbours(
    Real *sums, Real *degrees, unsigned *patterns, const int *__restrict__ indptr,
    const int *__restrict__ indices, const STORAGE *__restrict__ data,
    const STORAGE *__restrict__ rows, const STORAGE *__restrict__ y, const int first,
    const int n_rows, const Real scale)
{
    const int UNITS = ROWS * GQ;  // a quad of a row
    const int EACH = (UNITS + THREADS - 1) / THREADS;
    const int GROUP = EACH < 2 ? EACH : 2;  // units of a thread whose loads are issued together
#pragma unroll 1
    for (int start = threadIdx.x; start < UNITS; start += GROUP * THREADS) {
        int bound[GROUP][RELATIONS + 1], more = 0;  // where the entries of a relation begin
        [[maybe_unused]] Quad sum[GROUP];
        [[maybe_unused]] Real degree[GROUP];
        Gathered own[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int unit = start + i * THREADS, row = first + unit / GQ;
            const bool is_there = unit < UNITS && row < n_rows;
#pragma unroll
            for (int r = 0; r <= RELATIONS; ++r)
                bound[i][r] = RELATIONS && is_there ? indptr[(long long)row * RELATIONS + r] : 0;
            own[i] = {};
            if ((SELF || LOOP || LONE) && is_there) own[i] = gather(rows, y, row, unit % GQ);
            if (more < bound[i][RELATIONS] - bound[i][0])
                more = bound[i][RELATIONS] - bound[i][0];
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int unit = start + i * THREADS, row = unit / GQ, quad = unit % GQ;
            if (unit >= UNITS) continue;
            Quad value;
#pragma unroll
            for (int e = 0; e < 4; ++e) value.element[e] = value_of(own[i], e, scale);
            Quad *const to = reinterpret_cast<Quad *>(sums + row * STRIDE) + quad;
            if (RELATIONS == 1) {  // a single one stays in registers
                sum[i] = LOOP ? value : Quad();
                degree[i] = LOOP;
            }
#pragma unroll
            for (int term = RELATIONS == 1; term < TERMS; ++term)
                to[term * GQ] = term >= RELATIONS ? value : Quad();
            if (RELATIONS > 1 && quad == 0) {
                unsigned pattern = 0;
#pragma unroll
                for (int r = 0; r < RELATIONS; ++r) {
                    pattern |= bound[i][r] < bound[i][r + 1] ? bit_of(r) : 0;
                    if (!BACKWARD && RELATION_BIAS) degrees[row * RELATIONS + r] = 0;
                }
                patterns[row] = pattern;
            }
        }
#if RELATIONS
        for (int k = 0; k < more; k += AHEAD) {
            int column[GROUP][AHEAD];
            Real value[GROUP][AHEAD];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int begin = bound[i][0] + k, last = bound[i][RELATIONS] - 1;
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (begin <= last) {
                        // Past the end the last entry is loaded again, as in bspmm_csr.cu.
                        const int at = begin + a < last ? begin + a : last;
                        column[i][a] = indices[at];
                        value[i][a] = WEIGHTED ? widen(data[at]) : Real(1);
                    }
            }
            Gathered found[GROUP][AHEAD];
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (bound[i][0] + k + a < bound[i][RELATIONS])
                        found[i][a] = gather(rows, y, column[i][a], (start + i * THREADS) % GQ);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int unit = start + i * THREADS, row = unit / GQ, quad = unit % GQ;
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const int entry = bound[i][0] + k + a;
                    if (entry >= bound[i][RELATIONS]) continue;
                    if constexpr (RELATIONS == 1) {
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            sum[i].element[e] += value[i][a] * value_of(found[i][a], e, scale);
                        degree[i] += value[i][a];
                        continue;
                    }
                    int relation = 0;
#pragma unroll
                    for (int r = 1; r < RELATIONS; ++r) relation += entry >= bound[i][r];
                    Quad *const to =
                        reinterpret_cast<Quad *>(sums + row * STRIDE) + relation * GQ + quad;
                    Quad total = *to;
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        total.element[e] += value[i][a] * value_of(found[i][a], e, scale);
                    *to = total;
                    if (!BACKWARD && RELATION_BIAS && quad == 0)
                        degrees[row * RELATIONS + relation] += value[i][a];
                }
            }
        }
#if RELATIONS == 1
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int unit = start + i * THREADS, row = unit / GQ, quad = unit % GQ;
            if (unit >= UNITS) continue;
            *reinterpret_cast<Quad *>(sums + row * STRIDE + quad * 4) = sum[i];
            if (!BACKWARD && RELATION_BIAS && quad == 0) degrees[row] = degree[i];
        }
#endif
#endif
    }
}

// Order the rows of a tile by their patterns, so that the four rows of a thread seldom have
// relations that the others lack. Every warp finds the order for itself: another barrier would take
// longer.
__device__ inline void order_rows(unsigned char *order, const unsigned pattern)
{
    const int lane = threadIdx.x % 32;
    const unsigned before = (1u << lane) - 1;
    unsigned alike = ROWS < 32 ? (1u << ROWS) - 1 : ~0u;  // rows, in the bits compared so far
    int place = 0;
#pragma unroll
    for (int bit = PATTERN_BITS - 1; bit >= 0; --bit) {
        const bool is_set = pattern >> bit & 1;
        const unsigned with = __ballot_sync(~0u, is_set);
        if (is_set) place += __popc(alike & ~with);
        alike &= is_set ? with : ~with;
    }
    place += __popc(alike & before);
    if (lane < ROWS) order[place] = lane;
    __syncwarp();
}

// Add up a thread's part of 4 x 4 elements of a tile's product. They are in the rows `rows`, which
// have entries of the relations of `pattern`. Forward, their columns are quad, quad + PQ, ..., so
// that neighbouring threads read rows of W side by side; backward, they are four in a row.
__device__ inline void multiply(
    Real (&total)[4][4], const Real *matrices, const Real *sums, const int (&rows)[4],
    const unsigned pattern, const int quad, const int part)
{
#pragma unroll 1
    for (int term = 0; term < MAPPED; ++term) {
        if (RELATIONS > 1 && term < RELATIONS && !(pattern & bit_of(term))) continue;
        const Real *const of_sums = sums + term * GQ * 4;
        const Real *const matrix = matrices + term * (W_ROWS * W_STRIDE);
#pragma unroll UNROLLED
        for (int step = 0; step < (GQ + SPLITS - 1) / SPLITS; ++step) {
            const int g = step * SPLITS + part;
            if (GQ % SPLITS && g >= GQ) break;
            Quad sum[4], weight[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i] = *reinterpret_cast<const Quad *>(of_sums + rows[i] * STRIDE + g * 4);
                weight[i] = *reinterpret_cast<const Quad *>(
                    matrix + (BACKWARD ? (g * 4 + i) * W_STRIDE + quad * 4
                                       : (quad + i * PQ) * W_STRIDE + g * 4));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int p = 0; p < 4; ++p)
                        total[i][p] += BACKWARD ? sum[i].element[e] * weight[e].element[p]
                                                : sum[i].element[e] * weight[p].element[e];
        }
    }
}

// With a small matrix of floats two blocks fit into the registers of a multiprocessor.
const int RESIDENT = MAPPED * GQ * PQ <= 256 && THREADS == 256 && sizeof(Real) == 4 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) graph_linear(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const STORAGE *__restrict__ rows,
    const STORAGE *__restrict__ y, const STORAGE *__restrict__ x, const STORAGE *__restrict__ W,
    const STORAGE *__restrict__ W_self, const STORAGE *__restrict__ b,
    const STORAGE *__restrict__ b_self, const STORAGE *more, STORAGE *result,
    Real *__restrict__ partials, const unsigned long long *__restrict__ counter,
    const int n_rows, const unsigned seed_low, const unsigned seed_high, const unsigned stream,
    const unsigned threshold, const Real scale)
{
    extern __shared__ Quad shared[];
    Real *const matrices = reinterpret_cast<Real *>(shared);
    Real *const totals = matrices + MAPPED * W_ROWS * W_STRIDE;  // (SPLITS, ROWS, PQ * 4)
    Real *const sums = totals + SPLITS * ROWS * PQ * 4;
    Real *const own_x = sums + ROWS * STRIDE;  // backward
    Real *const degrees = own_x;  // forward
    [[maybe_unused]] __shared__ unsigned patterns[ROWS];
    [[maybe_unused]] __shared__ unsigned char orders[THREADS / 32][ROWS];

#if BACKWARD
    // The blocks of 4 x 4 of the matrices' gradients that a thread sums, in registers.
    const int BLOCKS = MAPPED * GQ * PQ;
    const int OWNED = (BLOCKS + THREADS - 1) / THREADS;
    alignas(Quad) Real gradient[OWNED][4][4] = {};
    const int BIAS_EACH = (BIAS_COLUMNS + THREADS - 1) / THREADS;
    Real bias[BIAS_EACH + 1] = {};
#endif

    const int first_column = blockIdx.y * SLICE;  // of the result
    const int first_in = BACKWARD ? first_column : 0, first_out = BACKWARD ? 0 : first_column;
    load_matrices(matrices, W, W_self, first_in, first_out);
    for (int first = blockIdx.x * ROWS; first < n_rows; first += gridDim.x * ROWS) {
#if BACKWARD
        for (int u = threadIdx.x; u < ROWS * PQ; u += THREADS) {
            const int row = first + u / PQ, quad = u % PQ;
            Real *const to = own_x + u / PQ * X_STRIDE + quad * 4;
            if (row < n_rows)
                copy(to, x + (long long)row * WIDTH_IN + first_in, quad, SLICE_IN);
            else
                *reinterpret_cast<Quad *>(to) = {};
        }
#endif
        sum_neighbours(
            sums, degrees, patterns, indptr, indices, data, rows, y, first, n_rows, scale);
        wait_for_copies();
        __syncthreads();
        [[maybe_unused]] unsigned pattern = 0;  // of the row of this lane
        if (RELATIONS > 1 && threadIdx.x % 32 < ROWS) pattern = patterns[threadIdx.x % 32];
        if (!BACKWARD || FEATURES) {
            const unsigned char *const order = orders[threadIdx.x / 32];
            if (RELATIONS > 1) order_rows(orders[threadIdx.x / 32], pattern);
            const int part = SPLITS > 1 ? threadIdx.x / ITEMS : 0;
            for (int item = SPLITS > 1 ? threadIdx.x % ITEMS : threadIdx.x;
                 item < ITEMS && part < SPLITS; item += THREADS) {
                const int quad = item % PQ;
                // Each part deals the groups to other warps, because otherwise one quarter of the
                // multiprocessor might get all rows of many relations.
                const int group = (item / PQ + (RELATIONS > 1 ? part * GROUPS : 0)) % ROW_STEP;
                int own[4];
                unsigned any = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    own[i] = RELATIONS > 1 ? order[group * 4 + i] : group + i * ROW_STEP;
                    if (RELATIONS > 1) any |= patterns[own[i]];
                }
                Real total[4][4] = {};
                multiply(total, matrices, sums, own, any, quad, part);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    Real *const to = totals + (part * ROWS + own[i]) * (PQ * 4);
#pragma unroll
                    for (int p = 0; p < 4; ++p)
                        to[BACKWARD ? quad * 4 + p : quad + p * PQ] = total[i][p];
                }
            }
            __syncthreads();
            for (int u = threadIdx.x; u < ROWS * PQ; u += THREADS) {
                const int row = u / PQ, quad = u % PQ;
                if (first + row >= n_rows) break;
                const long long to = (long long)(first + row) * PRODUCED + first_column;
                Quad total = {};
#pragma unroll
                for (int part = 0; part < SPLITS; ++part) {
                    const Quad sum = reinterpret_cast<const Quad *>(totals)[part * ROWS * PQ + u];
#pragma unroll
                    for (int e = 0; e < 4; ++e) total.element[e] += sum.element[e];
                }
#if BACKWARD
                if (more) {
                    const Quad others = load(more + to, quad, SLICE);
#pragma unroll
                    for (int e = 0; e < 4; ++e) total.element[e] += others.element[e];
                }
#else
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int c = first_out + quad * 4 + e;
                    Real value = total.element[e];
                    if (c < WIDTH_OUT) {
#pragma unroll
                        for (int set = 0; set < BIASES; ++set)
                            value += widen(b_self[set * WIDTH_OUT + c]);
#if RELATION_BIAS
#pragma unroll
                        for (int relation = 0; relation < RELATIONS; ++relation)
                            value += degrees[row * RELATIONS + relation] *
                                     widen(b[weight_row(c, relation)]);
#endif
                    }
                    total.element[e] = activated(value);
                }
#if DROPOUT
                const unsigned long long at =
                    (unsigned long long)(first + row) * WIDTH_OUT + first_out + quad * 4;
                const Draw draw = {seed_low, seed_high, stream};
                Words drawn = words_of(draw, unsigned(at / 4), *counter);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int word = (at + e) % 4;
                    if (WIDTH_OUT % 4 && e && word == 0)
                        drawn = words_of(draw, unsigned((at + e) / 4), *counter);
                    const unsigned found = word_of(drawn.word, WIDTH_OUT % 4 == 0 ? e : word);
                    total.element[e] = dropped(total.element[e], found, threshold, scale);
                }
#endif
#endif
                store(result + to, quad, SLICE, total);
            }
        }
#if BACKWARD
        // Add the product of row `row` to the thread's block i.
        const auto add = [&](const int i, const int row) {
            const int block = threadIdx.x + i * THREADS;
            const Quad factor =
                *reinterpret_cast<const Quad *>(own_x + row * X_STRIDE + block % PQ * 4);
            const Quad sum =
                *reinterpret_cast<const Quad *>(sums + row * STRIDE + block / PQ * 4);
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int f = 0; f < 4; ++f)
                    gradient[i][s][f] += sum.element[s] * factor.element[f];
        };
        if (RELATIONS > 1) {
            unsigned has[OWNED] = {};  // a bit for every row that has entries of the block's relation
#pragma unroll
            for (int bit = 0; bit < PATTERN_BITS; ++bit) {
                const unsigned with = __ballot_sync(~0u, pattern >> bit & 1);
#pragma unroll
                for (int i = 0; i < OWNED; ++i)
                    if ((threadIdx.x + i * THREADS) / (GQ * PQ) % 32 == bit) has[i] = with;
            }
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                const int block = threadIdx.x + i * THREADS;
                if (BLOCKS % THREADS && block >= BLOCKS) continue;
                unsigned left = has[i];
                if (block / (GQ * PQ) >= RELATIONS) left = ROWS < 32 ? (1u << ROWS) - 1 : ~0u;
                while (left & (left - 1)) {  // two at a time, whose loads are issued together
                    const int row = __ffs(left) - 1;
                    left &= left - 1;
                    add(i, row);
                    add(i, __ffs(left) - 1);
                    left &= left - 1;
                }
                if (left) add(i, __ffs(left) - 1);
            }
        } else {
#pragma unroll 2
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int i = 0; i < OWNED; ++i)
                    if (BLOCKS % THREADS == 0 || threadIdx.x + i * THREADS < BLOCKS) add(i, row);
        }
#pragma unroll
        for (int i = 0; i < BIAS_EACH; ++i) {
            const int column = threadIdx.x + i * THREADS;
            if (column < BIAS_COLUMNS)
                for (int row = 0; row < ROWS; ++row) bias[i] += sums[row * STRIDE + column];
        }
#endif
        __syncthreads();
    }

#if BACKWARD
    const long long SIZE = (long long)WIDTH_OUT * WIDTH_IN;
    const long long AFTER = MAPPED * SIZE;
    const long long N_PARTIALS =
        (AFTER + (RELATION_BIAS ? WIDTH_OUT * RELATIONS : 0) + (BIASES ? WIDTH_OUT : 0) + 3) / 4 * 4;
    Real *const part = partials + blockIdx.x * N_PARTIALS;
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
        const int block = threadIdx.x + i * THREADS;
        const int term = block / (GQ * PQ), k = block % PQ * 4;
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const int c = block / PQ % GQ * 4 + s;
            if (block >= BLOCKS || c >= WIDTH_OUT) continue;
            Real *const to =
                part + (term == RELATIONS ? RELATIONS * SIZE + (long long)c * WIDTH_IN
                                          : (long long)weight_row(c, term) * WIDTH_IN) +
                first_in + k;
            if (WIDTH_IN % 4 == 0) {
                *reinterpret_cast<Quad *>(to) = *reinterpret_cast<const Quad *>(gradient[i][s]);
            } else {
#pragma unroll
                for (int f = 0; f < 4; ++f)
                    if (k + f < SLICE_IN) to[f] = gradient[i][s][f];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < BIAS_EACH; ++i) {
        const int column = threadIdx.x + i * THREADS;
        const int term = column / (GQ * 4), c = column % (GQ * 4);
        if (column >= BIAS_COLUMNS || c >= WIDTH_OUT || blockIdx.y) continue;
        if (RELATION_BIAS && term < RELATIONS) part[AFTER + weight_row(c, term)] = bias[i];
        if (BIASES && term == RELATIONS)
            part[AFTER + (RELATION_BIAS ? WIDTH_OUT * RELATIONS : 0) + c] = bias[i];
    }
#endif
}
