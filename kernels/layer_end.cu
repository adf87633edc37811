// The end of a layer whose products are done: sums over neighbours, bias, activation and dropout; and
// its gradient.
//
//     forward   y[i] = drop(act(y[i] + b + sum_j A[i, j] rows[j]))
//     backward  z[i] = rows[i] act'(y[i]), where rows is the gradient with respect to y; each
//               block's part of the gradient of a bias; and sums[i] = sum_j A[i, j] z[j], where A
//               is the transpose
//
// rows, y, z, sums (n_rows, WIDTH); b (WIDTH), forward; partials (grid.x, WIDTH) of the arithmetic
// dtype, backward with BIAS. A in CSR: indptr (n_rows + 1), indices, data. z may be null,
// if it is not needed. counter (1) uint64, the step. Deterministic, no atomics.
//
// Activation and dropout are as in layer_end.cuh. -DBIAS=1: with b, or its gradient. -DBACKWARD=1.
// -DSUMMED=1: with sums over neighbours; 0: A and sums are not used, nor are rows forward.
// -DWEIGHTED=0: A holds ones, data is not read. -DLOOP=1: the identity is added to A. -DADDED=0:
// forward, y counts as 0 and is not read.
// -DVECTOR=1, 2 or 4: divides WIDTH; addresses are aligned to a vector.
//
// Launch: block (columns, lanes) of at most 256 threads, grid (from one to as many as there are rows).
// Lanes take rows in turn. A thread walks all neighbours of a row: no row may be long.
#include "common.cuh"
#include "layer_end.cuh"
#include "random.cuh"

const int N_VECTORS = WIDTH / VECTOR;
const int MOST_THREADS = 256;
const int AHEAD = 4;  // neighbours that are loaded before the first is added; an atom has one to four
static_assert(WIDTH % VECTOR == 0 && VECTOR <= 4, "a vector has one quad of random words");

__device__ inline Wide read(const STORAGE *from, const long long place)
{
    const Vector vector = reinterpret_cast<const Vector *>(from)[place];
    Wide result;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) result.element[e] = widen(vector.element[e]);
    return result;
}

__device__ inline void write(STORAGE *to, const long long place, const Wide &values)
{
    Vector vector;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) narrow(vector.element[e], values.element[e]);
    reinterpret_cast<Vector *>(to)[place] = vector;
}

__device__ inline void add(Wide &total, const Wide &more, const Real weight = 1)
{
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) total.element[e] += weight * more.element[e];
}

// A vector of `rows`; backward its gradient with respect to the sums.
__device__ inline Wide term(
    const STORAGE *rows, [[maybe_unused]] const STORAGE *y, const long long place,
    [[maybe_unused]] const Real scale)
{
    Wide values = read(rows, place);
#if BACKWARD && (ACTIVATION != IDENTITY || DROPOUT)
    const Wide results = read(y, place);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        values.element[e] = before(values.element[e], results.element[e], scale);
#endif
    return values;
}

// Add the terms of entries from `first` to `end` of a row.
__device__ inline void add_neighbours(
    Wide &total, const int first, const int end, const int column,
    const int *__restrict__ indices, [[maybe_unused]] const STORAGE *__restrict__ data,
    const STORAGE *rows, const STORAGE *y, const Real scale)
{
    for (int k = first; k < end; k += AHEAD) {
        Wide terms[AHEAD];
        Real weights[AHEAD];
        // Past the end the last entry is loaded again: conditional loads would wait for each other.
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int at = k + u < end ? k + u : end - 1;
            weights[u] = WEIGHTED ? widen(data[at]) : Real(1);
            terms[u] = term(rows, y, (long long)indices[at] * N_VECTORS + column, scale);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (k + u < end) add(total, terms[u], weights[u]);
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) layer_end(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const STORAGE *__restrict__ b, const STORAGE *__restrict__ rows,
    STORAGE *y, STORAGE *__restrict__ z, STORAGE *__restrict__ sums, Real *__restrict__ partials,
    const unsigned long long *__restrict__ counter, const int n_rows, const unsigned seed_low,
    const unsigned seed_high, const unsigned stream, const unsigned threshold, const Real scale)
{
    [[maybe_unused]] __shared__ Wide of_lanes[MOST_THREADS];
    for (int first = 0; first < N_VECTORS; first += blockDim.x) {
        const int column = first + threadIdx.x;
        [[maybe_unused]] Wide bias = {};  // backward its gradient
#if !BACKWARD && BIAS
        if (column < N_VECTORS) bias = read(b, column);
#endif
        for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < n_rows && column < N_VECTORS;
             row += gridDim.x * blockDim.y) {
            const long long place = (long long)row * N_VECTORS + column;
            Wide total = {};
#if SUMMED
            add_neighbours(
                total, indptr[row], indptr[row + 1], column, indices, data, rows, y, scale);
            if (LOOP) add(total, term(rows, y, place, scale));
#endif
#if BACKWARD
            if (SUMMED) write(sums, place, total);
            if (BIAS || z) {
                const Wide values = term(rows, y, place, scale);
                add(bias, values);
                if (z) write(z, place, values);
            }
#else
            if (ADDED) add(total, read(y, place));
            add(total, bias);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) total.element[e] = activated(total.element[e]);
#if DROPOUT
            const unsigned long long element = (unsigned long long)place * VECTOR;
            const Words drawn =
                words_of({seed_low, seed_high, stream}, unsigned(element / 4), *counter);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                total.element[e] = dropped(
                    total.element[e], word_of(drawn.word, (VECTOR == 4 ? 0 : element % 4) + e),
                    threshold, scale);
#endif
            write(y, place, total);
#endif
        }
#if BACKWARD && BIAS
        const int own = threadIdx.y * blockDim.x + threadIdx.x;
        of_lanes[own] = bias;
        __syncthreads();
        if (threadIdx.y == 0 && column < N_VECTORS) {
            for (int lane = 1; lane < blockDim.y; ++lane)
                add(bias, of_lanes[own + lane * blockDim.x]);
            reinterpret_cast<Wide *>(partials)[(long long)blockIdx.x * N_VECTORS + column] = bias;
        }
        __syncthreads();
#endif
    }
}
