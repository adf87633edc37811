// Hooks of an optimizer, then its update, for many parameters p with gradients g at once. The numbers
// below are named as in Chainer's optimizers, and are read from device memory:
//
//     hooks, in their order:
//       WEIGHT_DECAY  g += rate p                  LASSO  g += rate sign(p)
//       HARD_CLIPPING g = min(max(g, lower), upper)
//     RULE:
//       NONE          p stays as it is
//       SGD           p -= lr g
//       MOMENTUM_SGD  v = momentum v - lr g,  p += v
//       RMSPROP       ms = alpha ms + (1 - alpha) g g,  p -= lr g / (sqrt(ms) + eps)
//       RMSPROP_EPS_INSIDE                  the same,  p -= lr g / sqrt(ms + eps)
//       ADAM          m += (1 - beta1) (g - m),  v += (1 - beta2) (g g - v),
//                     p -= eta (alpha_t m / (sqrt(v) + eps) + weight_decay_rate p)
//       AMSGRAD       the same with max(vhat, v), which becomes vhat, instead of v
//
// Clipping by the norm of all gradients takes two launches. The first, with RULE=NONE, writes each
// block's sum of g^2, after the hooks, to `after`. The next adds up `before` over all blocks, and
// begins with g *= min(threshold / sqrt(sum), 1). Sums are doubles, added in a fixed order:
// deterministic, no atomics.
//
// g is written if a hook or a norm has changed it. Numbers are rounded to the arithmetic dtype
// first; formulas and order of operations are as in Chainer's own kernels. Only float and double
// are supported.
//
// table, passed by value: the parameters of this launch. The arrays of a parameter are C-contiguous
// and of the same size. A parameter has the chunks, of CHUNK elements, from its first_chunk to the
// next parameter's; an empty one has none. first_number says where its numbers begin, in the order
// in which they are read below.
// numbers: two for every hook of the optimizer, then the numbers of the rules. first_hook, n_hooks,
// kinds: the hooks of this launch, with two bits for the kind of each. before, after: may be null;
// if `before` is given, hook first_hook - 1 is the clipping, and its first number the threshold.
//
// Launch: block (THREADS), grid (any); blocks take chunks in turn. No dynamic shared memory.
#include "common.cuh"

#define NONE 0
#define SGD 1
#define MOMENTUM_SGD 2
#define RMSPROP 3
#define RMSPROP_EPS_INSIDE 4
#define ADAM 5
#define AMSGRAD 6

enum Hook { WEIGHT_DECAY, LASSO, HARD_CLIPPING };

const int THREADS = 256;
const int EACH = CHUNK / THREADS;  // elements of a chunk that a thread owns, loaded at once
static_assert(THREADS * EACH == CHUNK, "all threads own equally many elements");
const int N_STATES = RULE == AMSGRAD ? 3 : RULE == ADAM ? 2 : RULE == SGD || RULE == NONE ? 0 : 1;

struct Parameter {
    STORAGE *data, *grad, *state[3];
    long long size;
    int first_chunk, first_number;
};

struct Table {
    Parameter parameter[N_PARAMETERS];
    int n_parameters, n_chunks;
};
static_assert(sizeof(Table) == TABLE_BYTES, "the host has the same layout");

