// Copy the next of several slots of n quads of 4 words from the host's pinned memory, which the GPU reads
// over the bus:
//
//     to[i] = slots[position[0] % n_slots][i], then position[0] += 1
//
// The GPU waits several microseconds for each copy that its copy engine does, between two kernels. Few
// bytes are read in less by a kernel, which a CUDA graph can hold: the position (1) uint32 is in device
// memory, so that each launch of the graph takes another slot.
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
