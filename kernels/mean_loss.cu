// The mean of a loss or a metric over the elements of predictions x and true values t, and its gradient
// with respect to x:
//
//     GRADIENT=0   y = sum of term(x[i], t[i]) / divisor
//     GRADIENT=1   y[i] = gy * slope(x[i], t[i]) / divisor
//
//     KIND                    term                                                 slope
//     SIGMOID_CROSS_ENTROPY   [t != -1] (log(1 + exp(-|x|)) - x (t - [x >= 0]))    [t != -1] (sigmoid(x) - t)
//     BINARY_ACCURACY         [[x >= 0] = t]                                       -
//     SQUARED_ERROR           (x - t)^2                                            2 (x - t)
//     ABSOLUTE_ERROR          |x - t|                                              sign(x - t)
//
// x (size); t (size) of x's dtype for the two errors, else int32; gy (1); y (1), or (size) for the
// gradient. Terms are added as doubles in a fixed order: deterministic, no atomics.
//
// -DIGNORE_NAN=1: a difference x - t that is NaN counts as 0.
// -DCOUNTED=1: the divisor is the number of t that are not -1, at least 1; GRADIENT=0 writes it to
// count (1), GRADIENT=1 reads it from there. -DCOUNTED=0: it is an argument; count is not touched.
// -DCHUNK=n: elements of a block.
// -DCOMBINE=1: the sum over the blocks of a launch with COMBINE=0, from partial.
// -DALONG=1: with GRADIENT=0 and one block, the same launch also computes what a training step needs
// next: in gx (size), unless that is null, the gradient for gy = 1, with the bits of GRADIENT=1; and in
// accuracy (1), for a cross entropy that is COUNTED, the y of BINARY_ACCURACY.
//
// Launch, GRADIENT=0: block (a multiple of 32, at most 1,024), grid (ceil(size / CHUNK)), at least one.
// Several blocks write their sums and counts to partial (n_blocks, 2). A second launch adds these up:
// COMBINE=1, one block, `size` is n_blocks.
// GRADIENT=1: a thread for each element.
#include "common.cuh"

#define SIGMOID_CROSS_ENTROPY 0
#define BINARY_ACCURACY 1
#define SQUARED_ERROR 2
#define ABSOLUTE_ERROR 3
#define HAS_LABELS (KIND <= BINARY_ACCURACY)

#define HAS_ACCURACY (ALONG && COUNTED && KIND == SIGMOID_CROSS_ENTROPY)
#define N_SUMS (1 + COUNTED + HAS_ACCURACY)  // of terms, of labels that count, of correct predictions

static_assert(HAS_LABELS || !COUNTED, "only labels are counted");
static_assert(!ALONG || (!GRADIENT && !COMBINE && KIND != BINARY_ACCURACY), "ALONG needs a loss");

#if HAS_LABELS

using Label = int;

__device__ inline double term(const Real x, const Label t)
{
    const bool is_positive = x >= 0;
    if (KIND == BINARY_ACCURACY) return is_positive == t;
    // A factor, not a condition: NaN stays NaN, as in Chainer. The product is a double, so that -2 x
    // does not overflow.
    return double(t != -1) * (log1p(exp(x < 0 ? x : -x)) - double(x) * (t - is_positive));
}

__device__ inline Real slope(const Real x, const Label t)
{
    const Real small = exp(x < 0 ? x : -x);  // does not overflow
    return Real(t != -1) * ((x < 0 ? small : 1) / (1 + small) - t);
}

#else

using Label = STORAGE;

__device__ inline Real difference(const Real x, const Label t)
{
    const Real result = x - widen(t);
    return IGNORE_NAN && result != result ? 0 : result;
}

__device__ inline double term(const Real x, const Label t)
{
    const Real d = difference(x, t);
    return KIND == SQUARED_ERROR ? d * d : d < 0 ? -d : d;
}

__device__ inline Real slope(const Real x, const Label t)
{
    const Real d = difference(x, t);
    return KIND == SQUARED_ERROR ? 2 * d : d > 0 ? 1 : d < 0 ? -1 : d;  // NaN stays NaN
}

#endif

// The sum over the lanes of a warp; every lane gets it.
__device__ inline double over_lanes(double sum)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

extern "C" __global__ void __launch_bounds__(1024, 1) mean_loss(
    const STORAGE *__restrict__ x, const Label *__restrict__ t, const STORAGE *__restrict__ gy,
    STORAGE *__restrict__ y, long long *__restrict__ count, double *__restrict__ partial,
    STORAGE *__restrict__ accuracy, STORAGE *__restrict__ gx, const unsigned size,
    const double divisor)
{
#if GRADIENT
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size)
        narrow(y[i], widen(*gy) * slope(widen(x[i]), t[i]) / Real(COUNTED ? *count : divisor));
#else
    __shared__ double of_warp[N_SUMS][32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double sum[N_SUMS] = {};
#if COMBINE
    for (unsigned i = threadIdx.x; i < size; i += blockDim.x)
#pragma unroll
        for (int s = 0; s < N_SUMS; ++s) sum[s] += partial[2 * i + s];
#else
    const unsigned begin = blockIdx.x * CHUNK;
    const unsigned end = size - begin < CHUNK ? size : begin + CHUNK;
#pragma unroll 4
    for (unsigned i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const Real value = widen(x[i]);
        const Label label = t[i];
        sum[0] += term(value, label);
#if HAS_LABELS
        if (COUNTED) sum[COUNTED] += label != -1;
        if (HAS_ACCURACY) sum[N_SUMS - 1] += (value >= 0) == label;
#endif
    }
#endif
#pragma unroll
    for (int s = 0; s < N_SUMS; ++s) {
        sum[s] = over_lanes(sum[s]);
        if (lane == 0) of_warp[s][warp] = sum[s];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
        for (int s = 0; s < N_SUMS; ++s)
            sum[s] = over_lanes(lane < blockDim.x / 32 ? of_warp[s][lane] : 0);
    }
#if ALONG
    __shared__ double by_all;
#endif
    if (threadIdx.x == 0 && gridDim.x > 1) {
#pragma unroll
        for (int s = 0; s < N_SUMS; ++s) partial[2 * blockIdx.x + s] = sum[s];
    } else if (threadIdx.x == 0) {
        double by = divisor;
        if (COUNTED) {
            by = sum[COUNTED] < 1 ? 1 : sum[COUNTED];
            *count = by;
        }
        narrow(*y, Real(sum[0] / by));
        if (HAS_ACCURACY) narrow(*accuracy, Real(sum[N_SUMS - 1] / by));
#if ALONG
        by_all = by;
#endif
    }
#if ALONG
    __syncthreads();
    if (gx)
        for (unsigned i = threadIdx.x; i < size; i += blockDim.x)
            narrow(gx[i], slope(widen(x[i]), t[i]) / Real(by_all));
#endif
#endif
}
