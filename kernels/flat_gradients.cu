// The gradients g_p of all parameters p as parts of one array, which the ranks of a run add up:
//
//     PACK=1:  flat[offset_p + i] = n_molecules g_p[i],  flat[n] = n_molecules,
//              flat[n + 1 + r] = 1 if r is this rank and its loss is not finite, else 0
//     PACK=0:  g_p[i] = flat[offset_p + i] / flat[n], or 0 if a loss was not finite,
//              is_bad[r] = 1 if that of rank r was not
//
// The second is for the sum over ranks of what the first has written; r < n_ranks. flat
// (n + 1 + n_ranks), arithmetic in its arithmetic dtype; loss () of another dtype; is_bad (n_ranks) may
// be memory of the host. Every element has one owner: deterministic, no atomics.
//
// table, passed by value: the parameters of this launch, whose gradients are C-contiguous arrays of
// `size` elements, in chunks of CHUNK elements: [first_chunk, that of the next), none for an empty one.
// Launches for further tables pass no loss and no is_bad: the first has written what is not of a
// parameter.
//
// -DPACK: see above. -DFLAT, -DLOSS: dtypes. -DN_PARAMETERS: how many a table has room for.
// -DTABLE_BYTES: its size on the host.
//
// Launch: block (THREADS), grid (n_chunks, at least 1). No dynamic shared memory.
#include "common.cuh"

const int THREADS = 256;
const int EACH = 4;  // elements of a chunk that a thread owns
const int CHUNK = THREADS * EACH;

using Sum = Arithmetic<FLAT>::type;

struct Parameter {
    STORAGE *grad;
    int offset, size, first_chunk, unused;
};

struct Table {
    Parameter parameter[N_PARAMETERS];
    int n_parameters, unused;
};
static_assert(sizeof(Table) == TABLE_BYTES, "the host has the same layout");

// Two blocks at once, at least: otherwise the compiler spills the calls of double division.
extern "C" __global__ void __launch_bounds__(256, 2) flat_gradients(
    const Table table, FLAT *__restrict__ flat, const LOSS *__restrict__ loss,
    int *__restrict__ is_bad, const int n, const int n_ranks, const int rank, const int n_molecules)
{
    const int chunk = blockIdx.x;
    int low = 0, high = table.n_parameters - 1;  // the last one that begins at or before the chunk
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.parameter[middle].first_chunk <= chunk) low = middle; else high = middle - 1;
    }
    const Parameter &parameter = table.parameter[low];
    STORAGE *const grad = parameter.grad;
    FLAT *const part = flat + parameter.offset;
    FLAT *const flags = flat + n + 1;
    const int first = (chunk - parameter.first_chunk) * CHUNK + threadIdx.x;
    if (PACK) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = first + e * THREADS;
            if (i < parameter.size) narrow(part[i], Sum(n_molecules) * Sum(widen(grad[i])));
        }
        if (chunk == 0 && loss) {
            const auto value = widen(*loss);
            const bool is_finite = value - value == 0;
            if (threadIdx.x == 0) narrow(flat[n], Sum(n_molecules));
            for (int r = threadIdx.x; r < n_ranks; r += THREADS)
                narrow(flags[r], Sum(r == rank && !is_finite));
        }
    } else {
        const Sum total = widen(flat[n]);
        bool are_finite = true;
        for (int r = 0; r < n_ranks; ++r) are_finite = are_finite && widen(flags[r]) == 0;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = first + e * THREADS;
            if (i < parameter.size)
                narrow(grad[i], Real(are_finite ? Sum(widen(part[i])) / total : Sum(0)));
        }
        if (chunk == 0 && is_bad && !are_finite)
            for (int r = threadIdx.x; r < n_ranks; r += THREADS)
                if (widen(flags[r]) != 0) is_bad[r] = 1;
    }
}
