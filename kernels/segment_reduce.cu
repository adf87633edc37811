// Sum or maximum over the rows of every graph, the readout of a packed batch:
//
//     y[g, :] = reduction of x[i, :] over i in [offsets[g], offsets[g + 1])
//
// offsets (n_segments + 1) int32, or NULL for one segment of all rows; x (n_rows, n_B),
// y (n_segments, n_B); n_B = n_vectors * VECTOR.
// An empty segment gives 0. A NaN makes its maximum NaN. Rows past the last offset are not read. y is
// written once and never read. Deterministic, no atomics: lanes take the rows of a segment in turn, and
// are combined in a fixed tree.
//
// weights (n_rows) float32: row i stands for weights[i] rows, so a sum adds weights[i] * x[i, :]. A row
// of weight 0 is ignored, whatever it holds; a segment of such rows is empty.
//
// A segment of more than `chunk` rows is left to blocks that own fixed chunks of `chunk` rows of x,
// whatever the segments, and to a second launch. At most two such segments overlap a chunk: the one that
// contains its first row, and the one that begins in it. Their parts are partial (2, n_chunks, n_B) of
// the arithmetic dtype; only the parts of long segments are written and read.
//
// -DOPERATION=SUM or MAX.
// -DWEIGHTED=0: all weights are one; they are not read.
// -DAHEAD=n: rows of a lane whose loads are issued before the first is used.
// -DCOMBINE=0: short segments, and the parts of the long ones. n_chunks = 0: there are no long ones.
// -DCOMBINE=1: the long segments from their parts.
//
// Launch: block (columns, lanes, units), lanes a power of two, at most 256 threads in all; shared
// memory for an accumulator per thread. Thread (x, y, z) of block (b, t) works for unit
// b * units + z on the vectors t * columns + x, in steps of gridDim.y * columns.
// COMBINE=0: grid (ceil(n_chunks / units) + ceil(n_segments / units), any); the chunks come first.
// COMBINE=1: grid (ceil(n_chunks / units), any): a unit combines the long segment that begins in its
// chunk, if there is one.
#include "common.cuh"

#define SUM 1
#define MAX 2

static_assert(AHEAD >= 1 && AHEAD <= 8, "the loads in flight stay in registers");

// Where a segment begins.
__device__ inline int start_of(const int *offsets, const int segment, const int n_rows)
{
    return offsets ? offsets[segment] : segment * n_rows;
}

// The segment that a row of x is in; n_segments if the row lies past all of them.
__device__ inline int holder_of(const int *offsets, const int n_segments, const int row)
{
    return offsets ? segment_of(offsets, n_segments, row) : 0;
}

// Data of a row that are loaded together.
struct Row {
    Vector vector;
    float weight;
};

// The term of an element in a sum or a maximum. Parts are already weighted.
__device__ inline Real term(const Row &row, const int e)
{
    const Real value = widen(row.vector.element[e]);
    if (OPERATION == SUM) return row.weight != 0 ? row.weight * value : 0;
    return row.weight != 0 ? value : -infinity();
}

__device__ inline Real term(const Wide &part, const int e) { return part.element[e]; }

__device__ inline void take(Real &total, Real value)
{
#if OPERATION == SUM
    total += value;
#else
    // Written so that a NaN on either side wins, as it does in NumPy.
    total = (value > total || value != value) ? value : total;
#endif
}

// Reduce the vectors at(0), ..., at(count - 1), each a Row or a Wide. Lane 0 has the result, which is
// undefined if count is 0. Every thread of the block must call this, because it has barriers. `shared`
// has a place for each thread.
template <typename Loaded, typename At>
__device__ inline Wide reduce(const unsigned count, Wide *shared, At at)
{
    const unsigned lane = threadIdx.y, lanes = blockDim.y;
    Wide total = {};
    for (unsigned i = lane; i < count; i += AHEAD * lanes) {
        Loaded loaded[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * lanes < count) loaded[u] = at(i + u * lanes);
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * lanes < count)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    const Real value = term(loaded[u], e);
                    if (u == 0 && i == lane)
                        total.element[e] = value;  // 0 is no start for a maximum
                    else
                        take(total.element[e], value);
                }
    }
    if (lanes > 1) {
        Wide *const mine = shared + (threadIdx.z * lanes + lane) * blockDim.x + threadIdx.x;
        __syncthreads();  // `shared` has been read for the result before this one
        *mine = total;
        for (unsigned step = lanes / 2; step > 0; step /= 2) {
            __syncthreads();
            // A lane without a row has nothing to add.
            if (lane < step && lane + step < count) {
                const Wide other = mine[step * blockDim.x];
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) take(total.element[e], other.element[e]);
                *mine = total;
            }
        }
    }
    return total;
}

