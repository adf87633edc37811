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
// -DPEERS=0: the sum is flat. -DPEERS=n_ranks: the ranks are GPUs of one host, at most 8, which have mapped
// each other's memory; the sum is part of the kernels, and so of a CUDA graph. PACK=1 also writes to
// every other rank's data, and PACK=0 adds up what lies in its own, in the order of the ranks, and flat
// for this one's part: all ranks get the same bits. data (2, n_ranks, stride) of a rank has places for two
// turns: a rank may be one ahead of another, which still reads. flags (2, n_ranks, n_flags) uint32: a block
// that has written a chunk to a rank leaves the number of the turn there, and PACK=0 waits for it, and for
// that of chunk 0. turn (2) uint32 of this rank, 0 at first: turns that are over, written by PACK=0, and that
// which was begun, written by PACK=1, which counts from 1. first_flag: chunks of the tables before this one.
// All ranks launch as often, or the others wait forever.
//
// table, passed by value: the parameters of this launch, whose gradients are C-contiguous arrays of
// `size` elements, in chunks of CHUNK elements: [first_chunk, that of the next), none for an empty one.
// Launches for further tables pass no loss and no is_bad: the first has written what is not of a
// parameter.
//
// -DPACK: see above. -DFLAT, -DLOSS: dtypes. -DN_PARAMETERS: how many a table has room for.
// -DTABLE_BYTES: its size on the host.
//
// Launch: block (THREADS), grid (n_chunks, at least 1). No dynamic shared memory.
#include "common.cuh"

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
#ifndef __CUDACC__  // not on a host
#define __grid_constant__
#endif

// A constant of the grid: a copy of the addresses, which are indexed, would be in local memory.
struct Peers {
    FLAT *data[PEERS];
    unsigned *flags[PEERS];
};

// What this thread has written before, and others of its block before a barrier, is there for a thread of
// any GPU that has read this value.
__device__ inline void publish(unsigned *flag, const unsigned value)
{
#if __CUDA_ARCH__
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#else
    *flag = value;
#endif
}

__device__ inline unsigned published(const unsigned *flag)
{
#if __CUDA_ARCH__
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
#else
    return *flag;
#endif
}
#endif

// What peers write while a kernel waits must not be read as if it were constant.
#if PEERS
#define RESTRICT
#else
#define RESTRICT __restrict__
#endif

// Two blocks at once, at least: otherwise the compiler spills the calls of double division.
extern "C" __global__ void __launch_bounds__(256, 2) flat_gradients(
    const Table table, FLAT *RESTRICT flat, const LOSS *__restrict__ loss,
    int *__restrict__ is_bad, const int n, const int n_ranks, const int rank, const int n_molecules
#if PEERS
    , const __grid_constant__ Peers peers, unsigned *turn, const int stride, const int n_flags, const int first_flag
#endif
)
{
    const int chunk = blockIdx.x;
#if PEERS
    const unsigned now = PACK ? turn[0] + 1 : turn[1];
    const int half = now % 2 * PEERS;
#endif
    int low = 0, high = table.n_parameters - 1;  // the last one that begins at or before the chunk
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.parameter[middle].first_chunk <= chunk) low = middle; else high = middle - 1;
    }
    const Parameter &parameter = table.parameter[low];
    STORAGE *const grad = parameter.grad;
    const int first = (chunk - parameter.first_chunk) * CHUNK + threadIdx.x;
    if (PACK) {
#if PEERS
        FLAT *to[PEERS];
#pragma unroll
        for (int r = 0; r < PEERS; ++r)
            to[r] = peers.data[r] + (long long)(half + rank) * stride;
#endif
        const auto put = [&](const int at, const Sum value) {
            narrow(flat[at], value);
#if PEERS
#pragma unroll
            for (int r = 0; r < PEERS; ++r)
                if (r != rank) narrow(to[r][at], value);
#endif
        };
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = first + e * THREADS;
            if (i < parameter.size)
                put(parameter.offset + i, Sum(n_molecules) * Sum(widen(grad[i])));
        }
        if (chunk == 0 && loss) {
            const auto value = widen(*loss);
            const bool is_finite = value - value == 0;
            if (threadIdx.x == 0) put(n, Sum(n_molecules));
            for (int r = threadIdx.x; r < n_ranks; r += THREADS)
                put(n + 1 + r, Sum(r == rank && !is_finite));
        }
#if PEERS
        __syncthreads();  // all of the chunk is written
        const int r = threadIdx.x;
        if (r < PEERS && r != rank)
            publish(peers.flags[r] + (half + rank) * n_flags + first_flag + chunk, now);
        if (chunk == 0 && loss && threadIdx.x == 0) turn[1] = now;
#endif
    } else {
#if PEERS
        const unsigned *const flags = peers.flags[rank];
        if (threadIdx.x < 2 * PEERS) {
            const int r = threadIdx.x % PEERS;
            const int of = threadIdx.x < PEERS ? 0 : first_flag + chunk;
            while (r != rank && published(flags + (half + r) * n_flags + of) != now) {}
        }
        __syncthreads();
        const FLAT *from[PEERS];
#pragma unroll
        for (int r = 0; r < PEERS; ++r)
            from[r] = r == rank ? flat : peers.data[rank] + (long long)(half + r) * stride;
        const auto sum = [&](const int at) {
            Sum total = 0;
#pragma unroll
            for (int r = 0; r < PEERS; ++r) total += Sum(widen(from[r][at]));
            return total;
        };
        if (chunk == 0 && is_bad && threadIdx.x == 0) turn[0] = now;
#else
        const auto sum = [&](const int at) { return Sum(widen(flat[at])); };
#endif
        const Sum total = sum(n);
        bool are_finite = true;
        for (int r = 0; r < n_ranks; ++r) are_finite = are_finite && sum(n + 1 + r) == 0;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = first + e * THREADS;
            if (i < parameter.size)
                narrow(grad[i], Real(are_finite ? sum(parameter.offset + i) / total : Sum(0)));
        }
        if (chunk == 0 && is_bad && !are_finite)
            for (int r = threadIdx.x; r < n_ranks; r += THREADS)
                if (sum(n + 1 + r) != 0) is_bad[r] = 1;
    }
}
