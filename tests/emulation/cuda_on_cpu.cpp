// Runs a kernel on the CPU: one OS thread for each CUDA thread, one block after the other. Threads
// of a block run truly at once, so ThreadSanitizer sees their races (not those between blocks).
// Nothing is said of warps in lockstep, speed, or flushed denormals.
//
// Whatever a GPU would leave undefined ends the program with status 1 and a message: a barrier or
// shuffle that not all its threads reach, a lane that reads from one outside its mask, a byte
// written beside an array.
#include "cuda_on_cpu.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

namespace {

// What a thread sleeps on. Each has its own: with one for all, a thread that wakes late would be in
// order with whatever the others did meanwhile, and ThreadSanitizer would take a race for ordered.
struct Sleep {
    std::mutex mutex;
    std::condition_variable called;
    bool over = false;
};

// The threads that wait for each other: a block at __syncthreads, the lanes of one mask at a shuffle.
struct Group {
    unsigned expected = 0, turn = 0;
    std::vector<Sleep *> asleep;
    // By turn, so that the next shuffle can begin while a slow lane still reads the last.
    unsigned long long bits[2][32];
};

struct Warp {
    std::mutex mutex;  // guards `lanes`
    std::map<unsigned, Group> lanes;  // by mask
};

const unsigned char POISON = 0xFF;  // a NaN in every floating dtype, -1 as an integer
const std::uint64_t ALIVE = std::uint64_t(1) << 32;

struct Block {
    explicit Block(unsigned n_threads)
        : warps((n_threads + 31) / 32), sleeps(n_threads), state(n_threads * ALIVE)
    {
        everyone.expected = n_threads;
    }

    std::mutex mutex;  // guards `everyone`
    Group everyone;
    std::vector<Warp> warps;
    std::vector<Sleep> sleeps;  // by thread
    // Threads that have not returned, times ALIVE, and those of them that wait. Never more than a
    // relaxed access, which orders nothing.
    std::atomic<std::uint64_t> state;
    std::vector<unsigned char> shared = std::vector<unsigned char>(dynamic_shared_bytes, POISON);
};

Block *block;

[[noreturn]] void fail(const std::string &message)
{
    std::fprintf(stderr, "block (%u, %u, %u), thread (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y,
                 blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, message.c_str());
    std::_Exit(1);
}

unsigned this_thread()
{
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

void release(Group &group)
{
    block->state.fetch_sub(group.asleep.size(), std::memory_order_relaxed);
    ++group.turn;
    for (Sleep *sleep : group.asleep) {
        const std::lock_guard<std::mutex> lock(sleep->mutex);
        sleep->over = true;
        sleep->called.notify_one();
    }
    group.asleep.clear();
}

// Add to the state of the block, which a thread that lets others go has not entered as waiting.
void change(std::uint64_t difference)
{
    const std::uint64_t state =
        block->state.fetch_add(difference, std::memory_order_relaxed) + difference;
    if (state >= ALIVE && state / ALIVE == state % ALIVE)
        fail("deadlock: every thread that has not returned waits at a barrier or a shuffle for one "
             "that does not come");
}

// lock: of what guards the group.
void meet(Group &group, std::unique_lock<std::mutex> &lock)
{
    if (group.asleep.size() + 1 == group.expected) {
        release(group);
        return;
    }
    Sleep &sleep = block->sleeps[this_thread()];
    sleep.over = false;
    group.asleep.push_back(&sleep);
    change(1);
    lock.unlock();
    std::unique_lock<std::mutex> own(sleep.mutex);
    sleep.called.wait(own, [&] { return sleep.over; });
}

// Threads that returned are no longer expected at a barrier.
void leave()
{
    const std::lock_guard<std::mutex> lock(block->mutex);
    Group &everyone = block->everyone;
    if (--everyone.expected && everyone.asleep.size() == everyone.expected) release(everyone);
    change(-ALIVE);
}

struct Array {
    std::string file;
    unsigned char *begin, *end;
};

std::vector<Array> arrays;
const std::size_t GUARD = 64;

void check_guard(const Array &array, const unsigned char *from, const char *side)
{
    for (std::size_t i = 0; i < GUARD; ++i)
        if (from[i] != POISON) {
            std::fprintf(stderr, "a byte was written %s %s\n", side, array.file.c_str());
            std::_Exit(1);
        }
}

}  // namespace

void __syncthreads()
{
    std::unique_lock<std::mutex> lock(block->mutex);
    meet(block->everyone, lock);
}

void *dynamic_shared() { return block->shared.data(); }

unsigned neighbour(unsigned mask, int delta, int width)
{
    const unsigned lane = this_thread() % 32;
    const int within = int(lane) % width + delta;
    const unsigned source = within >= 0 && within < width ? lane + delta : lane;
    if (!(mask >> source & 1)) fail("shuffle: the mask leaves out the lane that is read");
    return source;
}

const unsigned long long *exchange(unsigned mask, unsigned long long bits)
{
    const unsigned thread = this_thread(), lane = thread % 32;
    if (!(mask >> lane & 1)) fail("shuffle: the mask leaves out the lane that calls");

    Warp &warp = block->warps[thread / 32];
    std::unique_lock<std::mutex> lock(warp.mutex);
    Group &group = warp.lanes[mask];
    group.expected = __builtin_popcount(mask);
    unsigned long long *const all = group.bits[group.turn % 2];
    all[lane] = bits;
    meet(group, lock);
    return all;
}

// Read "SHIFT:FILE" into memory that lies SHIFT bytes past a multiple of 64 between two poisoned
// guards; run_grid() writes it back. The end of the program frees it. A file that comes twice is one
// array.
void *load(const char *argument)
{
    const std::string text = argument;
    if (text == "null") return nullptr;
    const std::size_t colon = text.find(':');
    const std::string file = text.substr(colon + 1);
    for (const Array &array : arrays)
        if (array.file == file) return array.begin;
    std::ifstream stream(file, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(stream), {}};
    if (!stream.is_open()) fail("cannot read " + file);

    const std::size_t before = GUARD + std::stoul(text.substr(0, colon));
    const std::size_t total = before + content.size() + GUARD;
    auto *const memory = static_cast<unsigned char *>(std::aligned_alloc(64, (total + 63) / 64 * 64));
    std::memset(memory, POISON, total);
    const Array array{file, memory + before, memory + before + content.size()};
    std::memcpy(array.begin, content.data(), content.size());
    ASAN_POISON_MEMORY_REGION(memory, before);
    ASAN_POISON_MEMORY_REGION(array.end, GUARD);
    arrays.push_back(array);
    return array.begin;
}

void run_grid(void (*thread)(void *), void *context)
{
    const unsigned n_threads = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned b = 0; b < gridDim.x * gridDim.y * gridDim.z; ++b) {
        Block current(n_threads);
        block = &current;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < n_threads; ++t)
            threads.emplace_back([=] {
                blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
                threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y,
                             t / blockDim.x / blockDim.y};
                thread(context);
                leave();
            });
        for (std::thread &each : threads) each.join();
    }
    for (const Array &array : arrays) {
        ASAN_UNPOISON_MEMORY_REGION(array.begin - GUARD, array.end - array.begin + 2 * GUARD);
        check_guard(array, array.begin - GUARD, "before");
        check_guard(array, array.end, "after");
        std::ofstream(array.file, std::ios::binary)
            .write(reinterpret_cast<char *>(array.begin), array.end - array.begin);
    }
}
