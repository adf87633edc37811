// The units in which a thread reads shared memory, and copies from global to shared memory, which run
// while the thread continues if the GPU supports that.

struct alignas(16) Quad {
    Real element[4];
};

// A vector in the dtype of the arithmetic.
struct alignas(sizeof(Real) * VECTOR) Piece {
    Real element[VECTOR];
};

// Copy a vector. This thread can read it once it has waited for its copies, other threads after a barrier
// that follows.
__device__ inline void bring(Real *to, const STORAGE *from)
{
#if __CUDA_ARCH__ >= 800
    if (sizeof(STORAGE) == sizeof(Real)) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
                     "l"(from), "n"(sizeof(Vector))
                     : "memory");
        return;
    }
#endif
    const Vector vector = *reinterpret_cast<const Vector *>(from);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) to[e] = widen(vector.element[e]);
}

__device__ inline void wait_for_copies()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// End a group of copies, which is waited for as a whole.
__device__ inline void sent()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for all groups but the last `later` of them.
template <int later> __device__ inline void arrived()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(later) : "memory");
#endif
}
