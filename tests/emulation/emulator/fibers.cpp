// Threads of a block as coroutines on one OS thread: each runs as far as it can before the next one
// does, in the order of their numbers or in reverse, so that a run is repeatable.
#include "engine.h"

#include <csetjmp>
#include <csignal>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>

namespace {

// Threads that wait for each other: a block at __syncthreads, the lanes of one mask.
struct Group {
    unsigned expected = 0, arrived = 0, turn = 0;
    // Indexed by turn: a shuffle may begin before all lanes have read the results of the last one.
    unsigned long long bits[2][32];
};

// Place where a coroutine, or the loop that runs them all, has stopped. Once begun, they switch by
// jumps, because swapcontext would make two system calls each time.
struct Place {
    jmp_buf jump;

    void leave_for(Place &other)
    {
        if (!_setjmp(jump)) _longjmp(other.jump, 1);
    }
};

struct Fiber : Place {
    bool has_begun = false;
    const unsigned *turn = nullptr;  // of the group that it waits for
    unsigned seen = 0;
    bool is_over = false;

    bool can_run() const { return !is_over && !(turn && *turn == seen); }
};

const std::size_t STACK = 128 << 10;
unsigned char *stacks;  // kept for the next grid
std::size_t n_stacks;
std::vector<Fiber> fibers;  // as many as stacks
unsigned n_threads;
std::vector<std::map<unsigned, Group>> warps;  // by mask
Group everyone;
Place scheduler;
void (*the_thread)(void *);
void *the_context;
bool has_failed;

void meet(Group &group)
{
    Fiber &fiber = fibers[this_thread()];
    fiber.turn = &group.turn;
    fiber.seen = group.turn;
    if (++group.arrived == group.expected) {
        group.arrived = 0;
        ++group.turn;
    }
    fiber.leave_for(scheduler);
}

// A coroutine runs one thread after the other, of one block after the other.
void enter()
{
    for (;;) {
        the_thread(the_context);
        Fiber &fiber = fibers[this_thread()];
        fiber.is_over = true;
        // A thread that has returned is not expected at a barrier.
        if (--everyone.expected && everyone.arrived == everyone.expected) {
            everyone.arrived = 0;
            ++everyone.turn;
        }
        fiber.leave_for(scheduler);
    }
}

// Run thread t until it stops.
void go_on(unsigned t)
{
    Fiber &fiber = fibers[t];
    if (fiber.has_begun) {
        scheduler.leave_for(fiber);
    } else if (!_setjmp(scheduler.jump)) {
        fiber.has_begun = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks + t * STACK;
        context.uc_stack.ss_size = STACK;
        makecontext(&context, enter, 0);
        setcontext(&context);
    }
}

#ifndef __SANITIZE_ADDRESS__
const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
struct sigaction previous[4];
stack_t previous_stack;
unsigned char signal_stack[1 << 16];

void on_signal(int number)
{
    fail(number == SIGSEGV || number == SIGBUS
             ? "access to memory of no array"
             : "an address that is not aligned, an index beyond an array, or a division by zero");
}
#endif

}  // namespace

void begin_grid()
{
    n_threads = blockDim.x * blockDim.y * blockDim.z;
    if (n_threads > n_stacks) {
        if (stacks) munmap(stacks, n_stacks * STACK);
        n_stacks = n_threads;
        fibers.assign(n_stacks, {});
        stacks = static_cast<unsigned char *>(
            mmap(nullptr, n_stacks * STACK, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    }
    has_failed = false;
#ifndef __SANITIZE_ADDRESS__
    stack_t stack{};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof(signal_stack);
    sigaltstack(&stack, &previous_stack);
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK | SA_NODEFER;  // the handler does not return
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &previous[i]);
#endif
}

void end_grid()
{
#ifndef __SANITIZE_ADDRESS__
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
#endif
}

bool run_block(unsigned block, bool reversed, void (*thread)(void *), void *context)
{
    the_thread = thread;
    the_context = context;
    place_block(block);
    warps.assign((n_threads + 31) / 32, {});
    everyone = {};
    everyone.expected = n_threads;
    for (unsigned t = 0; t < n_threads; ++t) {
        fibers[t].turn = nullptr;
        fibers[t].is_over = false;
    }
    for (unsigned n_over = 0; n_over < n_threads;) {
        bool has_run = false;
        for (unsigned i = 0; i < n_threads; ++i) {
            const unsigned t = reversed ? n_threads - 1 - i : i;
            if (!fibers[t].can_run()) continue;
            has_run = true;
            place_thread(t);
            go_on(t);
            if (has_failed) {
                fibers.assign(n_stacks, {});  // some have stopped midway
                return false;
            }
            n_over += fibers[t].is_over;
        }
        if (!has_run) {
            fibers.assign(n_stacks, {});
            record("block " + std::to_string(block) +
                   ": deadlock: every thread that has not returned waits at a barrier or a shuffle "
                   "for one that does not come");
            return false;
        }
    }
    return true;
}

void fail(const std::string &message)
{
    record("block " + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) +
           ", thread " + std::to_string(this_thread()) + ": " + message);
    has_failed = true;
    _longjmp(scheduler.jump, 1);
}

void __syncthreads() { meet(everyone); }

const unsigned long long *exchange(unsigned mask, unsigned long long bits)
{
    const unsigned lane = lane_of(mask);
    Group &group = warps[this_thread() / 32][mask];
    group.expected = __builtin_popcount(mask);
    unsigned long long *const all = group.bits[group.turn % 2];
    all[lane] = bits;
    meet(group);
    return all;
}

void __syncwarp(unsigned mask) { exchange(mask, 0); }
