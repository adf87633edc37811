// Gather a packed or folded batch from the molecules of a data set, into arrays that may be larger:
//
//     graph g is molecule m = index[g], which owns the nodes [starts[m], starts[m + 1]) of the set and
//     the entries [entry_starts[m], entry_starts[m + 1])
//     row_offsets[g] = sum of the sizes of the graphs before g,  col_offsets = row_offsets * n_relations
//     out_indptr[i] = entries in the rows before row i
//     out_indices[k] = col_offsets[g] + columns[entry of the set]
//     out_atoms, out_data, out_labels: the bytes of the molecule's nodes, entries and labels
//
// index (n_graphs) int32, each in [0, M), in any order, possibly several times; starts,
// entry_starts (M + 1) int64; row_starts (nodes of the set) int32, the entries of the molecule in the
// rows before this one; columns (entries of the set) int32, counted from the molecule's first column.
// atoms, data, labels are of any dtype: atom_bytes per node, data_bytes per entry (0, with null pointers:
// all ones), label_bytes per molecule (0, with null pointers: there is no such label).
// row_offsets, col_offsets (n_graphs + 1), out_indptr (n_rows + 1), out_indices (nnz) int32; out_atoms
// n_rows * atom_bytes, out_data nnz * data_bytes, out_labels n_graphs * label_bytes.
// n_rows and nnz are at least the sums of the sizes. The rest of the arrays is filled: indptr with the
// number of entries, everything else with 0. So every element is written, once. No atomics on global
// memory: the result does not depend on timing. Nothing is checked.
//
// -DFOLDED=1: the folded layout. Every graph has one row more than the molecule has nodes, with atom 0
// and no entries; it stands for the padding of a padded batch. Row offsets count it. out_weights
// (n_rows) float32: 1 for a node, max(padded_to - nodes, 0) for the row after a molecule's nodes, 0 for
// spare rows. padded_to (1) int32 is on the device because it changes between replays of a captured
// launch.
// -DFOLDED=0: the packed layout, without this row and out_weights.
//
// -DLABELS_ONLY=1: only the labels, for a data set that has more than two columns of them.
//
// Launch: block (warps * 32) of at most 16 warps, grid (ceil(n_graphs / graphs_per_block)),
// n_graphs >= 1. A block owns graphs_per_block graphs; its warps take them in turn. So that one launch
// suffices, every block adds up all sizes: it reads index and tables once, from the L2 cache. The data
// of a graph is loaded before any of it is stored, because the kernel's time is spent waiting for loads.
#include "common.cuh"

struct Sizes {
    int rows, entries;
};

__device__ inline Sizes sizes_of(
    const int molecule, const long long *__restrict__ starts,
    const long long *__restrict__ entry_starts)
{
    return {int(starts[molecule + 1] - starts[molecule]) + FOLDED,
            int(entry_starts[molecule + 1] - entry_starts[molecule])};
}

__device__ inline int lane_sum(int value)  // of the warp, in its lane 0
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(~0u, value, step);
    return value;
}

// A copy of bytes by a warp, four at a time if addresses and size allow it. Its first words are loaded
// when it is made, and stored later, so that the loads of several copies do not wait for each other's
// stores.
struct Copy {
    char *to;
    const char *from;
    long long n_words, n_bytes;  // one of them is 0
    int lane;
    unsigned first;

    __device__ Copy(char *to, const char *from, const long long bytes, const int lane)
        : to(to), from(from), lane(lane)
    {
        const bool is_aligned = ((size_t)to | (size_t)from | (size_t)bytes) % 4 == 0;
        n_words = is_aligned ? bytes / 4 : 0;
        n_bytes = is_aligned ? 0 : bytes;
        first = lane < n_words ? reinterpret_cast<const unsigned *>(from)[lane] : 0;
    }

    __device__ void finish() const
    {
        if (lane < n_words) reinterpret_cast<unsigned *>(to)[lane] = first;
        for (long long i = lane + 32; i < n_words; i += 32)
            reinterpret_cast<unsigned *>(to)[i] = reinterpret_cast<const unsigned *>(from)[i];
        for (long long i = lane; i < n_bytes; i += 32) to[i] = from[i];
    }
};

