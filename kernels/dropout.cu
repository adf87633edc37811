// Dropout, and the random numbers of a training step:
//
//     mask[i] = scale where element i is kept, else 0
//     y[i] = x[i] mask[i]
//
// Which elements are kept depends only on the seed, the step, the layer and the place (random.cuh), not
// on the number of elements or on how the kernel is launched. The step is read from device memory, so a
// captured launch draws new numbers whenever it changes.
//
// x, mask, y (n) with n = 4 last + n_last, n_last from 1 to 4, VECTOR a divisor of both 4 and n;
// counter (1) uint64. No atomics.
//
// -DKIND=MASK: writes mask; x and y are null. KIND=DROPOUT: writes mask and y. NaN times 0 is NaN in y.
//
// Launch: block and grid of one dimension, more than `last` threads; a thread owns four elements.
#include "common.cuh"
#include "random.cuh"

#define MASK 0
#define DROPOUT 1

static_assert(VECTOR <= 4, "a thread draws four words");

extern "C" __global__ void dropout(
    const Vector *x, Vector *mask, Vector *y, const unsigned long long *counter,
    const unsigned last, const int n_last, const unsigned seed_low, const unsigned seed_high,
    const unsigned stream, const unsigned threshold, const Real scale)
{
    const unsigned long long thread = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread > last) return;
    const unsigned quad = unsigned(thread);
    const unsigned long long step = *counter;
    const Words drawn = words_of({seed_low, seed_high, stream}, quad, step);
    const int n_elements = quad == last ? n_last : 4;
#pragma unroll
    for (int begin = 0; begin < 4; begin += VECTOR) {
        if (begin >= n_elements) return;
        const unsigned long long place = (quad * 4ull + begin) / VECTOR;
        Vector factors, result;
        if constexpr (KIND == DROPOUT) result = x[place];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Real factor = drawn.word[begin + e] >= threshold ? scale : Real(0);
            narrow(factors.element[e], factor);
            if constexpr (KIND == DROPOUT) narrow(result.element[e], widen(result.element[e]) * factor);
        }
        mask[place] = factors;
        if constexpr (KIND == DROPOUT) y[place] = result;
    }
}
