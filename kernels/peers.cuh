// What kernels need that write to the memory of other GPUs and wait for what those write here.
#pragma once

#ifndef __CUDACC__  // on a host, where ranks share the cores
#include <sched.h>
#define __grid_constant__
#endif

// What this thread has written before, and others of its block before a barrier, is there for a thread of
// any GPU that has read this value.
__device__ inline void publish(unsigned *flag, const unsigned value)
{
#if __CUDA_ARCH__
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#else
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

__device__ inline unsigned published(const unsigned *flag)
{
#if __CUDA_ARCH__
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
#else
    sched_yield();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}
