// One OS thread for each CUDA thread, so that ThreadSanitizer finds races within a block. This file
// is compiled without ThreadSanitizer, which then sees only the order that pthreads impose.
#include "engine.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

extern "C" void AnnotateIgnoreSyncBegin(const char *file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char *file, int line);

namespace {

// Condition on which a thread sleeps. Each thread has its own: if all shared one, a thread that
// wakes late would be ordered after later accesses of others, and ThreadSanitizer would miss races.
struct Sleep {
    std::mutex mutex;
    std::condition_variable called;
    bool over = false;
    Sleep *next;  // waits in the same group; a vector would move its contents by memmove,
                  // which ThreadSanitizer sees
};

// Threads that wait for each other: a block at __syncthreads, the lanes of one mask.
struct Group {
    unsigned expected = 0, turn = 0, n_asleep = 0;
    Sleep *asleep = nullptr;
    // Indexed by turn, so that a shuffle can begin while a slow lane still reads the last results.
    unsigned long long bits[2][32];
};

struct Warp {
    std::mutex mutex;  // guards `lanes`
    std::map<unsigned, Group> lanes;  // by mask
};

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
    // Number of threads that have not returned, times ALIVE, plus the number of waiting ones. All
    // accesses are relaxed, so that they order nothing.
    std::atomic<std::uint64_t> state;
};

Block *block;

void release(Group &group)
{
    block->state.fetch_sub(group.n_asleep, std::memory_order_relaxed);
    ++group.turn;
    for (Sleep *sleep = group.asleep, *next; sleep; sleep = next) {
        const std::lock_guard<std::mutex> lock(sleep->mutex);
        next = sleep->next;  // once awake, it may be in another group
        sleep->over = true;
        sleep->called.notify_one();
    }
    group.asleep = nullptr;
    group.n_asleep = 0;
}

// Add to the state of the block. A thread that releases others is not counted as waiting there.
void change(std::uint64_t difference)
{
    const std::uint64_t state =
        block->state.fetch_add(difference, std::memory_order_relaxed) + difference;
    if (state >= ALIVE && state / ALIVE == state % ALIVE)
        fail("deadlock: every thread that has not returned waits at a barrier or a shuffle for one "
             "that does not come");
}

// lock: holds the mutex that guards the group.
void meet(Group &group, std::unique_lock<std::mutex> &lock)
{
    if (group.n_asleep + 1 == group.expected) {
        release(group);
        return;
    }
    Sleep &sleep = block->sleeps[this_thread()];
    sleep.over = false;
    sleep.next = group.asleep;
    group.asleep = &sleep;
    ++group.n_asleep;
    change(1);
    lock.unlock();
    std::unique_lock<std::mutex> own(sleep.mutex);
    sleep.called.wait(own, [&] { return sleep.over; });
}

// Threads that have returned are no longer expected at a barrier.
void leave()
{
    const std::lock_guard<std::mutex> lock(block->mutex);
    Group &everyone = block->everyone;
    if (--everyone.expected && everyone.n_asleep == everyone.expected) release(everyone);
    change(-ALIVE);
}

const unsigned long long *meet_lanes(unsigned mask, unsigned long long bits)
{
    const unsigned lane = lane_of(mask);
    Warp &warp = block->warps[this_thread() / 32];
    std::unique_lock<std::mutex> lock(warp.mutex);
    Group &group = warp.lanes[mask];
    group.expected = __builtin_popcount(mask);
    unsigned long long *const all = group.bits[group.turn % 2];
    all[lane] = bits;
    meet(group, lock);
    return all;
}

}  // namespace

void begin_grid() {}
void end_grid() {}

bool run_block(unsigned number, bool, void (*thread)(void *), void *context)
{
    const unsigned n_threads = blockDim.x * blockDim.y * blockDim.z;
    Block current(n_threads);
    block = &current;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < n_threads; ++t)
        threads.emplace_back([=] {
            place_block(number);
            place_thread(t);
            thread(context);
            leave();
        });
    for (std::thread &each : threads) each.join();
    return true;
}

void fail(const std::string &message)
{
    std::fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, this_thread(), message.c_str());
    std::_Exit(1);
}

void __syncthreads()
{
    std::unique_lock<std::mutex> lock(block->mutex);
    meet(block->everyone, lock);
}

// Lanes meet at a shuffle, but it orders none of their accesses to memory; __syncwarp does.
const unsigned long long *exchange(unsigned mask, unsigned long long bits)
{
    thread_local unsigned long long copied[32];
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    const unsigned long long *const all = meet_lanes(mask, bits);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    // A copy for each lane: ThreadSanitizer takes another lane's allocation of `all` for a write.
    for (int lane = 0; lane < 32; ++lane) copied[lane] = all[lane];
    return copied;
}

void __syncwarp(unsigned mask) { meet_lanes(mask, 0); }
