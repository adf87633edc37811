// Functions by which kernels send numbers to other GPUs, and receive numbers from them.
#pragma once

#ifndef __CUDACC__  // on a host, where ranks share the cores
#include <sched.h>
#include <string.h>
#define __grid_constant__
#endif

// 32 bits and the number of the turn in which they are sent. Both arrive at once, so a receiver
// need not wait until earlier writes are visible.
using PeerWord = unsigned long long;

template <typename T> __device__ constexpr int words_of() { return (sizeof(T) + 3) / 4; }

__device__ inline void store_word(PeerWord *const to, const PeerWord word)
{
#if __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
#else
    __atomic_store_n(to, word, __ATOMIC_RELAXED);
#endif
}

__device__ inline PeerWord load_word(const PeerWord *const from)
{
#if __CUDA_ARCH__
    PeerWord word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
#else
    return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

// Send element i to the memory of another GPU.
template <typename T> __device__ inline void send(PeerWord *const to, const int i, const T value, const unsigned turn)
{
    unsigned bits[words_of<T>()] = {};
    memcpy(bits, &value, sizeof(T));
#pragma unroll
    for (int w = 0; w < words_of<T>(); ++w)
        store_word(to + (long long)i * words_of<T>() + w, PeerWord(turn) << 32 | bits[w]);
}

// Return whether element i of a turn has arrived; if so, `value` is this element.
template <typename T>
__device__ inline bool receive(const PeerWord *const from, const int i, const unsigned turn, T &value)
{
    unsigned bits[words_of<T>()];
    bool is_here = true;
#pragma unroll
    for (int w = 0; w < words_of<T>(); ++w) {
        const PeerWord word = load_word(from + (long long)i * words_of<T>() + w);
        bits[w] = unsigned(word);
        is_here = is_here && unsigned(word >> 32) == turn;
    }
    memcpy(&value, bits, sizeof(T));
#if !__CUDA_ARCH__
    if (!is_here) sched_yield();
#endif
    return is_here;
}
