// Softmax over the rows of every segment, and its gradient:
//
//     GRADIENT=0:  y[i, c] = exp(a[i, c] - m) / sum over k of w[k] exp(a[k, c] - m)
//     GRADIENT=1:  y[i, c] = a[i, c] (g[i, c] - w[i] sum over k of a[k, c] g[k, c])
//
// where k runs over the rows of i's segment, [offsets[s], offsets[s + 1]), and m is the maximum of
// a[k, c] over the rows k with w[k] > 0. With GRADIENT=1 a is the softmax and g its gradient; with
// GRADIENT=0 g is not read.
//
// offsets (n_segments + 1) int32; w (n_rows) float32, at least 0; a, g, y (n_rows, n_B);
// n_B = n_vectors * VECTOR. Row k stands for w[k] rows: g is the sum of their gradients, and so is the
// result. Rows of weight 0 and rows past the last offset get 0, and contribute nothing, whatever they
// hold. Empty segments own nothing. Arithmetic is double for every storage dtype: the gradients of a
// segment cancel, their roundings do not. Sums are in the order of the rows: deterministic, no
// atomics. NaN stays in its segment and column. A +inf, or nothing but -inf, gives NaN there, as in
// NumPy.
//
// -DWEIGHTED=0: all weights are one; w is not read.
//
// A thread owns a vector of a segment and walks its rows three times, or twice for the gradient:
// segments are meant to be as short as rows of an adjacency matrix, so that later walks find them in
// the cache. The rows past the last offset are dealt out to all units.
//
// Launch: block (columns, units), grid (max(ceil(n_segments / units), 1), any): thread (x, y) of block
// (b, t) works for segment b * units + y on the vectors t * columns + x, in steps of
// gridDim.y * columns. No shared memory.
#include "common.cuh"

extern "C" __global__ void segment_softmax(
    const int *__restrict__ offsets, const Vector *__restrict__ a, const Vector *__restrict__ g,
    const float *__restrict__ weights, Vector *__restrict__ y, const int n_segments,
    const int n_rows, const int n_vectors)
{
    const long long segment = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const long long n_units = (long long)gridDim.x * blockDim.y;
    long long begin = 0, end = 0;
    if (segment < n_segments) {
        begin = offsets[segment];
        end = offsets[segment + 1];
    }
    const long long first_spare = offsets[n_segments] + segment;
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors;
         c += gridDim.y * blockDim.x) {
        double total[VECTOR] = {};
#if GRADIENT
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c], by = g[i * n_vectors + c];
            const float weight = WEIGHTED ? weights[i] : 1;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (weight != 0)
                    total[e] += (double)widen(value.element[e]) * widen(by.element[e]);
        }
#else
        double largest[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) largest[e] = -infinity();
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c];
            const float weight = WEIGHTED ? weights[i] : 1;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const double x = widen(value.element[e]);
                // A NaN that is skipped here still makes `total` NaN.
                if (weight != 0 && x > largest[e]) largest[e] = x;
            }
        }
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c];
            const float weight = WEIGHTED ? weights[i] : 1;
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (weight != 0) total[e] += weight * exp(widen(value.element[e]) - largest[e]);
        }
#endif
        for (long long i = begin; i < end; ++i) {
            const Vector value = a[i * n_vectors + c];
            const float weight = WEIGHTED ? weights[i] : 1;
            Vector result{};
#if GRADIENT
            const Vector by = g[i * n_vectors + c];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (weight != 0)
                    narrow(result.element[e], widen(value.element[e]) *
                                                  (widen(by.element[e]) - weight * total[e]));
#else
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (weight != 0)
                    narrow(result.element[e], exp(widen(value.element[e]) - largest[e]) / total[e]);
#endif
            y[i * n_vectors + c] = result;
        }
#pragma unroll 1  // there are few: registers are for the loops above
        for (long long i = first_spare; i < n_rows; i += n_units) y[i * n_vectors + c] = Vector{};
    }
}
