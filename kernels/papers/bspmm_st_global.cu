// Y += op(A) X for a batch of sparse matrices in the SparseTensor layout (unsorted COO), summed in
// global memory:
//
//     y[row(k), :] += value(k) * x[column(k), :]      for every entry k
//
// Source: SWA SpMM for SparseTensor (Nagasaka, Nukada, Kojima, Matsuoka 2019, figure 3); case 3 of
// section 4.3, where one column of the largest output exceeds the shared memory of a block. Departs
// from the paper in that offsets into the whole batch replace tables of pointers, so that all entries
// of the batch are one list and no block belongs to a matrix.
//
// ids (nnz, 2) int32, row and column interleaved, in the numbering of the whole batch; data (nnz);
// entry_offsets (n_graphs + 1) int32, of which only the last, the number of entries, is read;
// x (n_in, n_B), y (n_out, n_B); n_B = n_channels. y must hold 0, or the residual to which products
// are added, before the launch, and must not overlap the inputs. Entries are in any order;
// duplicates add.
// atomicAdd on global memory: the order of summation, and so the last bits, change from run to run.
//
// -DSUBWARP=n: threads that share an entry, a power of two up to 32. -DVECTOR=1.
// -DWEIGHTS=0: value(k) = 1, data is not read. -DWEIGHTS=1: value(k) = data[k].
// -DTRANS=0: op(A) = A. -DTRANS=1: op(A) is the transpose; the two indices swap roles.
//
// Launch: block (threads), a multiple of 32; grid (ceil(nnz * SUBWARP / threads)): the SUBWARP
// threads from k * SUBWARP on own entry k. No shared memory.
#include "common.cuh"

static_assert(SUBWARP >= 1 && SUBWARP <= 32 && (SUBWARP & (SUBWARP - 1)) == 0,
              "SUBWARP divides a warp");
static_assert(VECTOR == 1, "a thread adds one element at a time");

extern "C" __global__ void bspmm_st_global(
    const int *__restrict__ ids, const STORAGE *__restrict__ data,
    const int *__restrict__ entry_offsets, const STORAGE *__restrict__ x, STORAGE *__restrict__ y,
    const int n_graphs, const int n_channels)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long k = thread / SUBWARP;
    if (k >= entry_offsets[n_graphs]) return;
    const long long row = ids[2 * k + TRANS];
    const long long column = ids[2 * k + 1 - TRANS];
#if WEIGHTS == 0
    const Real value = 1;
#else
    const Real value = widen(data[k]);
#endif
    for (int c = thread % SUBWARP; c < n_channels; c += SUBWARP)
        atomicAdd(&y[row * n_channels + c], value * widen(x[column * n_channels + c]));
}
