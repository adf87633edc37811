// The random numbers of a training step. Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel
// random numbers: as easy as 1, 2, 3", SC11) makes four words from a key of two words and a counter of
// four, 32 bits each. Key and counter consist of (tests/support/reference.py says the same in
// NumPy):
//
//     key      seed mod 2**32; seed / 2**32
//     counter  i / 4; stream, the layer's number in the step; step mod 2**32; step / 2**32
//
// Element i of an array, in row-major order, takes word i % 4. Dropout keeps it if that word is at
// least `threshold`, which is ratio 2**32 rounded up: it is dropped with probability ratio, up to an
// error of 2**-32.

struct Words {
    unsigned word[4];
};

__device__ inline Words philox(Words counter, unsigned key0, unsigned key1)
{
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long first = 0xD2511F53ull * counter.word[0];
        const unsigned long long second = 0xCD9E8D57ull * counter.word[2];
        counter = {{unsigned(second >> 32) ^ counter.word[1] ^ key0, unsigned(second),
                    unsigned(first >> 32) ^ counter.word[3] ^ key1, unsigned(first)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// The seed and the stream from which one layer draws.
struct Draw {
    unsigned seed_low, seed_high, stream;
};

// The words for elements 4 quad to 4 quad + 3.
__device__ inline Words words_of(const Draw &draw, const unsigned quad, const unsigned long long step)
{
    return philox({{quad, draw.stream, unsigned(step), unsigned(step >> 32)}}, draw.seed_low,
                  draw.seed_high);
}
