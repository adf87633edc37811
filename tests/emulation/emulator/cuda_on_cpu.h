// CUDA for g++ and the CPU, as far as this project's kernels use it, and launch(). README.md
// describes how a kernel runs, and which faults a run can show.
#pragma once

#include <cstddef>
#include <cstring>

// Functions of <cmath>, which takes longer to parse than a kernel takes to compile.
extern "C" double exp(double), log1p(double), sqrt(double), tanh(double);
inline float exp(float x) { return __builtin_expf(x); }
inline float log1p(float x) { return __builtin_log1pf(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }


inline bool signbit(double x) { return __builtin_signbit(x); }
inline float copysign(float x, float sign) { return __builtin_copysignf(x, sign); }
inline double copysign(double x, double sign) { return __builtin_copysign(x, sign); }

inline float __int_as_float(int bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

#define __global__
#define __device__
#define __launch_bounds__(...)
// Static, because blocks run one after the other. AddressSanitizer does not watch variables in a
// section.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static __attribute__((section("cuda_shared")))
#endif
// With OS_THREADS each CUDA thread is a thread of the operating system, not a coroutine.
#ifdef OS_THREADS
#define PER_THREAD thread_local
#else
#define PER_THREAD
#endif

struct Dimensions { unsigned x, y, z; };

#pragma GCC visibility push(default)  // names that the engine defines

extern PER_THREAD Dimensions threadIdx, blockIdx;
extern Dimensions blockDim, gridDim;

void __syncthreads();
void __syncwarp(unsigned mask = ~0u);

// Dynamic shared memory of the block, for `extern __shared__`.
void *dynamic_shared();

// Meet the other lanes of a mask; return the argument of every lane of the warp.
const unsigned long long *exchange(unsigned mask, unsigned long long bits);

// Tell the engine that several blocks may change the value at this address.
void note_atomic(const void *address);

// Return the lane `delta` away among `width` neighbours, or the calling lane if that lies outside of
// them; fail unless the mask has it.
unsigned neighbour(unsigned mask, int delta, int width);

// Make an argument of the launch from its text: a number as digits; an array or an
// address, see engine.cpp; a struct as "ARRAY,OFFSET@ARRAY,...": its bytes, and the pointers in it.
long long integer(const char *text);
double real(const char *text);
void *array(const char *text);
void structure(const char *text, void *value, std::size_t size);

struct Grid {
    char **argv;  // grid and block (six numbers), bytes of dynamic shared memory, arguments
    void (*thread)(void *);
    void *context;
    unsigned char *static_shared, *static_shared_end;  // all such variables of the kernel
};

// Run all threads of a grid; return a description of the fault, or null.
const char *run_grid(const Grid &grid);

#pragma GCC visibility pop

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

template <typename T> void __stcs(T *address, T value) { *address = value; }
template <typename T> T __ldg(const T *address) { return *address; }

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

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32)
{
    const int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
    return shuffle(mask, value, (lane ^ bits) - lane, width);
}

template <typename T> T __shfl_sync(unsigned mask, T value, int source, int width = 32)
{
    const int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
    return shuffle(mask, value, (lane / width * width + source) - lane, width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    const unsigned long long *const all = exchange(mask, predicate != 0);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && all[lane]) votes |= 1u << lane;
    return votes;
}

template <typename T> unsigned __match_any_sync(unsigned mask, T value)
{
    const unsigned long long bits = bits_of(value), *const all = exchange(mask, bits);
    unsigned equal = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && all[lane] == bits) equal |= 1u << lane;
    return equal;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Without std::atomic_ref, which C++17 lacks. Blocks do not run at the same time.
template <typename T> T atomicAdd(T *address, T value)
{
    note_atomic(address);
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do
        after = before + value;
    while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
    return before;
}

template <typename T> struct Converted {
    static T of(const char *text)
    {
        if constexpr (__is_class(T)) {
            T value;
            structure(text, &value, sizeof(value));
            return value;
        } else {
            return T(integer(text));
        }
    }
};
template <> struct Converted<float> {
    static float of(const char *text) { return float(real(text)); }
};
template <> struct Converted<double> {
    static double of(const char *text) { return real(text); }
};
template <typename T> struct Converted<T *> {
    static T *of(const char *text) { return static_cast<T *>(array(text)); }
};

// The linker defines these names for the borders of a section.
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_cuda_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_cuda_shared[];

struct Launch {
    const char *report;

    template <typename... Types> Launch(char **argv, void (*kernel)(Types...), Types... arguments)
    {
        auto thread = [&] { kernel(arguments...); };
        report = run_grid({argv, [](void *context) { (*static_cast<decltype(thread) *>(context))(); },
                           &thread, __start_cuda_shared, __stop_cuda_shared});
    }
};

template <typename... Types> const char *launch(void (*kernel)(Types...), char **argv)
{
    char **word = argv + 7;
    return Launch{argv, kernel, Converted<Types>::of(*word++)...}.report;  // braces: left to right
}
