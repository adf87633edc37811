// Declarations that engine.cpp (arrays, launches) shares with fibers.cpp or threads.cpp (threads of
// a block).
#pragma once

#include "cuda_on_cpu.h"

#include <string>
#include <vector>

const unsigned char POISON = 0xFF;  // a NaN in every floating dtype, -1 as an integer

inline std::vector<unsigned char> shared_memory;  // dynamic, of the block that runs

// Run the threads of one block; return false after a fail().
bool run_block(unsigned block, bool reversed, void (*thread)(void *), void *context);

// Prepare a grid before its first block, and clean up after its last.
void begin_grid();
void end_grid();

// Record a fault. fail() is called by a thread of a block, and does not return to it.
void record(const std::string &message);
[[noreturn]] void fail(const std::string &message);

inline unsigned this_thread()
{
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

inline unsigned lane_of(unsigned mask)
{
    const unsigned lane = this_thread() % 32;
    if (!(mask >> lane & 1)) fail("shuffle: the mask leaves out the lane that calls");
    return lane;
}

inline void place_thread(unsigned thread)
{
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y,
                 thread / blockDim.x / blockDim.y};
}

inline void place_block(unsigned block)
{
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
}
