// The sum of the ranks' vectors, for statistics over the batches of all ranks, inside a CUDA graph:
//
//     y[i] = sum_r x_r[i]
//
// x, y (n), of this rank; the ranks are PEERS GPUs of one host, at most 8, which have mapped each
// other's memory (see flat_gradients.cu). slots: memory of each rank for this sum, (2, PEERS, n)
// elements as words. turn (1) uint32 of this rank, 0 at first: the number of turns that are over.
// Vectors are added in the order of the ranks, so all ranks get the same bits.
//
// alone: repeat the last turn with another x. The other ranks take no part in it; the vectors that
// they sent in that turn are used again.
//
// -DPEERS: see above.
//
// Launch: one block, grid 1. No dynamic shared memory.
#include "common.cuh"
#include "peers.cuh"

// A constant of the grid: otherwise an array that is indexed is copied to local memory.
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
