// Layer normalisation of the rows of a matrix, and its gradient. With the mean m and the variance v of
// row i, x'[c] = (x[i, c] - m) s and s = 1 / sqrt(v + eps):
//
//     GRADIENT=0:  y[i, c] = gamma[c] x'[c] + beta[c];  statistics[i] = (m, s)
//     GRADIENT=1:  with g[c] = gy[i, c] gamma[c], means over c:
//                  y[i, c] = s (g[c] - mean(g) - x'[c] mean(g x')), the gradient with respect to x
//                  terms[i, c] = gy[i, c] x'[c] and terms[i, n_B + c] = gy[i, c]: their sums over i are
//                  the gradients with respect to gamma and beta
//
// x, gy, y (n_rows, n_B), gamma, beta (n_B), terms (n_rows, 2 n_B) of one dtype; statistics (n_rows, 2)
// of the arithmetic dtype; n_B = n_vectors * VECTOR. Arrays that a variant does not use are not
// touched. Every result is written once. Lanes are added in a fixed tree: deterministic, no atomics.
//
// -DLANES=n: threads that share a row, a power of two up to 32.
//
// Launch: block (LANES, rows) with LANES * rows a multiple of 32, grid (ceil(n_rows / rows)). The lanes
// of one row lie in one warp. No shared memory.
#include "common.cuh"
#include "lanes.cuh"

extern "C" __global__ void layer_norm(
    const Vector *__restrict__ x, const Vector *__restrict__ gamma,
    const Vector *__restrict__ beta, const Vector *__restrict__ gy, Real *__restrict__ statistics,
    Vector *__restrict__ y, Vector *__restrict__ terms, const int n_rows, const int n_vectors,
    const Real eps)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    // All LANES threads of a row leave together, so the group below is exactly those that stay.
    if (row >= n_rows) return;
    const unsigned group = lanes_of_row();
    const Real n = Real(n_vectors) * VECTOR;
    const Vector *const from = x + row * n_vectors;
    Vector *const to = y + row * n_vectors;
#if GRADIENT
    const Real mean = statistics[2 * row], inv_std = statistics[2 * row + 1];
    const Vector *const by = gy + row * n_vectors;
    Vector *const terms_of_gamma = terms + 2 * row * n_vectors;
    Real sum = 0, product = 0;
    for (int c = threadIdx.x; c < n_vectors; c += LANES) {
        const Vector value = from[c], scale = gamma[c], upstream = by[c];
        Vector term;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Real x_hat = (widen(value.element[e]) - mean) * inv_std;
            const Real g = widen(upstream.element[e]) * widen(scale.element[e]);
            sum += g;
            product += g * x_hat;
            narrow(term.element[e], widen(upstream.element[e]) * x_hat);
        }
        terms_of_gamma[c] = term;
        terms_of_gamma[n_vectors + c] = upstream;
    }
    sum = over_lanes(group, sum) / n;
    product = over_lanes(group, product) / n;
    for (int c = threadIdx.x; c < n_vectors; c += LANES) {
        const Vector value = from[c], scale = gamma[c], upstream = by[c];
        Vector result;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Real x_hat = (widen(value.element[e]) - mean) * inv_std;
            const Real g = widen(upstream.element[e]) * widen(scale.element[e]);
            narrow(result.element[e], inv_std * (g - sum - x_hat * product));
        }
        to[c] = result;
    }
#else
    Real sum = 0, squares = 0;
    for (int c = threadIdx.x; c < n_vectors; c += LANES) {
        const Vector value = from[c];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum += widen(value.element[e]);
    }
    const Real mean = over_lanes(group, sum) / n;
    for (int c = threadIdx.x; c < n_vectors; c += LANES) {
        const Vector value = from[c];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const Real centred = widen(value.element[e]) - mean;
            squares += centred * centred;
        }
    }
    const Real inv_std = 1 / sqrt(over_lanes(group, squares) / n + eps);
    if (threadIdx.x == 0) {
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = inv_std;
    }
    for (int c = threadIdx.x; c < n_vectors; c += LANES) {
        const Vector value = from[c], scale = gamma[c], shift = beta[c];
        Vector result;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            narrow(result.element[e],
                   widen(scale.element[e]) * ((widen(value.element[e]) - mean) * inv_std) +
                       widen(shift.element[e]));
        to[c] = result;
    }
#endif
}
