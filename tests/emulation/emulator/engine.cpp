// Arrays of a launch, and its blocks, which run one after the other. README.md has the overview.
#include "engine.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

PER_THREAD Dimensions threadIdx, blockIdx;
Dimensions blockDim, gridDim;

namespace {

std::string report;

// The kernel's copy of an array lies between poisoned bytes, at least GUARD on either side, and
// these between pages that cannot be accessed.
struct Array {
    std::string text;
    unsigned char *host;  // the caller's; changed after the last block
    std::size_t size;
    unsigned char *begin, *poison, *poison_end;
    std::vector<unsigned char> result, is_written;
    bool has_atomics;
};

std::vector<Array> arrays;
const std::size_t GUARD = 64, PAGE = 4096;

// Restore all arrays to their state before the first block.
void restore()
{
    for (Array &array : arrays) {
        if (array.size) std::memcpy(array.begin, array.host, array.size);
        array.result.assign(array.host, array.host + array.size);
        array.is_written.assign(array.size, false);
        array.has_atomics = false;
    }
}

// Move a block's changes to the results, and restore the arrays: every block runs as if it were the
// first, and no two may change the same byte, except by atomics.
bool collect()
{
    for (Array &array : arrays) {
        if (array.has_atomics || !array.size || !std::memcmp(array.begin, array.host, array.size))
            continue;
        for (std::size_t i = 0; i < array.size; ++i) {
            if (array.begin[i] == array.host[i]) continue;
            if (array.is_written[i]) {
                record("two blocks write byte " + std::to_string(i) + " of " + array.text);
                return false;
            }
            array.is_written[i] = true;
            array.result[i] = array.begin[i];
            array.begin[i] = array.host[i];
        }
    }
    return true;
}

void put_results()
{
    for (const Array &array : arrays)
        if (array.size && !array.has_atomics)
            std::memcpy(array.begin, array.result.data(), array.size);
}

void check_guards()
{
    for (const Array &array : arrays) {
        ASAN_UNPOISON_MEMORY_REGION(array.poison, array.poison_end - array.poison);
        const unsigned char *const end = array.begin + array.size;
        for (const unsigned char *at = array.poison; at < array.poison_end; ++at)
            if ((at < array.begin || at >= end) && *at != POISON) {
                record(std::string("a byte was written ") + (at < end ? "before " : "after ") +
                       array.text);
                return;
            }
    }
}

void release()
{
    for (const Array &array : arrays) {
        ASAN_UNPOISON_MEMORY_REGION(array.poison, array.poison_end - array.poison);
        munmap(array.poison - PAGE, array.poison_end - array.poison + 2 * PAGE);
    }
    arrays.clear();
}

bool run_blocks(const Grid &grid, const bool reversed)
{
    const unsigned n_blocks = gridDim.x * gridDim.y * gridDim.z;
    for (unsigned i = 0; i < n_blocks; ++i) {
        std::fill(shared_memory.begin(), shared_memory.end(), POISON);
        std::fill(grid.static_shared, grid.static_shared_end, POISON);
        if (!run_block(reversed ? n_blocks - 1 - i : i, reversed, grid.thread, grid.context))
            return false;
        if (!collect()) return false;
    }
    put_results();
    return true;
}

// Run the grid once more, the last block and thread first, and compare.
void run_reversed(const Grid &grid)
{
    std::vector<std::string> results;
    for (const Array &array : arrays)
        results.emplace_back(reinterpret_cast<char *>(array.begin), array.size);
    restore();
    if (!run_blocks(grid, true)) return;
    for (std::size_t i = 0; i < arrays.size(); ++i)
        if (std::memcmp(results[i].data(), arrays[i].begin, arrays[i].size)) {
            record("the result depends on the order of the threads, in " + arrays[i].text);
            return;
        }
}

}  // namespace

long long integer(const char *text) { return std::strtoll(text, nullptr, 10); }
double real(const char *text) { return std::strtod(text, nullptr); }

