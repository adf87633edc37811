// y = alpha A x + beta y for a batch of sparse matrices as one block-diagonal CSR matrix (bspmm_sell.cu
// computes it for SELL):
//
//     y[i] = alpha * sum over k in [indptr[i], indptr[i + 1]) of value(k) * x[indices[k]]  +  beta * y[i]
//
// Source: the CRS SpMV that IPSJ report 2018-HPC-164 No. 3 (figure 2) compares with SELL. Departs
// from it in that beta scales y once, not in the loop, and that several threads may share a row.
//
// indptr (n_rows + 1) int32, indices (nnz) int32, data (nnz), x (n_cols), y (n_rows).
// beta = 0 never reads y. y must not overlap the inputs; each element is read, if at all, by the
// thread that then writes it. Empty rows give beta * y. The lanes of a row add in a fixed tree:
// deterministic, no atomics.
//
// -DWEIGHTS=0: value(k) = 1, data is not read. -DWEIGHTS=1: value(k) = data[k].
// -DLANES=n: threads that share a row, a power of two up to 32; 1 is a thread per row.
//
// Launch: block (LANES, rows) with LANES * rows a multiple of 32, grid (ceil(n_rows / rows)). The
// lanes of one row lie in one warp. No shared memory. VECTOR is 1.
#include "common.cuh"
#include "lanes.cuh"

// Entries of a lane whose loads are issued before the first is used.
#define AHEAD 4

extern "C" __global__ void spmv_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const STORAGE *__restrict__ x, STORAGE *__restrict__ y,
    const Real alpha, const Real beta, const int n_rows)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    // All LANES threads of a row leave together, so the group below is exactly those that stay.
    if (row >= n_rows) return;
    const unsigned end = indptr[row + 1];  // unsigned: the last step may go past 2**31

    Real sum = 0;
    for (unsigned k = indptr[row] + threadIdx.x; k < end; k += AHEAD * LANES) {
        int column[AHEAD];
        Real value[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const unsigned at = k + u * LANES;
            column[u] = at < end ? indices[at] : -1;
#if WEIGHTS
            value[u] = at < end ? widen(data[at]) : Real(0);
#else
            value[u] = 1;
#endif
        }
        STORAGE gathered[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (column[u] >= 0) gathered[u] = x[column[u]];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (column[u] >= 0) sum += value[u] * widen(gathered[u]);
    }
#if LANES > 1
    const unsigned group = lanes_of_row();
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_down_sync(group, sum, step, LANES);
#endif
    if (threadIdx.x == 0) {
        sum *= alpha;
        if (beta != 0) sum += beta * widen(y[row]);
        narrow(y[row], sum);
    }
}
