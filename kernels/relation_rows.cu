// The rows of a matrix with a row, not a column, for every pair of node and relation:
//
//     entry (i, j * n_relations + r) becomes entry (i * n_relations + r, j)
//
// indptr (n_rows + 1), indices (nnz), out_indptr (n_rows * n_relations + 1), out_indices, order (nnz)
// int32. Entry k of the result is entry order[k] of the matrix; those of a row and relation keep their
// order, so that a row's entries are in the same place as before. Where the arrays are larger than the
// batch, spare entries stay where they are (order[k] = k) with out_indices 0. Every element is written
// once; no atomics.
//
// Launch: block and grid of one dimension, at least max(n_rows, n_entries - number of entries) threads
// in all; a thread owns a row, and then spare entries.
#include "common.cuh"

extern "C" __global__ void relation_rows(
    const int *__restrict__ indptr, const int *__restrict__ indices, int *__restrict__ out_indptr,
    int *__restrict__ out_indices, int *__restrict__ order, const int n_rows, const int n_entries,
    const int n_relations)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long n_threads = (long long)gridDim.x * blockDim.x;
    const int stop = indptr[n_rows];
    for (long long row = thread; row < n_rows; row += n_threads) {
        const int begin = indptr[row], end = indptr[row + 1];
        int place = begin;
        for (int relation = 0; relation < n_relations; ++relation) {
            out_indptr[row * n_relations + relation] = place;
            for (int k = begin; k < end; ++k) {
                const int column = indices[k];
                if (column % n_relations == relation) {
                    out_indices[place] = column / n_relations;
                    order[place++] = k;
                }
            }
        }
        if (row == n_rows - 1) out_indptr[(long long)n_rows * n_relations] = stop;
    }
    for (long long k = stop + thread; k < n_entries; k += n_threads) {
        out_indices[k] = 0;
        order[k] = k;
    }
}
