// Give every row of a packed batch the row of its graph, the transpose of a segmented sum:
//
//     x[i, :] = y[g, :]      where offsets[g] <= i < offsets[g + 1]
//
// offsets (n_segments + 1) int32, y (n_segments, n_B), x (n_rows, n_B); n_B = n_vectors * VECTOR.
// Rows past the last offset (a buffer larger than its batch) get 0. No atomics.
//
// Launch: as bspmm_csr.cu. No shared memory.
#include "common.cuh"

extern "C" __global__ void segment_broadcast(
    const int *__restrict__ offsets, const Vector *__restrict__ y, Vector *__restrict__ x,
    const int n_segments, const int n_rows, const int n_vectors)
{
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= n_rows) return;

    // The last segment that starts at or before the row: empty ones before it start there too.
    int low = 0, high = n_segments;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (offsets[middle + 1] <= row) low = middle + 1; else high = middle;
    }
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors; c += gridDim.y * blockDim.x)
        x[row * n_vectors + c] = low < n_segments ? y[(long long)low * n_vectors + c] : Vector{};
}
