// Copies from global to shared memory that go on while the thread continues, where the GPU has them.

// Copy a vector; it is there once the thread has waited for its copies, and for others after a barrier.
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
