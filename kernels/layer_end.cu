// The end of a layer whose products are done: biases, activation and dropout; and its gradient.
//
//     forward   y[i] = drop(act(y[i] + sum_e b_e)), in place
//     backward  z[i] = gy[i] act'(y[i]), and what the rows of a block add to the gradient of a bias
//
// y, gy, z (n_rows, WIDTH); b (BIASES, WIDTH), forward; partials (grid.x, WIDTH) of the arithmetic
// dtype, backward with BIASES. counter (1) uint64, the step. Deterministic, no atomics.
//
// Activation and dropout are those of layer_end.cuh. -DBIASES=n: rows of b, 0: none. -DBACKWARD=1.
// -DVECTOR=1, 2 or 4: divides WIDTH; addresses are aligned to a vector.
//
// Launch: block (columns, lanes) of at most 256 threads, grid (from one to as many as there are rows).
// Lanes take rows in turn.
#include "common.cuh"
#include "layer_end.cuh"
#include "random.cuh"

const int N_VECTORS = WIDTH / VECTOR;
const int MOST_THREADS = 256;
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

extern "C" __global__ void __launch_bounds__(MOST_THREADS) layer_end(
    const STORAGE *__restrict__ b, const STORAGE *__restrict__ gy, STORAGE *y,
    STORAGE *__restrict__ z, Real *__restrict__ partials,
    const unsigned long long *__restrict__ counter, const int n_rows, const unsigned seed_low,
    const unsigned seed_high, const unsigned stream, const unsigned threshold, const Real scale)
{
    [[maybe_unused]] __shared__ Wide of_lanes[MOST_THREADS];
    const int own = threadIdx.y * blockDim.x + threadIdx.x;
    for (int first = 0; first < N_VECTORS; first += blockDim.x) {
        const int column = first + threadIdx.x;
        [[maybe_unused]] Wide bias = {};  // forward the sum of the biases, backward its gradient
#if !BACKWARD
#pragma unroll
        for (int set = 0; set < BIASES; ++set)
            if (column < N_VECTORS) {
                const Wide more = read(b, set * N_VECTORS + column);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) bias.element[e] += more.element[e];
            }
#endif
        for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < n_rows && column < N_VECTORS;
             row += gridDim.x * blockDim.y) {
            const long long place = (long long)row * N_VECTORS + column;
            Wide values;
#if BACKWARD
            values = read(gy, place);
#if ACTIVATION != IDENTITY || DROPOUT
            const Wide results = read(y, place);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                values.element[e] = before(values.element[e], results.element[e], scale);
#endif
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) bias.element[e] += values.element[e];
            if (z) write(z, place, values);
#else
            values = read(y, place);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                values.element[e] = activated(values.element[e] + bias.element[e]);
#if DROPOUT
            const unsigned long long element = (unsigned long long)place * VECTOR;
            const Words drawn =
                words_of({seed_low, seed_high, stream}, unsigned(element / 4), *counter);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                values.element[e] = dropped(
                    values.element[e], word_of(drawn.word, (VECTOR == 4 ? 0 : element % 4) + e),
                    threshold, scale);
#endif
            write(y, place, values);
#endif
        }
#if BACKWARD && BIASES
        of_lanes[own] = bias;
        __syncthreads();
        if (threadIdx.y == 0 && column < N_VECTORS) {
            for (int lane = 1; lane < blockDim.y; ++lane)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    bias.element[e] += of_lanes[own + lane * blockDim.x].element[e];
            reinterpret_cast<Wide *>(partials)[(long long)blockIdx.x * N_VECTORS + column] = bias;
        }
        __syncthreads();
#endif
    }
}
