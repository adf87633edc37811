// The sum of a vector of every rank, for statistics of all batches, inside of a CUDA graph:
//
//     y[i] = sum_r x_r[i]
//
// x, y (n), of this rank; the ranks are PEERS GPUs of one host, at most 8, which have mapped each other's memory
// (see flat_gradients.cu). slots: that of each rank for this sum, flags (2, PEERS) uint32 in SLOT_FLAGS bytes,
// then data (2, PEERS, n). turn (1) uint32 of this rank, 0 at first: how many turns are over. Added up in
// the order of the ranks: all get the same bits.
//
// alone: the last turn once more, with another x and without the other ranks, which do not notice.
//
// -DPEERS, -DSLOT_FLAGS: see above.
//
// Launch: one block, grid 1. No dynamic shared memory.
#include "common.cuh"
#include "peers.cuh"

// A constant of the grid: a copy of what is indexed would be in local memory.
struct Slots {
    char *of[PEERS];
};

__device__ inline STORAGE *data(char *slot, const int place, const int n)
{
    return (STORAGE *)(slot + SLOT_FLAGS) + (long long)place * n;
}

extern "C" __global__ void peer_sum(
    const STORAGE *x, STORAGE *y, const __grid_constant__ Slots slots, unsigned *turn, const int n, const int rank,
    const int alone)
{
    const unsigned now = *turn + !alone;
    const int half = now % 2 * PEERS;
    if (!alone) {
#pragma unroll
        for (int r = 0; r < PEERS; ++r)
            if (r != rank)
                for (int i = threadIdx.x; i < n; i += blockDim.x) data(slots.of[r], half + rank, n)[i] = x[i];
        __syncthreads();  // all is written
        const int r = threadIdx.x;
        if (r < PEERS && r != rank) {
            publish((unsigned *)slots.of[r] + half + rank, now);
            const unsigned *const flag = (const unsigned *)slots.of[rank] + half + r;
            while (published(flag) != now) {}
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        Real sum = 0;
#pragma unroll
        for (int r = 0; r < PEERS; ++r)
            sum += Real(widen(r == rank ? x[i] : data(slots.of[rank], half + r, n)[i]));
        narrow(y[i], sum);
    }
    __syncthreads();  // all have read the turn
    if (threadIdx.x == 0) *turn = now;
}
