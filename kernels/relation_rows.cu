// A matrix with a column for every pair of node and relation, rearranged to have a row for every pair:
//
//     entry (i, j * n_relations + r) becomes entry (i * n_relations + r, j)
//
// indptr (n_rows + 1), indices (nnz), row_offsets, col_offsets (n_graphs + 1), out_indptr
// (n_rows * n_relations + 1), out_indices (nnz), out_row_offsets, out_col_offsets (n_graphs + 1) int32.
// Entries of a row and relation keep their order, and the entries of a row stay within the same range.
// out_row_offsets and out_col_offsets count the rows and columns of the result. If the arrays are
// larger than the batch, spare entries stay where they are, with out_indices 0. Every element is
// written once; no atomics.
//
// -DVALUES=GIVEN: out_data (nnz) are the entries' data (nnz). NONE: there are no values.
// RECIPROCALS, for an n_rows x (n_rows * n_relations) matrix of ones that is symmetric in every
// relation: out_data is 1 over the number of entries of row j, and transposed_data (nnz), the
// values of the same rows of the transpose, is 1 over the number of entries of row i. Spare entries
// get 1.
//
// Launch: block and grid of one dimension, at least n_rows threads in all; a thread owns a row, and
// then spare entries and offsets. It reads up to AT_ONCE entries of a row, as many as atoms have, at once.
#include "common.cuh"

enum { NONE, GIVEN, RECIPROCALS };

const int AT_ONCE = 4;

extern "C" __global__ void relation_rows(
    const int *__restrict__ indptr, const int *__restrict__ indices, const STORAGE *__restrict__ data,
    const int *__restrict__ row_offsets, const int *__restrict__ col_offsets,
    int *__restrict__ out_indptr, int *__restrict__ out_indices, STORAGE *__restrict__ out_data,
    STORAGE *__restrict__ transposed_data, int *__restrict__ out_row_offsets,
    int *__restrict__ out_col_offsets, const int n_rows, const int n_entries, const int n_relations,
    const int n_offsets)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long n_threads = (long long)gridDim.x * blockDim.x;
    const int stop = indptr[n_rows];
    if (thread == 0) out_indptr[(long long)n_rows * n_relations] = stop;
    for (long long g = thread; g < n_offsets; g += n_threads) {
        out_row_offsets[g] = row_offsets[g] * n_relations;
        out_col_offsets[g] = col_offsets[g] / n_relations;
    }
    for (long long row = thread; row < n_rows; row += n_threads) {
        const int begin = indptr[row], end = indptr[row + 1];
        int *const starts = out_indptr + row * n_relations;
        const auto put = [&](const int place, const int k, const int column) {
            out_indices[place] = column;
            if (VALUES == GIVEN) out_data[place] = data[k];
            if (VALUES == RECIPROCALS) {
                narrow(out_data[place], Real(1) / Real(indptr[column + 1] - indptr[column]));
                narrow(transposed_data[place], Real(1) / Real(end - begin));
            }
        };
        if (end - begin <= AT_ONCE) {
            int column[AT_ONCE], relation[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) column[u] = u < end - begin ? indices[begin + u] : 0;
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                // Past the end: a relation that comes after all others.
                relation[u] = u < end - begin ? column[u] % n_relations : n_relations;
                column[u] /= n_relations;
            }
            for (int r = 0; r < n_relations; ++r) {
                int place = begin;
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) place += relation[u] < r;
                starts[r] = place;
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                int place = begin;
#pragma unroll
                for (int v = 0; v < AT_ONCE; ++v)
                    place += v < u ? relation[v] <= relation[u] : relation[v] < relation[u];
                if (u < end - begin) put(place, begin + u, column[u]);
            }
        } else {
            int place = begin;
            for (int relation = 0; relation < n_relations; ++relation) {
                starts[relation] = place;
                for (int k = begin; k < end; ++k) {
                    const int column = indices[k];
                    if (column % n_relations == relation) put(place++, k, column / n_relations);
                }
            }
        }
    }
    for (long long k = stop + thread; k < n_entries; k += n_threads) {
        out_indices[k] = 0;
        if (VALUES == GIVEN) out_data[k] = data[k];
        if (VALUES == RECIPROCALS) {
            narrow(out_data[k], Real(1));
            narrow(transposed_data[k], Real(1));
        }
    }
}