// Return the sum over all threads of the block to every one of them.
__device__ inline double block_sum(double value)
{
    __shared__ double of_warp[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(~0u, value, step);
    __syncthreads();  // the previous call may still be reading of_warp
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += of_warp[warp];
    return sum;
}

// At least two blocks at once: otherwise the compiler spills registers at the calls of sqrt and
// division.
extern "C" __global__ void __launch_bounds__(256, 2) fused_update(
    const Table table, const double *__restrict__ numbers, const double *__restrict__ before,
    double *__restrict__ after, const int n_before, const int first_hook, const int n_hooks,
    const unsigned kinds)
{
    Real rate = 1;
    if (before) {
        double sum = 0;
        for (int i = threadIdx.x; i < n_before; i += THREADS) sum += before[i];
        const double scale = numbers[2 * (first_hook - 1)] / sqrt(block_sum(sum));
        if (!(scale > 1)) rate = Real(scale);  // a NaN propagates to the gradients
    }
    double squares = 0;
    for (int chunk = blockIdx.x; chunk < table.n_chunks; chunk += gridDim.x) {
        int low = 0, high = table.n_parameters - 1;  // the last one that begins at or before it
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (table.parameter[middle].first_chunk <= chunk) low = middle; else high = middle - 1;
        }
        const Parameter &parameter = table.parameter[low];
        const long long size = parameter.size;
        const long long first =
            (long long)(chunk - parameter.first_chunk) * CHUNK + threadIdx.x;

        Real p[EACH], g[EACH], state[N_STATES + 1][EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const long long i = first + e * THREADS;
            if (i < size) {
                p[e] = parameter.data[i];
                g[e] = parameter.grad[i];
#pragma unroll
                for (int s = 0; s < N_STATES; ++s) state[s][e] = parameter.state[s][i];
            } else {
                p[e] = g[e] = 0;
#pragma unroll
                for (int s = 0; s < N_STATES; ++s) state[s][e] = 0;
            }
        }

        if (before)
#pragma unroll
            for (int e = 0; e < EACH; ++e) g[e] *= rate;
        for (int hook = 0; hook < n_hooks; ++hook) {
            const Real a = Real(numbers[2 * (first_hook + hook)]);
            const Real b = Real(numbers[2 * (first_hook + hook) + 1]);
            const unsigned kind = kinds >> 2 * hook & 3;
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (kind == WEIGHT_DECAY) {
                    g[e] += a * p[e];
                } else if (kind == LASSO) {
                    const Real sign = p[e] != p[e] ? p[e] : Real((p[e] > 0) - (p[e] < 0));
                    g[e] += a * sign;
                } else {
                    if (g[e] < a) g[e] = a;
                    if (g[e] > b) g[e] = b;
                }
        }

#if RULE != NONE
        const double *const number = numbers + parameter.first_number;
#endif
#if RULE == SGD
        const Real lr = Real(number[0]);
#elif RULE == MOMENTUM_SGD
        const Real lr = Real(number[0]), momentum = Real(number[1]);
#elif RULE == RMSPROP || RULE == RMSPROP_EPS_INSIDE
        const Real lr = Real(number[0]), alpha = Real(number[1]), eps = Real(number[2]);
#elif RULE == ADAM || RULE == AMSGRAD
        const Real alpha_t = Real(number[0]), one_minus_beta1 = Real(number[1]);
        const Real one_minus_beta2 = Real(number[2]), eps = Real(number[3]);
        const Real eta = Real(number[4]), weight_decay_rate = Real(number[5]);
#endif
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const long long i = first + e * THREADS;
            if (i >= size) break;
            if (before || n_hooks) parameter.grad[i] = g[e];
            if (RULE == NONE) squares += double(g[e]) * double(g[e]);
#if RULE == SGD
            p[e] -= lr * g[e];
#elif RULE == MOMENTUM_SGD
            Real &v = state[0][e];
            v = momentum * v - lr * g[e];
            p[e] += v;
#elif RULE == RMSPROP || RULE == RMSPROP_EPS_INSIDE
            Real &ms = state[0][e];
            ms = alpha * ms + (1 - alpha) * g[e] * g[e];
            p[e] -= lr * g[e] / (RULE == RMSPROP ? sqrt(ms) + eps : sqrt(ms + eps));
#elif RULE == ADAM || RULE == AMSGRAD
            Real &m = state[0][e], &v = state[1][e];
            m += one_minus_beta1 * (g[e] - m);
            v += one_minus_beta2 * (g[e] * g[e] - v);
            Real &vhat = state[N_STATES - 1][e];
            if (RULE == AMSGRAD) vhat = vhat < v ? v : vhat;
            p[e] -= eta * (alpha_t * m / (sqrt(vhat) + eps) + weight_decay_rate * p[e]);
#endif
#pragma unroll
            for (int s = 0; s < N_STATES; ++s) parameter.state[s][i] = state[s][e];
            if (RULE != NONE) parameter.data[i] = p[e];
        }
    }
    if (after) {
        squares = block_sum(squares);
        if (threadIdx.x == 0) after[blockIdx.x] = squares;
    }
}
