// The end of a layer: activation and dropout of its sums, and what they make of a gradient.
//
// Dropout, after a rectifier or the identity: an element is kept where random.cuh says so, times scale.
// After a rectifier, elements that were dropped are 0 in y, which is how the gradient knows; after the
// identity they are -0, and no other element is.
//
// -DACTIVATION=IDENTITY, RELU, TANH or SIGMOID. -DDROPOUT=1, with the first two.
#define IDENTITY 0
#define RELU 1
#define TANH 2
#define SIGMOID 3

__device__ inline Real activated(const Real value)
{
#if ACTIVATION == RELU
    return value <= 0 ? 0 : value;  // NaN stays
#elif ACTIVATION == TANH
    return tanh(value);
#elif ACTIVATION == SIGMOID
    return tanh(value * Real(0.5)) * Real(0.5) + Real(0.5);
#elif ACTIVATION == IDENTITY
    return value;
#else
#error ACTIVATION
#endif
}

// An element after dropout, of the word that was drawn for it.
__device__ inline Real dropped(
    const Real result, const unsigned word, const unsigned threshold, const Real scale)
{
    STORAGE rounded;  // as where dropout is another kernel
    narrow(rounded, result);
    Real value = widen(rounded);
    value *= word >= threshold ? scale : Real(0);
    if (ACTIVATION == IDENTITY) {
        value += Real(0);  // -0 becomes 0
        if (word < threshold) value = copysign(value, Real(-1));
    }
    return value;
}

// Word `index` of four. An index that is known only when the kernel runs would put them into memory.
__device__ inline unsigned word_of(const unsigned (&word)[4], const int index)
{
    return index == 0 ? word[0] : index == 1 ? word[1] : index == 2 ? word[2] : word[3];
}

// The gradient with respect to the sums, of the one with respect to an element and its value y.
__device__ inline Real before(const Real gradient, const Real y, const Real scale)
{
#if ACTIVATION == RELU
    return y > 0 ? (DROPOUT ? gradient * scale : gradient) : 0;
#elif ACTIVATION == TANH
    return gradient * (1 - y * y);
#elif ACTIVATION == SIGMOID
    return gradient * y * (1 - y);
#elif DROPOUT
    return y == 0 && signbit(y) ? 0 : gradient * scale;
#else
    return gradient;
#endif
}
