// Sum or maximum over the rows of every graph, the readout of a packed batch:
//
//     y[g, :] = reduction of x[i, :] over i in [offsets[g], offsets[g + 1])
//
// offsets (n_segments + 1) int32, x (n_rows, n_B), y (n_segments, n_B); n_B = n_vectors * VECTOR.
// An empty segment gives 0. A maximum over values that hold a NaN is NaN. Rows are taken in their
// order: deterministic, no atomics. y is written once and never read.
//
// -DOPERATION=SUM or MAX.
//
// Launch: as bspmm_csr.cu, with a segment in place of a row. No shared memory.
#include "common.cuh"

#define SUM 1
#define MAX 2

// Rows whose loads are issued before the first is used.
#define AHEAD 8

__device__ inline void take(Real &total, Real value)
{
#if OPERATION == SUM
    total += value;
#else
    // Written so that a NaN on either side wins, as it does in NumPy.
    total = (value > total || value != value) ? value : total;
#endif
}

extern "C" __global__ void segment_reduce(
    const int *__restrict__ offsets, const Vector *__restrict__ x, Vector *__restrict__ y,
    const int n_segments, const int n_vectors)
{
    const long long segment = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (segment >= n_segments) return;
    const int begin = offsets[segment];
    const int count = offsets[segment + 1] - begin;

    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors; c += gridDim.y * blockDim.x) {
        Real total[VECTOR] = {};
        long long i = begin;
        for (int left = count; left > 0; left -= AHEAD, i += AHEAD) {
            Vector loaded[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (u < left) loaded[u] = x[(i + u) * n_vectors + c];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (u < left)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) {
                        const Real value = widen(loaded[u].element[e]);
                        if (u == 0 && left == count)
                            total[e] = value;
                        else
                            take(total[e], value);
                    }
        }
        Vector result;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) narrow(result.element[e], total[e]);
        y[segment * n_vectors + c] = result;
    }
}
