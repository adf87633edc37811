// Write the values that a step reports, single numbers of any dtype, where the host will look for them:
//
//     row[first + i] = the bytes of value i, in the first of 8 bytes
//
// row_address (1) uint64 is in device memory, because every replay of a captured launch writes to
// another row. The row is aligned to 8 bytes and has 8 for each value. table: the address of each value
// and its size in bytes, a power of two up to 8, to which it is aligned. No atomics.
//
// -DN_VALUES: how many a table has room for, at most 1024. -DTABLE_BYTES: its size on the host.
//
// Launch: one block of at least n_values threads; thread i copies value i.
#include "common.cuh"

static_assert(N_VALUES <= 1024, "a thread for each value");

struct Table {
    const void *value[N_VALUES];
    int bytes[N_VALUES];
};

static_assert(sizeof(Table) == TABLE_BYTES, "the host has the same layout");

extern "C" __global__ void report(
    const unsigned long long *__restrict__ row_address, const Table table, const int first,
    const int n_values)
{
    const int i = threadIdx.x;
    if (i >= n_values) return;
    unsigned long long *const to = reinterpret_cast<unsigned long long *>(*row_address) + first + i;
    const void *const from = table.value[i];
    switch (table.bytes[i]) {
        case 8: *to = *static_cast<const unsigned long long *>(from); break;
        case 4: *reinterpret_cast<unsigned *>(to) = *static_cast<const unsigned *>(from); break;
        case 2:
            *reinterpret_cast<unsigned short *>(to) = *static_cast<const unsigned short *>(from);
            break;
        default: *reinterpret_cast<char *>(to) = *static_cast<const char *>(from);
    }
}
