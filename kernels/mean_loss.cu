// The mean of a loss or a metric over the elements of predictions x and of what is true, t, and its
// gradient by x:
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
// -DIGNORE_NAN=1: 0 in place of a difference x - t that is NaN.
// -DCOUNTED=1: the divisor is the number of t that are not -1, at least 1; GRADIENT=0 writes it to
// count (1), GRADIENT=1 reads it from there. -DCOUNTED=0: it is an argument; count is not touched.
// -DCHUNK=n: elements of a block.
// -DCOMBINE=1: the sum over the blocks of a launch with COMBINE=0, from partial.
//
// Launch, GRADIENT=0: block (a multiple of 32, at most 1,024), grid (ceil(size / CHUNK)), at least one.
// If it is more than one, they write their sums and counts to partial (n_blocks, 2), and a second
// launch follows, COMBINE=1, of one block, whose `size` is n_blocks.
// GRADIENT=1: a thread for each element.
#include "common.cuh"

#define SIGMOID_CROSS_ENTROPY 0
#define BINARY_ACCURACY 1
#define SQUARED_ERROR 2
#define ABSOLUTE_ERROR 3
#define HAS_LABELS (KIND <= BINARY_ACCURACY)

static_assert(HAS_LABELS || !COUNTED, "only labels are counted");

#if HAS_LABELS

using Label = int;

__device__ inline double term(const Real x, const Label t)
{
    const bool is_positive = x >= 0;
    if (KIND == BINARY_ACCURACY) return is_positive == t;
    // Not a condition: NaN stays NaN, as in Chainer. The product is a double, for -2 x is one that
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

// The sum over the lanes of a warp, the same on each.
__device__ inline double over_lanes(double sum)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

extern "C" __global__ void __launch_bounds__(1024, 1) mean_loss(
    const STORAGE *__restrict__ x, const Label *__restrict__ t, const STORAGE *__restrict__ gy,
    STORAGE *__restrict__ y, long long *__restrict__ count, double *__restrict__ partial,
    const unsigned size, const double divisor)
{
#if GRADIENT
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size)
        narrow(y[i], widen(*gy) * slope(widen(x[i]), t[i]) / Real(COUNTED ? *count : divisor));
#else
    __shared__ double sums[32], counts[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double sum = 0, counted = 0;
#if COMBINE
    for (unsigned i = threadIdx.x; i < size; i += blockDim.x) {
        sum += partial[2 * i];
        counted += partial[2 * i + 1];
    }
#else
    const unsigned begin = blockIdx.x * CHUNK;
    const unsigned end = size - begin < CHUNK ? size : begin + CHUNK;
#pragma unroll 4
    for (unsigned i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const Label label = t[i];
        sum += term(widen(x[i]), label);
#if COUNTED
        counted += label != -1;
#endif
    }
#endif
    sum = over_lanes(sum);
    if (COUNTED) counted = over_lanes(counted);
    if (lane == 0) {
        sums[warp] = sum;
        counts[warp] = counted;
    }
    __syncthreads();
    if (warp) return;
    sum = over_lanes(lane < blockDim.x / 32 ? sums[lane] : 0);
    if (COUNTED) counted = over_lanes(lane < blockDim.x / 32 ? counts[lane] : 0);
    if (lane) return;
    if (gridDim.x > 1) {
        partial[2 * blockIdx.x] = sum;
        partial[2 * blockIdx.x + 1] = counted;
        return;
    }
    double by = divisor;
    if (COUNTED) {
        by = counted < 1 ? 1 : counted;
        *count = by;
    }
    narrow(*y, Real(sum / by));
#endif
}
