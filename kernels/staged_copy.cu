// Copy n quads of 4 bytes from the host's pinned memory, which the GPU reads over the bus:
//
//     to[i] = from[i]
//
// The GPU waits several microseconds for each copy that its copy engine does, between two kernels. Few
// bytes are read in less by a kernel.
//
// Launch: at least n threads; a thread owns a quad.
#include "common.cuh"

struct alignas(16) Quad {
    unsigned word[4];
};

extern "C" __global__ void staged_copy(const Quad *from, Quad *to, const int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}