// The result of `count` rows from `begin` on.
__device__ inline Vector rounded(
    const Wide &total, const float *__restrict__ weights, const int begin, int count)
{
    // The maximum is -inf if no row counts, but also if all rows that count hold -inf.
    if (WEIGHTED && OPERATION == MAX && count && total.element[0] == -infinity())
        while (count && weights[begin + count - 1] == 0) --count;
    Vector result;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) narrow(result.element[e], count ? total.element[e] : Real(0));
    return result;
}

extern "C" __global__ void segment_reduce(
    const int *__restrict__ offsets, const Vector *__restrict__ x,
    const float *__restrict__ weights, Vector *__restrict__ y, Wide *__restrict__ partial,
    const int n_segments, const int n_rows, const int n_vectors, const int chunk,
    const int n_chunks)
{
    extern __shared__ Wide shared[];
    const long long unit = (long long)blockIdx.x * blockDim.z + threadIdx.z;
    const int first = unit < n_chunks ? unit * chunk : 0;
    const int stop = n_rows - first > chunk ? first + chunk : n_rows;

#if COMBINE
    int segment = n_segments, begin = 0, end = 0, count = 0;
    if (unit < n_chunks) segment = holder_of(offsets, n_segments, stop - 1);
    if (segment < n_segments) {
        begin = start_of(offsets, segment, n_rows);
        end = start_of(offsets, segment + 1, n_rows);
        // A long segment that begins here reaches past the end of the chunk.
        if (begin >= first && end - begin > chunk) count = (end - 1) / chunk - (int)unit + 1;
    }
    for (int start = blockIdx.y * blockDim.x; start < n_vectors; start += gridDim.y * blockDim.x) {
        const int c = start + threadIdx.x;
        const bool inside = c < n_vectors && count;
        const Wide total = reduce<Wide>(inside ? count : 0, shared, [&](unsigned i) {
            // Only the first part can lie in a chunk in which another segment comes before it.
            const long long part = unit + i + (i == 0 && begin > first ? n_chunks : 0);
            return partial[part * n_vectors + c];
        });
        if (inside && threadIdx.y == 0)
            y[(long long)segment * n_vectors + c] = rounded(total, weights, begin, end - begin);
    }
#else
    // All units of a block are of one kind, so that its threads meet at the same barriers.
    const unsigned n_chunk_blocks = (n_chunks + blockDim.z - 1) / blockDim.z;
    const bool in_chunks = blockIdx.x < n_chunk_blocks;
    for (int side = 0; side < 1 + in_chunks; ++side) {
        // -1: nothing to do
        long long to = unit - (long long)n_chunk_blocks * blockDim.z;
        int begin = 0, count = -1;
        if (in_chunks) {
            to = unit + (side ? n_chunks : 0);
            int segment = n_segments;
            if (unit < n_chunks) segment = holder_of(offsets, n_segments, side ? stop - 1 : first);
            if (segment < n_segments) {
                begin = start_of(offsets, segment, n_rows);
                const int end = start_of(offsets, segment + 1, n_rows);
                // Side 1 is for a segment that begins after the first row; others belong to side 0.
                const bool mine = end - begin > chunk && (side == 0 || begin > first);
                if (begin < first) begin = first;
                if (mine) count = (end < stop ? end : stop) - begin;
            }
        } else if (to < n_segments) {
            begin = start_of(offsets, to, n_rows);
            count = start_of(offsets, to + 1, n_rows) - begin;
            if (n_chunks && count > chunk) count = -1;
        }
        for (int start = blockIdx.y * blockDim.x; start < n_vectors;
             start += gridDim.y * blockDim.x) {
            const int c = start + threadIdx.x;
            const bool inside = c < n_vectors && count >= 0;
            const Wide total = reduce<Row>(inside ? count : 0, shared, [&](unsigned i) {
                const long long row = (long long)begin + i;
                return Row{x[row * n_vectors + c], WEIGHTED ? weights[row] : 1};
            });
            if (!inside || threadIdx.y) continue;
            if (in_chunks)
                partial[to * n_vectors + c] = total;
            else
                y[to * n_vectors + c] = rounded(total, weights, begin, count);
        }
    }
#endif
}
