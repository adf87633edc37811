// The sum of a vector of every rank, for statistics of all batches, inside of a CUDA graph:
//
//     y[i] = sum_r x_r[i]
//
// x, y (n), of this rank; the ranks are PEERS GPUs of one host, at most 8, which have mapped each other's memory
// (see flat_gradients.cu). slots: that of each rank for this sum, (2, PEERS, n) elements as words. turn (1) uint32 of
// this rank, 0 at first: how many turns are over. Added up in the order of the ranks: all get the same bits.
//
// alone: the last turn once more, with another x and without the other ranks, which do not notice.
//
// -DPEERS: see above.
//
// Launch: one block, grid 1. No dynamic shared memory.
#include "common.cuh"
#include "peers.cuh"

// A constant of the grid: a copy of what is indexed would be in local memory.
struct Slots {
    PeerWord *of[PEERS];
};

extern "C" __global__ void peer_sum(
    const STORAGE *__restrict__ x, STORAGE *__restrict__ y, const __grid_constant__ Slots slots, unsigned *turn,
    const int n, const int rank, const int alone)
{
    const unsigned now = *turn + !alone;
    const int half = now % 2 * PEERS;
    const long long stride = (long long)n * words_of<STORAGE>();
    for (int i = threadIdx.x; i < n && !alone; i += blockDim.x)
#pragma unroll
        for (int r = 0; r < PEERS; ++r)
            if (r != rank) send(slots.of[r] + (half + rank) * stride, i, x[i], now);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        Real sum = 0;
#pragma unroll
        for (int r = 0; r < PEERS; ++r) {
            STORAGE value = x[i];
            while (r != rank && !receive(slots.of[rank] + (half + r) * stride, i, now, value)) {}
            sum += Real(widen(value));
        }
        narrow(y[i], sum);
    }
    __syncthreads();  // all have read the turn
    if (threadIdx.x == 0) *turn = now;
}
