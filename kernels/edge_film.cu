// Messages along the edges of relational graphs, modulated and rectified, and their gradients. For
// every entry k of row i, in column s = j R + r, with the pair p = i R + r of receiver and relation:
//
//     z[k, :] = gamma[p, :] * messages[s, :] + beta[p, :]         gamma and beta: halves of film's rows
//
//     RESULT=OUTPUT       y[i, :] = sum over the entries of row i of value(k) * max(0, z[k, :])
//     RESULT=BY_FILM      y[p, :] = sum over the entries of p of g[k, :] * messages[s, :], then of g[k, :]
//     RESULT=BY_MESSAGES  y[s, :] = sum over the entries of column s of g[k, :] * gamma[p, :]
//
// where g[k, :] is value(k) gy[i, :] if z[k, :] > 0, else 0. Source: Brockschmidt 2019
// (arXiv:1906.12192), equation 6; z, of entries times channels, is never stored.
//
// indptr (n_rows + 1), indices (nnz) int32, data (nnz); for BY_MESSAGES of the transpose. With P
// pairs: messages (P, n_B), film (P, 2 n_B), gy (n_rows, n_B); y, by RESULT, (n_rows, n_B),
// (P, 2 n_B) or (P, n_B); n_B = n_vectors * VECTOR. Every element of y is written once; rows
// without entries give 0. Spare entries are not read. NaN stays NaN in OUTPUT, and has no gradient.
// Entries are added in their order: deterministic, no atomics.
//
// -DRESULT=OUTPUT, BY_FILM or BY_MESSAGES. OUTPUT does not read gy.
// -DWEIGHTED=0: value(k) = 1, data is not read; 1: value(k) = data[k].
//
// Launch: block (columns, units), grid (ceil(n_units / units), any): thread (x, y) of block (b, t) owns
// row b * units + y of the n_units rows of the result, and in it the vectors t * columns + x, in steps
// of gridDim.y * columns. No shared memory.
#include "common.cuh"

#define OUTPUT 0
#define BY_FILM 1
#define BY_MESSAGES 2

// Entries whose loads are issued before the first is used; molecules have two to four per row.
#define AHEAD 4

extern "C" __global__ void edge_film(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const Vector *__restrict__ messages,
    const Vector *__restrict__ film, const Vector *__restrict__ gy, Vector *__restrict__ y,
    const int n_units, const int n_vectors, const int n_relations)
{
    const long long unit = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (unit >= n_units) return;
    const int relation = unit % n_relations;  // of a pair or a column
    const long long row = RESULT == BY_FILM ? unit / n_relations : unit;
    const int begin = indptr[row], end = indptr[row + 1];
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors;
         c += gridDim.y * blockDim.x) {
        Real sum[VECTOR] = {}, sum_of_beta[VECTOR] = {};
        // k stops at end: a step past it could overflow in a batch of the largest size allowed.
        for (int k = begin; k < end; k = end - k > AHEAD ? k + AHEAD : end) {
            bool takes[AHEAD];
            Real value[AHEAD];
            Vector message[AHEAD], gamma[AHEAD], beta[AHEAD], by[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                // Past the end the last entry is loaded again: conditional loads would wait for
                // each other.
                const int at = u < end - k ? k + u : end - 1;
                const int index = indices[at];
                value[u] = 1;
#if WEIGHTED
                value[u] = widen(data[at]);
#endif
                takes[u] = u < end - k && (RESULT != BY_FILM || index % n_relations == relation);
                if (!takes[u]) continue;
                const long long source = RESULT == BY_MESSAGES ? unit : index;
                const long long node = RESULT == BY_MESSAGES ? index : row;
                const int r = RESULT == OUTPUT ? index % n_relations : relation;
                const Vector *const both = film + 2 * n_vectors * (node * n_relations + r) + c;
                message[u] = messages[source * n_vectors + c];
                gamma[u] = both[0];
                beta[u] = both[n_vectors];
                if (RESULT != OUTPUT) by[u] = gy[node * n_vectors + c];
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (takes[u])
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) {
                        const Real x = widen(message[u].element[e]);
                        const Real slope = widen(gamma[u].element[e]);
                        const Real z = slope * x + widen(beta[u].element[e]);
                        if (RESULT == OUTPUT) {
                            sum[e] += value[u] * (z <= 0 ? 0 : z);  // NaN stays
                        } else if (z > 0) {
                            const Real g = value[u] * widen(by[u].element[e]);
                            sum[e] += g * (RESULT == BY_FILM ? x : slope);
                            sum_of_beta[e] += g;
                        }
                    }
        }
        Vector result, result_of_beta;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            narrow(result.element[e], sum[e]);
            narrow(result_of_beta.element[e], sum_of_beta[e]);
        }
        Vector *const to = y + unit * n_vectors * (RESULT == BY_FILM ? 2 : 1) + c;
        to[0] = result;
        if (RESULT == BY_FILM) to[n_vectors] = result_of_beta;
    }
}
