// The gradients g_p of all parameters p as parts of one array, which the ranks of a run add up:
//
//     PACK=1:  flat[offset_p + i] = n_molecules g_p[i],  flat[n] = n_molecules,
//              flat[n + 1 + r] = 1 if r is this rank and its loss is not finite, else 0
//     PACK=0:  g_p[i] = flat[offset_p + i] / flat[n], or 0 if a loss was not finite,
//              is_bad[r] = 1 if that of rank r was not
//
// The second is for the sum over ranks of what the first has written; r < n_ranks. flat
// (n + 1 + n_ranks), arithmetic in its arithmetic dtype; loss () of another dtype; is_bad (n_ranks) may
// be memory of the host. Every element has one owner: deterministic, no atomics.
//
// -DPEERS=n_ranks: both at once, with the sum between them, and so for a CUDA graph. The ranks are GPUs of one
// host, at most 8, which have mapped each other's memory. Each block writes its chunks to flat and to the
// data of every other rank, then adds up what lies in its own data, in the order of the ranks, and flat for
// this one's part: all ranks get the same bits. data (2, n_ranks, stride) of a rank has places for two turns:
// a rank may be one ahead of another, which still reads. flags (2, n_ranks, n_flags) uint32: a block that
// has written a chunk to a rank leaves the number of the turn there, which a block of that rank waits for, and
// for that of the first chunk of all. turn (n_flags) uint32 of this rank, 0 at first: how many turns each block
// has done. All ranks make the same launches as often, or the others wait forever; no block waits before it
// has written, and all of a grid are resident. first_flag: chunks of the tables before this one.
//
// table, passed by value: the parameters of this launch, whose gradients are C-contiguous arrays of
// `size` elements, in chunks of CHUNK elements: [first_chunk, that of the next), none for an empty one.
// Launches for further tables pass no is_bad, and without PEERS no loss: the first has written what is not
// of a parameter.
//
// -DPACK, -DPEERS (0: none): see above. -DFLAT, -DLOSS: dtypes. -DN_PARAMETERS: how many a table has room
// for. -DTABLE_BYTES: its size on the host.
//
// Launch: block (THREADS), grid (n_chunks, at least 1); with PEERS at most as many blocks as there are
// multiprocessors. No dynamic shared memory.
#include "common.cuh"
#include "peers.cuh"

const int THREADS = 256;
const int EACH = 4;  // elements of a chunk that a thread owns
const int CHUNK = THREADS * EACH;

using Sum = Arithmetic<FLAT>::type;

struct Parameter {
    STORAGE *grad;
    int offset, size, first_chunk, unused;
};

struct Table {
    Parameter parameter[N_PARAMETERS];
    int n_parameters, unused;
};
static_assert(sizeof(Table) == TABLE_BYTES, "the host has the same layout");

#if PEERS
// A constant of the grid, as the table: a copy of what is indexed would be in local memory.
struct Peers {
    FLAT *data[PEERS];
    unsigned *flags[PEERS];
};
#endif

// What peers write while a kernel waits must not be read as if it were constant.
#if PEERS
#define RESTRICT
#else
#define RESTRICT __restrict__
#endif

// A thread's elements of a chunk: i, i + THREADS and so on, those below parameter->size.
__device__ inline int place(const Table &table, const int chunk, const Parameter *&parameter)
{
    int low = 0, high = table.n_parameters - 1;  // the last one that begins at or before the chunk
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.parameter[middle].first_chunk <= chunk) low = middle; else high = middle - 1;
    }
    parameter = table.parameter + low;
    return (chunk - parameter->first_chunk) * CHUNK + threadIdx.x;
}

// Write a chunk of what this rank sends; the first of all has the numbers, too.
template <typename Put>
__device__ inline void pack(
    const Table &table, const int chunk, const bool is_first, const bool is_bad, const int n, const int n_ranks,
    const int rank, const int n_molecules, const Put put)
{
    const Parameter *parameter;
    const int first = place(table, chunk, parameter);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = first + e * THREADS;
        if (i < parameter->size)
            put(parameter->offset + i, Sum(n_molecules) * Sum(widen(parameter->grad[i])));
    }
    if (is_first) {
        if (threadIdx.x == 0) put(n, Sum(n_molecules));
        for (int r = threadIdx.x; r < n_ranks; r += THREADS) put(n + 1 + r, Sum(r == rank && is_bad));
    }
}

