// Give every row of a packed batch the row of its graph, the transpose of a segmented sum:
//
//     x[i, :] = weights[i] * y[g, :]      where offsets[g] <= i < offsets[g + 1]
//
// offsets (n_segments + 1) int32, y (n_segments, n_B), x (n_rows, n_B); n_B = n_vectors * VECTOR.
// weights (n_rows) float32; a weight of 0 gives 0, whatever y holds. -DWEIGHTED=0: all are 1, and not read.
// Rows past the last offset (a buffer larger than its batch) get 0. Every element of x is written once.
// No atomics.
//
// A unit of threads owns a segment, so that no row has to look for its segment. Segments of more
// than `chunk` rows (has_long says whether there may be any) and the rows past the last offset are left
// to units that own fixed chunks of `chunk` rows of x.
//
// Launch: as for segment_reduce.cu with COMBINE=0 and n_chunks = ceil(n_rows / chunk). No shared memory.
#include "common.cuh"

__device__ inline Vector scaled(const Vector &vector, const float weight)
{
    Vector result;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        narrow(result.element[e], weight != 0 ? weight * widen(vector.element[e]) : Real(0));
    return result;
}

extern "C" __global__ void segment_broadcast(
    const int *__restrict__ offsets, const Vector *__restrict__ y,
    const float *__restrict__ weights, Vector *__restrict__ x, const int n_segments,
    const int n_rows, const int n_vectors, const int chunk, const int n_chunks, const int has_long)
{
    const unsigned n_chunk_blocks = (n_chunks + blockDim.z - 1) / blockDim.z;
    const bool in_chunks = blockIdx.x < n_chunk_blocks;
    const long long unit = (long long)blockIdx.x * blockDim.z + threadIdx.z -
                           (in_chunks ? 0 : (long long)n_chunk_blocks * blockDim.z);
    if (unit >= (in_chunks ? n_chunks : n_segments)) return;
    const int first = in_chunks ? unit * chunk : 0;
    const int stop = n_rows - first > chunk ? first + chunk : n_rows;

    // The parts of a chunk: the segment of its first row; the segment that begins after that row and
    // reaches past the last one; the rows that belong to no segment.
    for (int part = 0; part < (in_chunks ? 3 : 1); ++part) {
        long long segment = unit;
        int begin, end;
        if (!in_chunks) {
            begin = offsets[segment];
            end = offsets[segment + 1];
            if (has_long && end - begin > chunk) return;
        } else if (part == 2) {
            segment = n_segments;
            begin = offsets[n_segments];
            end = n_rows;
        } else {
            if (!has_long) continue;
            segment = segment_of(offsets, n_segments, part ? stop - 1 : first);
            if (segment == n_segments) continue;
            begin = offsets[segment];
            end = offsets[segment + 1];
            if (end - begin <= chunk || (part == 1 && begin <= first)) continue;
        }
        if (in_chunks) {
            begin = begin > first ? begin : first;
            end = end < stop ? end : stop;
        }
        for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < n_vectors;
             c += gridDim.y * blockDim.x) {
            Vector value{};
            if (segment < n_segments) value = y[segment * n_vectors + c];
            for (long long i = (long long)begin + threadIdx.y; i < end; i += blockDim.y)
                x[i * n_vectors + c] = WEIGHTED ? scaled(value, weights[i]) : value;
        }
    }
}
