// The gradients g_p of all parameters p as parts of one array, which the ranks of a run add up:
//
//     PACK=1:  flat[offset_p + i] = n_molecules g_p[i],  flat[n] = n_molecules,
//              flat[n + 1 + r] = 1 if r is this rank and its loss is not finite, else 0
//     PACK=0:  g_p[i] = flat[offset_p + i] / flat[n], or 0 if a loss was not finite,
//              is_bad[r] = 1 if the loss of rank r was not finite
//
// PACK=0 reads the sum over the ranks of the arrays that PACK=1 has written; r < n_ranks.
// flat (n + 1 + n_ranks), with calculations in its arithmetic dtype; loss () may have another
// dtype; is_bad (n_ranks) may be host memory. Every element has one owner: deterministic, no
// atomics.
//
// -DPEERS=n_ranks: pack, add up and unpack in one launch, which a CUDA graph can hold. The ranks
// are GPUs of one host, at most 8, which have mapped each other's memory. Each block sends its
// chunks to the `data` of every other rank. Then it adds up the chunks of all ranks, in the order
// of the ranks, with this rank's own chunks from flat: all ranks get the same bits. `data` of a
// rank, (2, n_ranks, stride) words, has room for two turns, because a rank may be one turn ahead of
// another one that is still reading. It cannot be two turns ahead: to end the turn between, it
// needs the numbers that the other rank sends in its next kernel.
// turn (n_chunks of all tables) uint32 of this rank: the number of turns that each block has ended.
// Both turn and data begin as 0. All ranks must make the same launches equally often, or the others
// wait forever. No block waits before it has sent, and all blocks of a grid are resident.
// first_chunk: chunks of the tables before this one.
//
// table, passed by value: the parameters of this launch, whose gradients are C-contiguous arrays of
// `size` elements. A parameter has the chunks, of CHUNK elements, from its first_chunk to the next
// parameter's; an empty one has none. Launches for further tables pass no is_bad and, without
// PEERS, no loss: the first launch writes all elements that belong to no parameter.
//
// -DPACK, -DPEERS (0: none): see above. -DFLAT, -DLOSS: dtypes. -DN_PARAMETERS: how many a table
// has room for. -DTABLE_BYTES: its size on the host.
//
// Launch: block (THREADS), grid (n_chunks, at least 1); with PEERS at most RESIDENT blocks for each
// multiprocessor. No dynamic shared memory.
#include "common.cuh"
#include "peers.cuh"

const int THREADS = 256;
const int RESIDENT = 2;  // blocks on a multiprocessor
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
// A constant of the grid, like the table: otherwise an array that is indexed is copied to local memory.
struct Peers {
    PeerWord *data[PEERS];
};
// Elements that are received together: more are faster, but take registers.
const int TOGETHER = PEERS > 4 ? 1 : EACH;
#endif

// Find the parameter of a chunk, and the first element i of a thread, which owns i, i + THREADS and
// so on below parameter->size.
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

// Write a chunk of the numbers that this rank sends; the very first chunk also has those that
// follow the gradients.
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
    if (is_first && threadIdx.x == 0) {
        put(n, Sum(n_molecules));
        for (int r = 0; r < n_ranks; ++r) put(n + 1 + r, Sum(r == rank && is_bad));
    }
}

// Write a chunk of the mean gradient; `get` gives the sums of the thread's first `count` elements.
template <typename Get>
__device__ inline void unpack(
    const Table &table, const int chunk, const Sum total, const bool are_finite, const Get get)
{
    const Parameter *parameter;
    const int first = place(table, chunk, parameter);
    const int count = (parameter->size - first + THREADS - 1) / THREADS;  // may be more than EACH, or below 0
    Sum sum[EACH];
    get(parameter->offset + first, count, sum);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (e < count)
            narrow(parameter->grad[first + e * THREADS], Real(are_finite ? sum[e] / total : Sum(0)));
}

__device__ inline bool is_finite(const LOSS *loss)
{
    const auto value = widen(*loss);
    return value - value == 0;
}

