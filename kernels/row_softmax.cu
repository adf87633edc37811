// Softmax of the rows of several matrices, and their sum, or the gradient:
//
//     GRADIENT=0:  a[l, i, c] becomes exp(a[l, i, c] - max) / sum of such terms, over the c of a row
//                  y[i, c] = sum over l of the results
//     GRADIENT=1:  y[l, i, c] = a[l, i, c] (g[i, c] - sum over d of a[l, i, d] g[i, d])
//                  with the softmax a, and the gradient g with respect to the sum
//
// a (n_terms, n_rows, n_B), overwritten if GRADIENT=0; g (n_rows, n_B), read only if GRADIENT=1;
// y (n_rows, n_B), null if n_terms is 1, or (n_terms, n_rows, n_B) if GRADIENT=1. All are of one dtype;
// n_B = n_vectors * VECTOR. NaN propagates within its row. Lanes are added in a fixed tree:
// deterministic, no atomics.
//
// -DLANES=n: threads that share a row, a power of two up to 32.
//
// Launch: block (LANES, rows) with LANES * rows a multiple of 32, grid (ceil(n_rows / rows)). The lanes
// of one row lie in one warp. No shared memory.
#include "common.cuh"
#include "lanes.cuh"

__device__ inline Real largest_of_lanes(const unsigned group, Real largest)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        const Real other = __shfl_xor_sync(group, largest, step, LANES);
        if (other > largest) largest = other;
    }
    return largest;
}

extern "C" __global__ void row_softmax(
    Vector *a, const Vector *__restrict__ g, Vector *y, const int n_terms, const int n_rows,
    const int n_vectors)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    // All LANES threads of a row leave together, so the group below is exactly those that stay.
    if (row >= n_rows) return;
    const unsigned group = lanes_of_row();
    for (int term = 0; term < n_terms; ++term) {
        const long long first = ((long long)term * n_rows + row) * n_vectors;
        Vector *const own = a + first;
#if GRADIENT
        Real product = 0;
        for (int c = threadIdx.x; c < n_vectors; c += LANES) {
            const Vector value = own[c], by = g[row * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                product += widen(value.element[e]) * widen(by.element[e]);
        }
        product = over_lanes(group, product);
        for (int c = threadIdx.x; c < n_vectors; c += LANES) {
            const Vector value = own[c], by = g[row * n_vectors + c];
            Vector result;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                narrow(result.element[e],
                       widen(value.element[e]) * (widen(by.element[e]) - product));
            y[first + c] = result;
        }
#else
        Real largest = -infinity(), sum = 0;  // NaN is not the largest, but makes the sum NaN
        for (int c = threadIdx.x; c < n_vectors; c += LANES) {
            const Vector value = own[c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (widen(value.element[e]) > largest) largest = widen(value.element[e]);
        }
        largest = largest_of_lanes(group, largest);
        for (int c = threadIdx.x; c < n_vectors; c += LANES) {
            const Vector value = own[c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sum += exp(widen(value.element[e]) - largest);
        }
        sum = over_lanes(group, sum);
        for (int c = threadIdx.x; c < n_vectors; c += LANES) {
            const Vector value = own[c];
            Vector result, total = {};
            if (term) total = y[row * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const Real share = exp(widen(value.element[e]) - largest) / sum;
                narrow(result.element[e], share);
                narrow(total.element[e], widen(total.element[e]) + widen(result.element[e]));
            }
            own[c] = result;
            if (n_terms > 1) y[row * n_vectors + c] = total;
        }
#endif
    }
}
