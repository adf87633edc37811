// The end of a layer: activation and dropout of its sums, and the gradient before both.
//
// Dropout, after a rectifier or the identity: an element is kept where random.cuh says so, times scale.
// The gradient recognises dropped elements by their value in y: after a rectifier they are 0, after
// the identity they are -0, and no other element is -0.
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
#error "ACTIVATION: expected IDENTITY, RELU, TANH or SIGMOID"
#endif
}

// An element after dropout, for which `word` was drawn.
__device__ inline Real dropped(
    const Real result, const unsigned word, const unsigned threshold, const Real scale)
{
    STORAGE rounded;  // the result is rounded as if dropout were a separate kernel
    narrow(rounded, result);
    Real value = widen(rounded);
    value *= word >= threshold ? scale : Real(0);
    if (ACTIVATION == IDENTITY) {
        value += Real(0);  // -0 becomes 0
        if (word < threshold) value = copysign(value, Real(-1));
    }
    return value;
}

// Word `index` of four. To index the array by a number that is known only at run time would put it
// into local memory.
__device__ inline unsigned word_of(const unsigned (&word)[4], const int index)
{
    return index == 0 ? word[0] : index == 1 ? word[1] : index == 2 ? word[2] : word[3];
}

// The gradient with respect to a sum, given the gradient with respect to y, and y itself.
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