// Without these bounds the compiler spills registers at the calls of double division.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) flat_gradients(
    const __grid_constant__ Table table, FLAT *__restrict__ flat, const LOSS *__restrict__ loss,
    int *__restrict__ is_bad, const int n, const int n_ranks, const int rank, const int n_molecules
#if PEERS
    , const __grid_constant__ Peers peers, unsigned *turn, const long long stride, const int first_chunk,
    const int n_chunks
#endif
)
{
#if PEERS
    unsigned *const my_turn = turn + first_chunk + blockIdx.x;
    const unsigned now = *my_turn + 1;
    const int half = now % 2 * PEERS;
    const bool is_mine_bad = !is_finite(loss);
    const auto put = [&](const int at, const Sum value) {
        FLAT rounded;  // as the other ranks get it
        narrow(rounded, value);
        flat[at] = rounded;
#pragma unroll
        for (int r = 0; r < PEERS; ++r)
            if (r != rank) send(peers.data[r] + (half + rank) * stride, at, rounded, now);
    };
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x)
        pack(table, chunk, first_chunk + chunk == 0, is_mine_bad, n, n_ranks, rank, n_molecules, put);
    const PeerWord *const received = peers.data[rank] + half * stride;
    Sum total = 0;
    bool are_finite = true;
#pragma unroll
    for (int r = 0; r < PEERS; ++r) {
        FLAT weight, is_bad_there;
        narrow(weight, Sum(n_molecules));
        narrow(is_bad_there, Sum(is_mine_bad));
        const PeerWord *const from = received + r * stride;
        while (r != rank && !(receive(from, n, now, weight) && receive(from, n + 1 + r, now, is_bad_there))) {}
        total += Sum(widen(weight));
        are_finite = are_finite && widen(is_bad_there) == 0;
        if (is_bad && blockIdx.x == 0 && threadIdx.x == 0 && widen(is_bad_there) != 0) is_bad[r] = 1;
    }
    const auto get = [&](const int at, const int count, Sum (&sum)[EACH]) {
#pragma unroll
        for (int first = 0; first < EACH; first += TOGETHER) {
            FLAT value[PEERS][TOGETHER];
            bool are_here;
            do {
                are_here = true;
#pragma unroll
                for (int r = 0; r < PEERS; ++r)
#pragma unroll
                    for (int e = 0; e < TOGETHER; ++e) {
                        const int i = at + (first + e) * THREADS;
                        if (first + e < count && r != rank)
                            are_here = receive(received + r * stride, i, now, value[r][e]) && are_here;
                    }
            } while (!are_here);
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e) {
                sum[first + e] = 0;
#pragma unroll
                for (int r = 0; r < PEERS; ++r)
                    if (first + e < count)
                        sum[first + e] += Sum(widen(r == rank ? flat[at + (first + e) * THREADS] : value[r][e]));
            }
        }
    };
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) unpack(table, chunk, total, are_finite, get);
    __syncthreads();  // all have read it
    if (threadIdx.x == 0) *my_turn = now;
#elif PACK
    const auto put = [&](const int at, const Sum value) { narrow(flat[at], value); };
    const bool is_first = blockIdx.x == 0 && loss;
    pack(table, blockIdx.x, is_first, is_first && !is_finite(loss), n, n_ranks, rank, n_molecules, put);
#else
    const auto get = [&](const int at, const int count, Sum (&sum)[EACH]) {
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (e < count) sum[e] = Sum(widen(flat[at + e * THREADS]));
    };
    bool are_finite = true;
    for (int r = 0; r < n_ranks; ++r) are_finite = are_finite && widen(flat[n + 1 + r]) == 0;
    unpack(table, blockIdx.x, Sum(widen(flat[n])), are_finite, get);
    if (blockIdx.x == 0 && is_bad && !are_finite)
        for (int r = threadIdx.x; r < n_ranks; r += THREADS)
            if (widen(flat[n + 1 + r]) != 0) is_bad[r] = 1;
#endif
}