__device__ inline void clear(
    char *to, const long long bytes, const long long thread, const long long step)
{
    if (((size_t)to | (size_t)bytes) % 4 == 0) {
        for (long long i = thread; i < bytes / 4; i += step) reinterpret_cast<unsigned *>(to)[i] = 0;
    } else {
        for (long long i = thread; i < bytes; i += step) to[i] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(512) gather_batch(
    const int *__restrict__ index, const long long *__restrict__ starts,
    const long long *__restrict__ entry_starts, const char *__restrict__ atoms,
    const int *__restrict__ row_starts, const int *__restrict__ columns,
    const char *__restrict__ data, const char *__restrict__ label_0,
    const char *__restrict__ label_1, const int *__restrict__ padded_to,
    char *__restrict__ out_atoms, int *__restrict__ out_indptr, int *__restrict__ out_indices,
    char *__restrict__ out_data, int *__restrict__ row_offsets, int *__restrict__ col_offsets,
    float *__restrict__ out_weights, char *__restrict__ out_label_0, char *__restrict__ out_label_1,
    const int n_graphs, const int graphs_per_block, const int n_rows, const int nnz,
    const int n_relations, const int atom_bytes, const int data_bytes, const int label_bytes_0,
    const int label_bytes_1)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    const int first = blockIdx.x * graphs_per_block;
    const int stop = n_graphs - first > graphs_per_block ? first + graphs_per_block : n_graphs;
#if FOLDED && !LABELS_ONLY
    const int n_padded = *padded_to;
#endif

#if !LABELS_ONLY
    const int AHEAD = 4;  // graphs of a thread whose sizes are loaded together
    __shared__ Sizes before_block, all;
    __shared__ Sizes before_graph[32];  // a place for each warp
    if (threadIdx.x == 0) before_block = all = {0, 0};
    __syncthreads();
    Sizes before = {0, 0}, total = {0, 0};
    for (int begin = threadIdx.x; begin < n_graphs; begin += AHEAD * blockDim.x) {
        int molecule[AHEAD];
        Sizes sizes[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int g = begin + u * blockDim.x;
            molecule[u] = g < n_graphs ? index[g] : -1;
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            sizes[u] = {0, 0};
            if (molecule[u] >= 0) sizes[u] = sizes_of(molecule[u], starts, entry_starts);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            total.rows += sizes[u].rows;
            total.entries += sizes[u].entries;
            if (begin + u * int(blockDim.x) < first) {
                before.rows += sizes[u].rows;
                before.entries += sizes[u].entries;
            }
        }
    }
    before = {lane_sum(before.rows), lane_sum(before.entries)};
    total = {lane_sum(total.rows), lane_sum(total.entries)};
    if (lane == 0) {
        atomicAdd(&before_block.rows, before.rows);
        atomicAdd(&before_block.entries, before.entries);
        atomicAdd(&all.rows, total.rows);
        atomicAdd(&all.entries, total.entries);
    }
    __syncthreads();
#endif

    for (int g = first + warp; g < stop; g += n_warps) {
        const int molecule = index[g];
        const Copy of_label_0(
            out_label_0 + (long long)g * label_bytes_0,
            label_0 + (long long)molecule * label_bytes_0, label_bytes_0, lane);
        const Copy of_label_1(
            out_label_1 + (long long)g * label_bytes_1,
            label_1 + (long long)molecule * label_bytes_1, label_bytes_1, lane);
#if !LABELS_ONLY
        before = {0, 0};  // in this block
        for (int h = first + lane; h < g; h += 32) {
            const Sizes sizes = sizes_of(index[h], starts, entry_starts);
            before.rows += sizes.rows;
            before.entries += sizes.entries;
        }
        before = {lane_sum(before.rows), lane_sum(before.entries)};
        if (lane == 0) before_graph[warp] = before;
        __syncwarp();
        const int row = before_block.rows + before_graph[warp].rows;
        const int entry = before_block.entries + before_graph[warp].entries;
        __syncwarp();  // before lane 0 writes the next

        const Sizes sizes = sizes_of(molecule, starts, entry_starts);
        const long long node = starts[molecule], from = entry_starts[molecule];
        if (lane == 0) {
            row_offsets[g] = row;
            col_offsets[g] = row * n_relations;
        }
        const int n_nodes = sizes.rows - FOLDED;
        const Copy of_atoms(
            out_atoms + (long long)row * atom_bytes, atoms + node * atom_bytes,
            (long long)n_nodes * atom_bytes, lane);
        const Copy of_data(
            out_data + (long long)entry * data_bytes, data + from * data_bytes,
            (long long)sizes.entries * data_bytes, lane);
        // Loaded early, as in a Copy; an atom has about two entries.
        const int row_start = lane < n_nodes ? row_starts[node + lane] : 0;
        const int column_0 = lane < sizes.entries ? columns[from + lane] : 0;
        const int column_1 = lane + 32 < sizes.entries ? columns[from + lane + 32] : 0;
        if (lane < n_nodes) out_indptr[row + lane] = entry + row_start;
        for (int i = lane + 32; i < n_nodes; i += 32) out_indptr[row + i] = entry + row_starts[node + i];
        int *const indices = out_indices + entry;
        if (lane < sizes.entries) indices[lane] = column_0 + row * n_relations;
        if (lane + 32 < sizes.entries) indices[lane + 32] = column_1 + row * n_relations;
        for (int k = lane + 64; k < sizes.entries; k += 32)
            indices[k] = columns[from + k] + row * n_relations;
        of_atoms.finish();
        of_data.finish();
#if FOLDED
        const int last = row + n_nodes, missing = n_padded - n_nodes;
        for (int i = row + lane; i < last; i += 32) out_weights[i] = 1;
        if (lane == 0) {
            out_indptr[last] = entry + sizes.entries;
            out_weights[last] = missing > 0 ? missing : 0;
        }
        clear(out_atoms + (long long)last * atom_bytes, atom_bytes, lane, 32);
#endif
#endif
        of_label_0.finish();
        of_label_1.finish();
    }

#if !LABELS_ONLY
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long n_threads = (long long)gridDim.x * blockDim.x;
    if (thread == 0) {
        row_offsets[n_graphs] = all.rows;
        col_offsets[n_graphs] = all.rows * n_relations;
    }
#if FOLDED
    for (long long i = all.rows + thread; i < n_rows; i += n_threads) out_weights[i] = 0;
#endif
    for (long long i = all.rows + thread; i <= n_rows; i += n_threads) out_indptr[i] = all.entries;
    for (long long k = all.entries + thread; k < nnz; k += n_threads) out_indices[k] = 0;
    clear(out_atoms + (long long)all.rows * atom_bytes, (long long)(n_rows - all.rows) * atom_bytes,
          thread, n_threads);
    clear(out_data + (long long)all.entries * data_bytes,
          (long long)(nnz - all.entries) * data_bytes, thread, n_threads);
#endif
}
