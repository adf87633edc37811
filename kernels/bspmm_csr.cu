// Y = A X (+ R) for a batch of sparse matrices as one block-diagonal CSR matrix:
//
//     y[i, :] = r[i, :] + sum over k in [indptr[i], indptr[i + 1]) of value(k) * x[indices[k], :]
//
// Source: row-wise CSR of Batched SpMM (Nagasaka, Nukada, Kojima, Matsuoka 2019, section 3). Unlike
// there, a thread owns vectors of a row and keeps their sums in registers, not in shared memory, and
// offsets into the whole batch replace tables of pointers.
//
// indptr (n_rows + 1) int32, indices (nnz) int32, data (nnz), order (nnz) int32, x (n_cols, n_B),
// residual (n_rows, n_B), y (n_rows, n_B); n_B = n_vectors * VECTOR.
// Empty rows give the residual or 0. Entries of a row are added to the residual in their order:
// deterministic, no atomics. y is written once and never read; it must not overlap the inputs.
//
// -DPIECES=1: the threads of a row of more than `piece` entries treat it as empty. Other threads walk
// it in pieces, and leave sums for kernels/sum_pieces.cu: partial (n_pieces, n_B) of the arithmetic
// dtype, begun (n_pieces / 2) int32; see pieces.cuh. Without it the kernel does not take these
// arguments. Not together with PIPELINED.
//
// -DWEIGHTS=0: value(k) = 1, data and order are not read.
// -DWEIGHTS=1: value(k) = data[k], order is not read.
// -DWEIGHTS=2: value(k) = data[order[k]], the values of a matrix seen through its transpose.
// -DAHEAD=n: entries whose loads are issued before the first is used. Molecules have two to four per
//     row, so one round usually suffices and its latency is paid once.
// -DCOLUMNS=n: vectors of a row that a thread owns, blockDim.x apart: it reads A once for all of them.
// -DPIPELINED=1: a thread has several rows, and loads the entries of the next one before it uses those
//     of the current one, so that it waits only for gathers of x; 0: it has one row.
// -DRESIDUAL=1: residual is added; 0: it is not read, and may be null.
// -DSTREAM=1: write y past the L2 cache, for a y so large that it would evict x.
// -DOFFSET=unsigned: x and y have fewer than 2^32 vectors; size_t: any number.
//
// Launch: block (columns, rows), grid (row blocks, y, z) with at least ceil(n_vectors / (columns *
// COLUMNS)) blocks in y and z together, and row_blocks * rows * rows_per_thread >= n_rows (< 2^31;
// rows_per_thread is 1 unless PIPELINED). Thread (x, y) of block (b, t) owns the rows
// (b * rows_per_thread + i) * rows + y and the vectors (t * COLUMNS + j) * columns + x. With PIECES,
// ceil(n_pieces / rows) more blocks come first in x, so that long walks begin early. No shared memory.
#include "common.cuh"
#include "pieces.cuh"

#if PIECES && PIPELINED
#error "expected PIECES or PIPELINED, got both"
#endif

struct Entries {
    int column[AHEAD];
    Real value[AHEAD];
};

// Load the entries from k on. Past the end of the row its last entry is loaded again, because
// conditional loads would be issued one by one, each after the previous one was used.
__device__ inline void load(
    Entries &entries, const int k, const int left, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const int *__restrict__ order)
{
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        const int at = k + (left - 1 < u ? left - 1 : u);
        entries.column[u] = indices[at];
#if WEIGHTS == 0
        entries.value[u] = 1;
#elif WEIGHTS == 1
        entries.value[u] = widen(data[at]);
#else
        entries.value[u] = widen(data[order[at]]);
#endif
    }
}

// Whether a thread's vector j lies in the row.
#define OWNS(j) (j == 0 || c + j * blockDim.x < n_vectors)

__device__ inline void gather(
    Vector (&gathered)[AHEAD][COLUMNS], const Entries &entries, const int left,
    const Vector *__restrict__ x, const unsigned c, const unsigned n_vectors)
{
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (u < left && OWNS(j))
                gathered[u][j] = x[(OFFSET)entries.column[u] * n_vectors + (c + j * blockDim.x)];
}

__device__ inline void add(
    Real (&sum)[COLUMNS][VECTOR], const Entries &entries, const int left,
    const Vector (&gathered)[AHEAD][COLUMNS], const unsigned c, const unsigned n_vectors)
{
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (u < left && OWNS(j))
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    sum[j][e] += entries.value[u] * widen(gathered[u][j].element[e]);
}

