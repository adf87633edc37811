// Add up the pieces of long rows that kernels/bspmm_csr.cu has left:
//
//     y[i, :] += sum over the pieces p of row i of partial[p, :]      for every long row i
//
// indptr (n_rows + 1) int32; partial (2 * n_chunks, n_B) of the arithmetic dtype, of which only the
// pieces that exist are read; begun (n_chunks) int32, the long row that begins in a chunk, or -1;
// y (n_rows, n_B). Pieces are numbered as in pieces.cuh, and added in the order of their numbers:
// deterministic, no atomics.
//
// -DAHEAD=n: pieces whose loads are issued before the first is used.
//
// Launch: block (columns, chunks), grid (x, y, z) with at least ceil(n_chunks / chunks) blocks in x and
// ceil(n_B / columns) in y and z together. The thread of chunk i and column c owns y[begun[i], c]. No
// shared memory.
#include "common.cuh"

extern "C" __global__ void sum_pieces(
    const int *__restrict__ indptr, const Real *__restrict__ partial,
    const int *__restrict__ begun, STORAGE *__restrict__ y, const int n_channels, const int piece,
    const int n_chunks)
{
    const int chunk = blockIdx.x * blockDim.y + threadIdx.y;
    const int c = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.x + threadIdx.x;
    if (chunk >= n_chunks || c >= n_channels) return;
    const int row = begun[chunk];
    if (row < 0) return;
    const int last = (indptr[row + 1] - 1) / piece;  // the chunk in which the row ends
    STORAGE &to = y[(long long)row * n_channels + c];
    Real sum = widen(to) + partial[(2ll * chunk + 1) * n_channels + c];
    for (int at = chunk + 1; at <= last; at += AHEAD) {
        Real next[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (at + u <= last) next[u] = partial[2ll * (at + u) * n_channels + c];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (at + u <= last) sum += next[u];
    }
    narrow(to, sum);
}
