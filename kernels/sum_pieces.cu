// Add up the pieces of long rows that kernels/bspmm_csr.cu has left:
//
//     y[i, :] += sum over the pieces p of row i of partial[p, :]      for every long row i
//
// indptr (n_rows + 1) int32; partial (2 * n_chunks, n_B) of the arithmetic dtype, of which only the
// pieces that exist are read; begun (n_chunks) int32, the long row that begins in a chunk, or -1;
// y (n_rows, n_B). Pieces are numbered as in pieces.cuh. Every element is summed in a fixed order:
// lanes take the pieces of a row in turn, and are added one after the other. Deterministic, no atomics.
//
// -DCOLUMNS=n, -DLANES=n: threads of a block. -DCHUNKS=n: chunks that it looks at, at most as many.
//
// Launch: block (COLUMNS, LANES), grid (ceil(n_chunks / CHUNKS), y) with at least ceil(n_B / COLUMNS)
// blocks in y. No dynamic shared memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(COLUMNS * LANES) sum_pieces(
    const int *__restrict__ indptr, const Real *__restrict__ partial,
    const int *__restrict__ begun, STORAGE *__restrict__ y, const int n_channels, const int piece,
    const int n_chunks)
{
    __shared__ Real of_lane[LANES][COLUMNS];
    __shared__ int rows[CHUNKS];
    const int first = blockIdx.x * CHUNKS, thread = threadIdx.y * COLUMNS + threadIdx.x;
    if (thread < CHUNKS) rows[thread] = first + thread < n_chunks ? begun[first + thread] : -1;
    __syncthreads();
    const int c = blockIdx.y * COLUMNS + threadIdx.x;
    for (int chunk = first; chunk < first + CHUNKS; ++chunk) {
        const int row = rows[chunk - first];
        if (row < 0) continue;
        const int last = (indptr[row + 1] - 1) / piece;  // the chunk in which the row ends
        Real sum = 0;
        if (c < n_channels)
            for (int at = chunk + threadIdx.y; at <= last; at += LANES)
                sum += partial[(2ll * at + (at == chunk)) * n_channels + c];
        of_lane[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y == 0 && c < n_channels) {
            STORAGE &to = y[(long long)row * n_channels + c];
            sum = widen(to);
#pragma unroll
            for (int lane = 0; lane < LANES; ++lane) sum += of_lane[lane][threadIdx.x];
            narrow(to, sum);
        }
        __syncthreads();  // before the next row's sums
    }
}
