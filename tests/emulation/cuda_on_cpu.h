// Lets g++ compile a CUDA source for the CPU: what the source expects of CUDA, as far as this
// project's kernels need it, and launch() for the main() that is put behind it. cuda_on_cpu.cpp
// says how it runs.
#pragma once

#include <cstdlib>
#include <cstring>
#include <math.h>  // exp of every type, in no namespace
#include <string>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct Dimensions { unsigned x, y, z; };
inline thread_local Dimensions threadIdx, blockIdx;
inline Dimensions blockDim, gridDim;
inline unsigned dynamic_shared_bytes;

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

template <typename T> void __stcs(T *address, T value) { *address = value; }
template <typename T> T __ldg(const T *address) { return *address; }

void __syncthreads();

// What `extern __shared__` names: the block's dynamic shared memory, as large as the launch says.
void *dynamic_shared();

// Meet the other lanes of a mask; return what every lane of the warp brought to this call.
const unsigned long long *exchange(unsigned mask, unsigned long long bits);

// Return the lane `delta` away among `width` neighbours, or the lane that calls where they end; fail
// unless the mask has it.
unsigned neighbour(unsigned mask, int delta, int width);

template <typename T> unsigned long long bits_of(T value)
{
    unsigned long long bits = 0;
    static_assert(sizeof(value) <= sizeof(bits), "an exchanged value has at most 8 bytes");
    std::memcpy(&bits, &value, sizeof(value));
    return bits;
}

template <typename T> T shuffle(unsigned mask, T value, int delta, int width)
{
    const unsigned source = neighbour(mask, delta, width);
    std::memcpy(&value, exchange(mask, bits_of(value)) + source, sizeof(value));
    return value;
}

template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    return shuffle(mask, value, int(delta), width);
}

template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    return shuffle(mask, value, -int(delta), width);
}

template <typename T> unsigned __match_any_sync(unsigned mask, T value)
{
    const unsigned long long bits = bits_of(value), *const all = exchange(mask, bits);
    unsigned equal = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && all[lane] == bits) equal |= 1u << lane;
    return equal;
}

inline void __syncwarp(unsigned mask = ~0u) { exchange(mask, 0); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Not by std::atomic_ref, which C++17 lacks; threads of a block meet here, blocks never do.
template <typename T> T atomicAdd(T *address, T value)
{
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do
        after = before + value;
    while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
    return before;
}

void *load(const char *argument);
void run_grid(void (*thread)(void *), void *context);

// One argument of the kernel, converted to whatever type the kernel wants.
struct Argument {
    const char *text;
    operator int() const { return std::atoi(text); }
    operator unsigned() const { return std::strtoul(text, nullptr, 10); }
    operator float() const { return float(std::atof(text)); }
    operator double() const { return std::atof(text); }
    template <typename T> operator T *() const { return static_cast<T *>(load(text)); }
};

// One argument, of whatever type. A struct is "ARRAY,OFFSET@ARRAY,...": its bytes, then the pointers
// in it with their offsets.
template <typename T> T converted(const char *argument)
{
    if constexpr (std::is_class<T>::value) {
        T value;
        std::string text = argument;
        std::size_t comma = text.find(',');
        std::memcpy(&value, load(text.substr(0, comma).c_str()), sizeof(value));
        while (comma != std::string::npos) {
            text = text.substr(comma + 1);
            comma = text.find(',');
            const std::size_t at = text.find('@');
            void *const pointer = load(text.substr(at + 1, comma - at - 1).c_str());
            std::memcpy(reinterpret_cast<char *>(&value) + std::stoul(text), &pointer,
                        sizeof(pointer));
        }
        return value;
    } else {
        return static_cast<T>(Argument{argument});
    }
}

// Run a kernel. argv: the program, grid and block (six numbers), bytes of dynamic shared memory, then
// the kernel's arguments: a number as digits; null as "null"; an array as "SHIFT:FILE", see load(); a
// struct as converted() says.
template <typename... Types> int launch(void (*kernel)(Types...), char **argv)
{
    unsigned *const sizes[] = {&gridDim.x, &gridDim.y, &gridDim.z,
                               &blockDim.x, &blockDim.y, &blockDim.z, &dynamic_shared_bytes};
    for (unsigned *size : sizes) *size = std::atoi(*++argv);
    struct Call {
        void (*kernel)(Types...);
        std::tuple<Types...> arguments;  // braces: converted from left to right
    } call{kernel, std::tuple<Types...>{converted<Types>(*++argv)...}};
    run_grid([](void *context) {
        std::apply(static_cast<Call *>(context)->kernel, static_cast<Call *>(context)->arguments);
    }, &call);
    return 0;
}