// Write a chunk of the mean gradient.
template <typename Get>
__device__ inline void unpack(
    const Table &table, const int chunk, const Sum total, const bool are_finite, const Get sum)
{
    const Parameter *parameter;
    const int first = place(table, chunk, parameter);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = first + e * THREADS;
        if (i < parameter->size)
            narrow(parameter->grad[i], Real(are_finite ? sum(parameter->offset + i) / total : Sum(0)));
    }
}

__device__ inline bool is_finite(const LOSS *loss)
{
    const auto value = widen(*loss);
    return value - value == 0;
}

// Two blocks at once, at least: otherwise the compiler spills the calls of double division.
extern "C" __global__ void __launch_bounds__(256, 2) flat_gradients(
    const __grid_constant__ Table table, FLAT *RESTRICT flat, const LOSS *RESTRICT loss,
    int *RESTRICT is_bad, const int n, const int n_ranks, const int rank, const int n_molecules
#if PEERS
    , const __grid_constant__ Peers peers, unsigned *turn, const int stride, const int n_flags, const int first_flag,
    const int n_chunks
#endif
)
{
#if PEERS
    unsigned *const my_turn = turn + first_flag + blockIdx.x;
    const unsigned now = *my_turn + 1;
    const int half = now % 2 * PEERS;
    const bool is_mine_bad = !is_finite(loss);
    FLAT *to[PEERS];
    const FLAT *from[PEERS];
#pragma unroll
    for (int r = 0; r < PEERS; ++r) {
        to[r] = r == rank ? flat : peers.data[r] + (long long)(half + rank) * stride;
        from[r] = r == rank ? flat : peers.data[rank] + (long long)(half + r) * stride;
    }
    const auto put = [&](const int at, const Sum value) {
#pragma unroll
        for (int r = 0; r < PEERS; ++r) narrow(to[r][at], value);
    };
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        const bool is_first = first_flag + chunk == 0;
        pack(table, chunk, is_first, is_mine_bad, n, n_ranks, rank, n_molecules, put);
        __syncthreads();  // all of the chunk is written
        const int r = threadIdx.x;
        if (r < PEERS && r != rank)
            publish(peers.flags[r] + (half + rank) * n_flags + first_flag + chunk, now);
    }
    FLAT rounded;  // as the other ranks get it
    narrow(rounded, Sum(n_molecules));
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        if (threadIdx.x < 2 * PEERS) {
            const int r = threadIdx.x % PEERS;
            const int of = threadIdx.x < PEERS ? 0 : first_flag + chunk;
            const unsigned *const flag = peers.flags[rank] + (half + r) * n_flags + of;
            while (r != rank && published(flag) != now) {}
        }
        __syncthreads();
        Sum total = 0;
        bool are_finite = true;
#pragma unroll
        for (int r = 0; r < PEERS; ++r) {
            // Of this rank another block may have to write the numbers yet.
            total += r == rank ? Sum(widen(rounded)) : Sum(widen(from[r][n]));
            const bool is_bad_there = r == rank ? is_mine_bad : widen(from[r][n + 1 + r]) != 0;
            are_finite = are_finite && !is_bad_there;
            if (is_bad && first_flag + chunk == 0 && threadIdx.x == 0 && is_bad_there) is_bad[r] = 1;
        }
        unpack(table, chunk, total, are_finite, [&](const int at) {
            Sum sum = 0;
#pragma unroll
            for (int r = 0; r < PEERS; ++r) sum += Sum(widen(from[r][at]));
            return sum;
        });
    }
    __syncthreads();  // all have read it
    if (threadIdx.x == 0) *my_turn = now;
#elif PACK
    const auto put = [&](const int at, const Sum value) { narrow(flat[at], value); };
    const bool is_first = blockIdx.x == 0 && loss;
    pack(table, blockIdx.x, is_first, is_first && !is_finite(loss), n, n_ranks, rank, n_molecules, put);
#else
    const auto sum = [&](const int at) { return Sum(widen(flat[at])); };
    bool are_finite = true;
    for (int r = 0; r < n_ranks; ++r) are_finite = are_finite && sum(n + 1 + r) == 0;
    unpack(table, blockIdx.x, sum(n), are_finite, sum);
    if (blockIdx.x == 0 && is_bad && !are_finite)
        for (int r = threadIdx.x; r < n_ranks; r += THREADS)
            if (sum(n + 1 + r) != 0) is_bad[r] = 1;
#endif
}