// "SHIFT:BYTES:WHERE": memory SHIFT bytes past a multiple of 64; WHERE is an address of this process
// or a file. Equal texts are one array. "@ADDRESS": memory that the engine leaves alone.
// "ARRAY,OFFSET@ARRAY,...": an array that holds pointers, which are written to the caller's, too.
void *array(const char *text)
{
    if (const char *const comma = std::strchr(text, ',')) {
        const std::string name(text, comma);
        auto *const begin = static_cast<unsigned char *>(array(name.c_str()));
        unsigned char *host = nullptr;
        std::size_t size = 0;
        for (const Array &array : arrays)
            if (array.text == name) host = array.host, size = array.size;
        structure(text, host, size);
        std::memcpy(begin, host, size);
        return begin;
    }
    if (*text == '@') return reinterpret_cast<void *>(std::strtoull(text + 1, nullptr, 10));
    for (const Array &array : arrays)
        if (array.text == text) return array.begin;
    char *rest;
    const std::size_t shift = std::strtoull(text, &rest, 10);
    Array array{};
    array.text = text;
    array.size = std::strtoull(rest + 1, &rest, 10);
    if (rest[1] == '/') {
        const int file = open(rest + 1, O_RDWR);
        void *const mapped = mmap(nullptr, array.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        array.host = static_cast<unsigned char *>(mapped);
        close(file);
    } else {
        array.host = reinterpret_cast<unsigned char *>(std::strtoull(rest + 1, nullptr, 10));
    }
    const std::size_t poison = (array.size + 2 * GUARD + 64 + PAGE) / PAGE * PAGE;
    auto *const memory = static_cast<unsigned char *>(mmap(
        nullptr, poison + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    array.poison = memory + PAGE;
    array.poison_end = array.poison + poison;
    mprotect(array.poison, poison, PROT_READ | PROT_WRITE);
    // As near to the end as the alignment allows.
    array.begin = array.poison + (poison - GUARD - array.size - shift) / 64 * 64 + shift;
    std::memset(array.poison, POISON, poison);
    if (array.size) std::memcpy(array.begin, array.host, array.size);
    ASAN_POISON_MEMORY_REGION(array.poison, array.begin - array.poison);
    ASAN_POISON_MEMORY_REGION(array.begin + array.size,
                              array.poison_end - array.begin - array.size);
    arrays.push_back(array);
    return array.begin;
}

void structure(const char *argument, void *value, std::size_t size)
{
    std::string text = argument;
    std::size_t comma = text.find(',');
    std::memcpy(value, array(text.substr(0, comma).c_str()), size);
    while (comma != std::string::npos) {
        text = text.substr(comma + 1);
        comma = text.find(',');
        const std::size_t at = text.find('@');
        void *const pointer = array(text.substr(at + 1, comma - at - 1).c_str());
        std::memcpy(static_cast<char *>(value) + std::stoul(text), &pointer, sizeof(pointer));
    }
}

void record(const std::string &message) { report = message; }

void note_atomic(const void *address)
{
    const auto *const byte = static_cast<const unsigned char *>(address);
    for (Array &array : arrays)
        if (byte >= array.begin && byte < array.begin + array.size) array.has_atomics = true;
}

void *dynamic_shared() { return shared_memory.data(); }

unsigned neighbour(unsigned mask, int delta, int width)
{
    const unsigned lane = this_thread() % 32;
    const int within = int(lane) % width + delta;
    const unsigned source = within >= 0 && within < width ? lane + delta : lane;
    if (!(mask >> source & 1)) fail("shuffle: the mask leaves out the lane that is read");
    return source;
}

const char *run_grid(const Grid &grid)
{
    report.clear();
    unsigned *const sizes[] = {&gridDim.x, &gridDim.y, &gridDim.z,
                               &blockDim.x, &blockDim.y, &blockDim.z};
    char **word = grid.argv;
    for (unsigned *size : sizes) *size = integer(*word++);
    shared_memory.resize(integer(*word));
    restore();
    begin_grid();
    if (run_blocks(grid, false)) {
#ifdef IN_PROCESS
        run_reversed(grid);
#endif
        if (report.empty()) check_guards();
    }
    end_grid();
    if (report.empty())
        for (const Array &array : arrays)
            if (array.size && std::memcmp(array.host, array.begin, array.size))
                std::memcpy(array.host, array.begin, array.size);
    release();
    return report.empty() ? nullptr : report.c_str();
}

#ifndef IN_PROCESS
extern "C" const char *run_kernel(char **argv);

int main(int, char **argv)
{
    const char *const message = run_kernel(argv + 1);
    if (message) std::fprintf(stderr, "%s\n", message);
    return message != nullptr;
}
#endif
