// Definitions that all kernels share. Every kernel file is compiled with
//   -DSTORAGE=__half | float | double   dtype of the arrays in memory
//   -DVECTOR=n                          elements that a thread moves at once (a power of two)
// Arithmetic is float for __half and float storage, double for double. All arrays are C-contiguous;
// feature matrices are rows of n_vectors vectors, aligned to a vector. Row and entry counts fit in
// 31 bits; products of them with a width do not, so offsets are 64-bit.

#include <cuda_fp16.h>

template <typename T> struct Arithmetic { using type = float; };
template <> struct Arithmetic<double> { using type = double; };

using Real = Arithmetic<STORAGE>::type;

__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

__device__ inline void narrow(__half &to, float value) { to = __float2half_rn(value); }
__device__ inline void narrow(float &to, float value) { to = value; }
__device__ inline void narrow(double &to, double value) { to = value; }

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// One vector of a feature matrix: its alignment makes the compiler load and store it at once.
struct alignas(sizeof(STORAGE) * VECTOR) Vector {
    STORAGE element[VECTOR];
};

// A vector in the arithmetic dtype, before it is rounded.
struct alignas(sizeof(Real) * VECTOR < 16 ? sizeof(Real) * VECTOR : 16) Wide {
    Real element[VECTOR];
};

static_assert((VECTOR & (VECTOR - 1)) == 0, "VECTOR is a power of two");
static_assert(sizeof(Vector) <= 16, "no load is wider than 16 bytes");

// A machine word as wide as a vector: stores of whole vectors go through it.
template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// Write a vector; past_cache: as data that will not be read soon, which L2 evicts first.
template <bool past_cache> __device__ inline void store(Vector *to, const Vector &vector)
{
    using Bits = Word<sizeof(Vector)>::type;
    if (past_cache)
        __stcs(reinterpret_cast<Bits *>(to), reinterpret_cast<const Bits &>(vector));
    else
        *to = vector;
}

// The segment that holds a row: the last segment that starts at or before this row, because empty
// segments before that one may start there, too. n_segments if the row lies past all of them.
// offsets: (n_segments + 1).
__device__ inline int segment_of(const int *offsets, int n_segments, int row)
{
    int low = 0, high = n_segments;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (offsets[middle + 1] <= row) low = middle + 1; else high = middle;
    }
    return low;
}
