// Copy the next of several slots, each of n quads of 4 words, from pinned memory of the host, which the
// GPU reads over the bus:
//
//     to[i] = slots[position[0] % n_slots][i], then position[0] += 1
//
// A copy by the copy engine between two kernels makes the GPU wait for several microseconds. A kernel
// reads few bytes in less time, and a CUDA graph can hold it: the position (1) uint32 is in device memory,
// so that each launch of the graph takes another slot.
//
// Launch: one block; n_slots is a power of two, so that the position may overflow.
#include "common.cuh"

struct alignas(16) Quad {
    unsigned word[4];
};

extern "C" __global__ void staged_copy(
    const Quad *slots, Quad *to, const int n, const int n_slots, unsigned *position)
{
    const unsigned now = *position;
    const Quad *const from = slots + (long long)(now % n_slots) * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
    __syncthreads();  // all have read the position
    if (threadIdx.x == 0) *position = now + 1;
}
