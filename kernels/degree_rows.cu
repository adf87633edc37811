// The rows of a symmetric matrix, split by the degrees of nodes. graph_linear.cu takes them for a layer
// whose weight depends on the degree of a node (NFP).
//
//     degree[i] = sum_j A[i, j], rounded to the dtype of the values; relation[i] = degree[i] - 1
//     forward   entry (i, j) becomes entry (i * RELATIONS + relation[i], j)
//     backward  entry (i, j) of the transpose, which is A, becomes (i * RELATIONS + relation[j], j)
//
// An entry of a node whose degree is not 1, 2, ..., RELATIONS gets the last relation and the value 0.
//
// indptr (n_rows + 1), indices (nnz) int32; data (nnz). out_indptr (n_rows * RELATIONS + 1) int32,
// out_data (nnz): for forward; entries keep their places, so their indices are still `indices`.
// t_indptr, t_indices, t_data: for backward; the entries of a row are sorted by relation, and
// entries of one relation keep their order. Spare entries, from indptr[n_rows] on, get index and
// value 0. Every element is written once; no atomics.
//
// -DRELATIONS=n. -DWEIGHTED=0: A holds ones, data is not read.
//
// Launch: block and grid of one dimension, any number of threads; they take the rows in turn, and then
// the spare entries.
#include "common.cuh"

// The degree of a node, rounded as a product of the matrix with ones would round it.
__device__ inline Real degree_of(
    const int *__restrict__ indptr, const STORAGE *__restrict__ data, const int row)
{
    const int begin = indptr[row], end = indptr[row + 1];
    Real sum = WEIGHTED ? 0 : end - begin;
    if (WEIGHTED)
        for (int k = begin; k < end; ++k) sum += widen(data[k]);
    STORAGE rounded;
    narrow(rounded, sum);
    return widen(rounded);
}

struct Node {
    int relation;
    bool counts;
};

__device__ inline Node node_of(
    const int *__restrict__ indptr, const STORAGE *__restrict__ data, const int row)
{
    const Real degree = degree_of(indptr, data, row);
    Node node = {RELATIONS - 1, degree >= 1 && degree <= RELATIONS};  // not if it is NaN
    if (node.counts) {
        node.counts = degree == Real(int(degree));
        if (node.counts) node.relation = int(degree) - 1;
    }
    return node;
}

extern "C" __global__ void degree_rows(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, int *__restrict__ out_indptr, STORAGE *__restrict__ out_data,
    int *__restrict__ t_indptr, int *__restrict__ t_indices, STORAGE *__restrict__ t_data,
    const int n_rows, const int n_entries)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long n_threads = (long long)gridDim.x * blockDim.x;
    const int stop = indptr[n_rows];
    for (long long row = thread; row < n_rows; row += n_threads) {
        const int begin = indptr[row], end = indptr[row + 1];
        const Node own = node_of(indptr, data, row);
        int place[RELATIONS] = {};  // first how many entries, then where the next one goes
        for (int k = begin; k < end; ++k) {
            const int relation = node_of(indptr, data, indices[k]).relation;
#pragma unroll
            for (int r = 0; r < RELATIONS; ++r) place[r] += r == relation;
            narrow(out_data[k], own.counts ? (WEIGHTED ? widen(data[k]) : Real(1)) : Real(0));
        }
        int next = begin;
#pragma unroll
        for (int r = 0; r < RELATIONS; ++r) {
            const int count = place[r];
            place[r] = next;
            out_indptr[row * RELATIONS + r] = r <= own.relation ? begin : end;
            t_indptr[row * RELATIONS + r] = next;
            next += count;
        }
        for (int k = begin; k < end; ++k) {
            const Node node = node_of(indptr, data, indices[k]);
            int at = 0;
#pragma unroll
            for (int r = 0; r < RELATIONS; ++r)
                if (r == node.relation) at = place[r]++;
            t_indices[at] = indices[k];
            narrow(t_data[at], node.counts ? (WEIGHTED ? widen(data[k]) : Real(1)) : Real(0));
        }
        if (row == n_rows - 1) {
            out_indptr[(long long)n_rows * RELATIONS] = stop;
            t_indptr[(long long)n_rows * RELATIONS] = stop;
        }
    }
    for (long long k = stop + thread; k < n_entries; k += n_threads) {
        t_indices[k] = 0;
        narrow(out_data[k], Real(0));
        narrow(t_data[k], Real(0));
    }
}