// Add the entries from k on. They are loaded into the caller's variables, because separate ones would
// take more registers.
__device__ inline void walk(
    Real (&sum)[COLUMNS][VECTOR], Entries &entries, Vector (&gathered)[AHEAD][COLUMNS], int k,
    int left, const int *__restrict__ indices, const STORAGE *__restrict__ data,
    const int *__restrict__ order, const Vector *__restrict__ x, const unsigned c,
    const unsigned n_vectors)
{
#pragma unroll 1
    for (; left > 0; k += AHEAD, left -= AHEAD) {
        load(entries, k, left, indices, data, order);
        gather(gathered, entries, left, x, c, n_vectors);
        add(sum, entries, left, gathered, c, n_vectors);
    }
}

extern "C" __global__ void bspmm_csr(
    const int *__restrict__ indptr, const int *__restrict__ indices,
    const STORAGE *__restrict__ data, const int *__restrict__ order,
    const Vector *__restrict__ x, const Vector *__restrict__ residual, Vector *__restrict__ y,
#if PIECES
    Wide *__restrict__ partial, int *__restrict__ begun,
#endif
    const unsigned n_rows, const unsigned n_vectors, const unsigned rows_per_thread
#if PIECES
    , const int piece, const unsigned n_pieces
#endif
    )
{
    const unsigned step = blockDim.y;
#if PIECES
    const unsigned piece_blocks = (n_pieces + step - 1) / step;
    const unsigned block = blockIdx.x - piece_blocks;
#else
    const unsigned block = blockIdx.x;
#endif
    unsigned row = block * step * rows_per_thread + threadIdx.y;
    const unsigned tile = blockIdx.z * gridDim.y + blockIdx.y;
    const unsigned c = tile * blockDim.x * COLUMNS + threadIdx.x;
    Entries entries;
    Vector gathered[AHEAD][COLUMNS];
#if PIECES
    if (blockIdx.x < piece_blocks) {
        const unsigned number = blockIdx.x * step + threadIdx.y;
        if (number >= n_pieces || c >= n_vectors) return;
        const RowPiece of_row = piece_of(indptr, n_rows, number, piece);
        if (number % 2 && c == 0) begun[number / 2] = of_row.row;
        if (of_row.row < 0) return;
        Real sum[COLUMNS][VECTOR] = {};
        const int k = of_row.begin, left = of_row.end - k;
        walk(sum, entries, gathered, k, left, indices, data, order, x, c, n_vectors);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (OWNS(j)) {
                Wide total;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) total.element[e] = sum[j][e];
                partial[(size_t)number * n_vectors + (c + j * blockDim.x)] = total;
            }
        return;
    }
#endif
    if (row >= n_rows || c >= n_vectors) return;
    indptr += row;
    int k = indptr[0], left = indptr[1] - k;
#if PIECES
    if (left > piece) left = 0;
#endif
#if PIPELINED
    const unsigned after = (block + 1) * step * rows_per_thread;
    const unsigned stop = after < n_rows ? after : n_rows;
    int next_k = 0, next_left = 0;
    if (row + step < stop) {
        next_k = indptr[step];
        next_left = indptr[step + 1] - next_k;
    }
    if (left > 0) load(entries, k, left, indices, data, order);
    for (;;) {
#endif
        Real sum[COLUMNS][VECTOR] = {};
#if RESIDUAL
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (OWNS(j)) {
                const Vector added = residual[(OFFSET)row * n_vectors + (c + j * blockDim.x)];
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum[j][e] = widen(added.element[e]);
            }
#endif
#if PIPELINED
        // These loads come before the gathers: after them, they would be too late for the next row.
        int later_k = 0, later_end = 0;
        if (row + 2 * step < stop) {
            later_k = indptr[2 * step];
            later_end = indptr[2 * step + 1];
        }
        Entries next;
        if (next_left > 0) load(next, next_k, next_left, indices, data, order);
        gather(gathered, entries, left, x, c, n_vectors);
        add(sum, entries, left, gathered, c, n_vectors);
        k += AHEAD;
        left -= AHEAD;
#endif
        walk(sum, entries, gathered, k, left, indices, data, order, x, c, n_vectors);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (OWNS(j)) {
                Vector result;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) narrow(result.element[e], sum[j][e]);
                store<STREAM>(y + ((OFFSET)row * n_vectors + (c + j * blockDim.x)), result);
            }
#if PIPELINED
        row += step;
        if (row >= stop) return;
        indptr += step;
        entries = next;
        k = next_k, left = next_left;
        next_k = later_k, next_left = later_end - later_k;
    }
#endif
}
