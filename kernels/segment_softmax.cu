// Softmax over the rows of every segment, and its gradient:
//
//     GRADIENT=0:  y[i, c] = exp(a[i, c] - m) / sum over k of exp(a[k, c] - m),  m = max over k of a[k, c]
//     GRADIENT=1:  y[i, c] = a[i, c] (g[i, c] - sum over k of a[k, c] g[k, c])
//
// where k runs over the rows of i's segment, [offsets[s], offsets[s + 1]). With GRADIENT=1 a is the
// softmax and g the gradient by it; with GRADIENT=0 g is not read.
//
// offsets (n_segments + 1) int32; a, g, y (n_rows, n_B); n_B = n_vectors * VECTOR. Empty segments own
// nothing. Rows past the last offset are neither read nor written. Arithmetic is double for every
// storage dtype: the gradients of a segment cancel, their roundings do not. Sums are in the order of
// the rows: deterministic, no atomics. NaN stays in its segment and column. A +inf, or
// only -inf, gives NaN there, as in NumPy.
//
// A thread owns a vector of a segment and walks its rows, three times: segments are meant to be as
// short as the entries of a row of an adjacency matrix are, so that the second and third walk find
// them in the cache.
//
// Launch: block (columns, units), grid (ceil(n_segments / units), any): thread (x, y) of block (b, t)
// works for segment b * units + y on the vectors t * columns + x, in steps of gridDim.y * columns. No
// shared memory.
#include "common.cuh"

extern "C" __global__ void segment_softmax(
    const int *__restrict__ offsets, const Vector *__restrict__ a, const Vector *__restrict__ g,
    Vector *__restrict__ y, const int n_segments, const int n_vectors)
{
    const long long segment = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (segment >= n_segments) return;
    const long long begin = offsets[segment], end = offsets[segment + 1];
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors;
         c += gridDim.y * blockDim.x) {
        double total[VECTOR] = {};
#if GRADIENT
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c], by = g[i * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                total[e] += (double)widen(value.element[e]) * widen(by.element[e]);
        }
#else
        double largest[VECTOR];
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const double x = widen(value.element[e]);
                // A NaN that this passes over still makes `total` NaN.
                if (i == begin || x > largest[e]) largest[e] = x;
            }
        }
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                total[e] += exp(widen(value.element[e]) - largest[e]);
        }
#endif
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c];
            Vector result;
#if GRADIENT
            const Vector by = g[i * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                narrow(result.element[e],
                       widen(value.element[e]) * (widen(by.element[e]) - total[e]));
#else
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                narrow(result.element[e], exp(widen(value.element[e]) - largest[e]) / total[e]);
#endif
            y[i * n_vectors + c] = result;
        }
    }
}
