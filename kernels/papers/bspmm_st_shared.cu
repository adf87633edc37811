// Y = op(A) X (+ R) for a batch of sparse matrices in the SparseTensor layout (unsorted COO), summed
// in shared memory:
//
//     y[row(k), :] += value(k) * x[column(k), :]      for every entry k, onto the residual or 0
//
// Source: SWA SpMM for SparseTensor (Nagasaka, Nukada, Kojima, Matsuoka 2019, figure 3), batched as
// in section 4.3, cases 1 and 2: figure 5-(a), the whole output of a matrix in one block, and 5-(b),
// cache blocking, a block for each partition of its columns. (a) is one partition. Departs from the
// paper in that offsets into the whole batch replace tables of pointers, and that the sub-warp
// follows from the width of a partition, not of x, because otherwise lanes would be idle.
//
// ids (nnz, 2) int32, row and column interleaved, in the numbering of the whole batch; data (nnz);
// entry_offsets and offsets (n_graphs + 1) int32, first entry and first row of y of every matrix;
// x (n_in, n_B), residual (n_out, n_B) or null, y (n_out, n_B); n_B = n_channels.
// Entries of one matrix lie together, in any order; duplicates add. Rows without entries give the
// residual or 0; rows of no matrix are left as they are. y is written once and never read; it must
// not overlap the inputs.
// atomicAdd on shared memory: the order of summation, and so the last bits, change from run to run.
//
// -DSUBWARP=n: threads that share an entry, a power of two up to 32. -DVECTOR=1.
// -DWEIGHTS=0: value(k) = 1, data is not read. -DWEIGHTS=1: value(k) = data[k].
// -DTRANS=0: op(A) = A. -DTRANS=1: op(A) is the transpose; the two indices swap roles.
//
// Launch: block (threads), a multiple of 32; grid (n_graphs, y, z): block (g, b, c) owns the rows of
// matrix g in partition c * gridDim.y + b, which has n_columns columns, the last one maybe fewer; a
// block past the last column leaves at once. Dynamic shared memory: one Real for each row of the
// largest matrix and column of a partition.
#include "common.cuh"

static_assert(SUBWARP >= 1 && SUBWARP <= 32 && (SUBWARP & (SUBWARP - 1)) == 0,
              "SUBWARP divides a warp");
static_assert(VECTOR == 1, "a thread adds one element at a time");

extern "C" __global__ void __launch_bounds__(1024) bspmm_st_shared(
    const int *__restrict__ ids, const STORAGE *__restrict__ data,
    const int *__restrict__ entry_offsets, const int *__restrict__ offsets,
    const STORAGE *__restrict__ x, const STORAGE *__restrict__ residual, STORAGE *__restrict__ y,
    const int n_channels, const int n_columns)
{
    extern __shared__ Real total[];  // (n_rows, width)
    const long long first = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * n_columns;
    if (first >= n_channels) return;
    const int width = n_channels - first < n_columns ? n_channels - first : n_columns;
    const int row_begin = offsets[blockIdx.x];
    const int n_rows = offsets[blockIdx.x + 1] - row_begin;
    const unsigned entry_end = entry_offsets[blockIdx.x + 1];
    const int group = threadIdx.x / SUBWARP, n_groups = blockDim.x / SUBWARP;
    const int lane = threadIdx.x % SUBWARP;

    for (int i = threadIdx.x; i < n_rows * width; i += blockDim.x) total[i] = 0;
    __syncthreads();

    // Unsigned: the last step may go past 2^31 where the batch is as large as allowed.
    for (unsigned k = entry_offsets[blockIdx.x] + group; k < entry_end; k += n_groups) {
        const int row = ids[2LL * k + TRANS] - row_begin;
        const long long column = ids[2LL * k + 1 - TRANS];
#if WEIGHTS == 0
        const Real value = 1;
#else
        const Real value = widen(data[k]);
#endif
        for (int c = lane; c < width; c += SUBWARP)
            atomicAdd(&total[row * width + c], value * widen(x[column * n_channels + first + c]));
    }
    __syncthreads();

    for (int row = group; row < n_rows; row += n_groups)
#pragma unroll 2  // more would spill: a block of 1,024 threads leaves 64 registers to each
        for (int c = lane; c < width; c += SUBWARP) {
            const long long at = (long long)(row_begin + row) * n_channels + first + c;
            Real sum = total[row * width + c];
            if (residual) sum += widen(residual[at]);
            narrow(y[at], sum);
        }
}
