// Rows that LANES lanes of a warp share: blocks (LANES, rows), LANES * rows a multiple of 32.

static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "LANES divides a warp");

// The lanes that share the thread's row, as a mask of its warp.
__device__ inline unsigned lanes_of_row()
{
    const unsigned lane = (threadIdx.y * LANES + threadIdx.x) % 32;
    return (LANES == 32 ? ~0u : (1u << (LANES % 32)) - 1u) << (lane - threadIdx.x);
}

// The sum over the lanes of a row; every lane gets it.
__device__ inline Real over_lanes(const unsigned group, Real sum)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(group, sum, step, LANES);
    return sum;
}
