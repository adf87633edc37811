// Transpose of a block-diagonal CSR pattern, and where each of its entries comes from:
//
//     entry k of the transpose is entry order[k] of the matrix; a column's entries keep their order
//
// indptr (n_rows + 1), indices (nnz), row_offsets, col_offsets (n_graphs + 1),
// out_indptr (n_all_cols + 1), out_indices, order (nnz): int32. Every element of the results is
// written once. If the arrays are larger than the batch, the columns past it have no entries, and
// entries past it stay where they are (order[k] = k) with out_indices 0. Deterministic: the only
// atomics are additions of integers in shared memory, whose sums do not depend on their order.
//
// A block owns a graph. It counts the entries of every column and adds up the counts. Then its warps
// place the entries in their order, 32 at a time; lanes with equal columns take consecutive places. A
// warp owns a run of entries, and in each column the places after the places of earlier warps.
//
// Launch: block (a multiple of 32), grid (n_graphs); shared memory for an int per entry of the largest
// graph and, for every warp, per column of it.
#include "common.cuh"

extern "C" __global__ void transpose_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const int *__restrict__ row_offsets, const int *__restrict__ col_offsets,
    int *__restrict__ out_indptr, int *__restrict__ out_indices, int *__restrict__ order,
    const int n_all_cols, const int n_all_entries)
{
    extern __shared__ int shared[];
    __shared__ int warp_total[32];
    const unsigned graph = blockIdx.x;
    const int thread = threadIdx.x, n_threads = blockDim.x;
    const int lane = thread % 32, warp = thread / 32, n_warps = n_threads / 32;
    const int first_row = row_offsets[graph], stop_row = row_offsets[graph + 1];
    const int first_col = col_offsets[graph], n_cols = col_offsets[graph + 1] - first_col;
    const int first = indptr[first_row], n_entries = indptr[stop_row] - first;
    int *const row_of = shared;
    int *const next = shared + n_entries;  // (n_warps, n_cols): a count, then the next free place

    for (int i = thread; i < n_warps * n_cols; i += n_threads) next[i] = 0;
    for (int row = first_row + thread; row < stop_row; row += n_threads) {
        const int end = indptr[row + 1];
        for (int k = indptr[row]; k < end; ++k) row_of[k - first] = row;
    }
    __syncthreads();

    int *const mine = next + warp * n_cols;
    const int share = (n_entries + n_threads - 1) / n_threads * 32;  // entries of a warp, in whole rounds
    const int begin = warp * share;
    const int end = n_entries - begin > share ? begin + share : n_entries;
    for (int i = begin + lane; i < end; i += 32) atomicAdd(mine + (indices[first + i] - first_col), 1);
    __syncthreads();

    int base = first;  // entries in the columns before these
    for (int start = 0; start < n_cols; start += n_threads) {
        const int column = start + thread;
        int count = 0;
        if (column < n_cols)
            for (int w = 0; w < n_warps; ++w) count += next[w * n_cols + column];
        int sum = count;  // over this lane's column and the columns of the lanes before it
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += before;
        }
        if (lane == 31) warp_total[warp] = sum;
        __syncthreads();
        int place = base + sum - count;
        for (int w = 0; w < n_warps; ++w) {
            if (w < warp) place += warp_total[w];
            base += warp_total[w];
        }
        if (column < n_cols) {
            out_indptr[first_col + column] = place;
            for (int w = 0; w < n_warps; ++w) {
                const int of_warp = next[w * n_cols + column];
                next[w * n_cols + column] = place;
                place += of_warp;
            }
        }
        __syncthreads();
    }
    if (graph == gridDim.x - 1) {
        const long long stop = (long long)first + n_entries;
        for (long long i = (long long)first_col + n_cols + thread; i <= n_all_cols; i += n_threads)
            out_indptr[i] = stop;
        for (long long i = stop + thread; i < n_all_entries; i += n_threads) {
            out_indices[i] = 0;
            order[i] = i;
        }
    }

    for (int i = begin; i < end; i += 32) {
        const int entry = i + lane;
        const int column = entry < end ? indices[first + entry] - first_col : -1;
        const unsigned peers = __match_any_sync(~0u, column);
        const int before = __popc(peers & ((1u << lane) - 1));
        int place = 0;
        if (column >= 0) place = mine[column] + before;
        __syncwarp();
        if (column >= 0 && before == 0) mine[column] = place + __popc(peers);
        __syncwarp();
        if (column >= 0) {
            out_indices[place] = row_of[entry];
            order[place] = first + entry;
        }
    }
}
