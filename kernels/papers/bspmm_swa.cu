// Product of a batch of sparse matrices with a dense matrix, a sub-warp for every row:
//
//     y[i, :] = r[i, :] + sum over k in [indptr[i], indptr[i + 1]) of value(k) * x[indices[k], :]
//
// Source: SWA_SpMM_CSR (Nagasaka, Nukada, Kojima, Matsuoka 2019, figure 4), batched (section 4.3),
// with its output in shared memory: figure 5-(c) where gridDim.y is 1, 5-(d) where the columns are
// split into gridDim.y partitions. As there, a lane adds every product to shared memory, entry by
// entry. Departs from it in that row_offsets, one table into the whole batch, replaces the tables of
// pointers to every matrix, and indices count the columns of the whole batch; and in the residual
// r, float16 and float64.
//
// row_offsets (n_graphs + 1) int32, indptr (n_rows + 1) int32, indices (nnz) int32, data (nnz),
// order (nnz) int32, x (n_cols, n_B), residual (n_rows, n_B) or null, y (n_rows, n_B);
// n_B = n_channels. No array need be aligned to more than an element.
// Empty rows give the residual or 0. Entries of a row are added in their order: deterministic, no
// atomics. y is written once and never read; it must not overlap the inputs. Rows past the last
// offset belong to no graph and are not written.
//
// -DSUBWARP=n: lanes that share a row, a power of two up to 32; a constant, so that dividing by it
//              is a shift.
// -DWEIGHTS=0, 1, 2: as bspmm_csr.cu. VECTOR is not used: lanes move single elements.
//
// Launch: block (TB) with TB a multiple of SUBWARP, grid (blocks, partitions) of
// max_rows * SUBWARP * n_graphs threads for every partition, rounded up to whole blocks;
// n_graphs * max_rows < 2^31. max_rows: rows of the largest graph, positive; width: columns of a
// partition, partitions * width >= n_B. Sub-warp s owns row s % max_rows of graph s / max_rows in the
// columns of its partition; where the graph has no such row it leaves at once.
// Shared memory: TB / SUBWARP * width sums, dynamic. No barrier: every element of it is zeroed, added
// to and written out by the one lane that owns it, so that the surplus threads may leave early.
#include "common.cuh"

static_assert(SUBWARP >= 1 && SUBWARP <= 32 && (SUBWARP & (SUBWARP - 1)) == 0,
              "SUBWARP divides a warp");

extern "C" __global__ void bspmm_swa(
    const int *__restrict__ row_offsets, const int *__restrict__ indptr,
    const int *__restrict__ indices, const STORAGE *__restrict__ data,
    const int *__restrict__ order, const STORAGE *__restrict__ x,
    const STORAGE *__restrict__ residual, STORAGE *__restrict__ y,
    const int n_graphs, const int max_rows, const int n_channels, const int width)
{
    extern __shared__ Real output[];
    const unsigned sub_warp = threadIdx.x / SUBWARP;
    const unsigned lane = threadIdx.x % SUBWARP;
    const unsigned number = blockIdx.x * (blockDim.x / SUBWARP) + sub_warp;
    const unsigned graph = number / max_rows;
    if (graph >= n_graphs) return;
    const int row = row_offsets[graph] + number % max_rows;
    if (row >= row_offsets[graph + 1]) return;

    // Unsigned, because a last, empty partition may begin past 2^31.
    const unsigned first = blockIdx.y * width;
    const unsigned left = first < n_channels ? n_channels - first : 0;
    const unsigned columns = left < width ? left : width;
    Real *const sum = output + sub_warp * width;

    for (unsigned j = lane; j < columns; j += SUBWARP) sum[j] = 0;

    const int end = indptr[row + 1];
    for (int k = indptr[row]; k < end; ++k) {
#if WEIGHTS == 0
        const Real value = 1;
#elif WEIGHTS == 1
        const Real value = widen(data[k]);
#else
        const Real value = widen(data[order[k]]);
#endif
        const STORAGE *const from = x + (long long)indices[k] * n_channels + first;
        for (unsigned j = lane; j < columns; j += SUBWARP) sum[j] += value * widen(from[j]);
    }

    const long long at = (long long)row * n_channels + first;
    for (unsigned j = lane; j < columns; j += SUBWARP) {
        Real result = sum[j];
        if (residual) result += widen(residual[at + j]);
        narrow(y[at + j], result);
    }
}
