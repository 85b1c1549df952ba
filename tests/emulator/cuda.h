// Just enough of CUDA to run a kernel of kernels/ on a CPU, one block after another: each thread is
// a fiber, and fibers switch where threads wait for each other.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

using std::max;
using std::min;
using std::signbit;

struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
static unsigned char* emulated_shared;

namespace emulator {
// What a thread has started, in groups, and nothing has waited for: cp.async, wgmma.
template <typename Task>
struct Groups {
    std::vector<Task> open;
    std::vector<std::vector<Task>> ended;
    void end() {
        ended.push_back(open);
        open.clear();
    }
    template <typename Use>
    void wait(size_t pending, Use use) {
        for (; ended.size() > pending; ended.erase(ended.begin()))
            for (const Task& task : ended.front()) use(task);
    }
};

struct Barrier { unsigned arrived = 0, round = 0; };
struct Fiber { ucontext_t start; jmp_buf place; bool begun, done; };

constexpr size_t STACK = 256 << 10;
static char* stacks;                   // of the fibers, one behind the other
static jmp_buf scheduler;
static std::vector<Fiber> fibers;
static std::vector<Barrier> warps;
static Barrier block, named[16];
static unsigned progress;              // ends of phases of barriers in shared memory
static unsigned polls;                 // calls of __syncthreads_or so far
static int any[2];                     // their results, by the parity of the call
static int any_of[16][2];              // the same for named barriers
static uint64_t slots[1024];           // shuffles
// Copies are made when they are started, and products of warp groups when somebody waits for them; or
// the other way round. Where the difference shows in a result, somebody does not wait.
static bool copies_first;
static void (*entry)();

// Contexts only start fibers: jumps between them ask nothing of the operating system.
__attribute__((noinline)) static void resume(unsigned thread) {
    Fiber& fiber = fibers[thread];
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}
__attribute__((noinline)) static void pause() {
    if (!_setjmp(fibers[threadIdx.x].place)) _longjmp(scheduler, 1);
}

// Arrives without waiting.
static void arrive(Barrier& barrier, unsigned count) {
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.round;
    }
}

static void wait(Barrier& barrier, unsigned count) {
    unsigned round = barrier.round;
    arrive(barrier, count);
    while (barrier.round == round) pause();
}

static void wait_warp() {
    unsigned first = threadIdx.x / 32 * 32, rest = fibers.size() - first;
    wait(warps[threadIdx.x / 32], rest < 32 ? rest : 32);
}

static void body() {
    entry();
    fibers[threadIdx.x].done = true;
    _longjmp(scheduler, 1);
}

// Memory that nobody has written to costs nothing.
static void make_stacks(unsigned threads) {
    stacks = static_cast<char*>(mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

// Runs the threads of one block, in ascending or descending order between barriers; false if they
// wait for each other in vain.
static bool run_block(unsigned threads, bool descending) {
    fibers.resize(threads);
    warps.assign((threads + 31) / 32, {});
    block = {};
    for (Barrier& barrier : named) barrier = {};
    std::memset(any_of, 0, sizeof any_of);
    any[0] = any[1] = 0;
    for (Fiber& fiber : fibers) {
        fiber.begun = fiber.done = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks + (&fiber - fibers.data()) * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        makecontext(&fiber.start, body, 0);
    }
    for (unsigned idle = 0; idle < 3;) {
        bool running = false;
        unsigned before = block.round + progress, after = 0;
        for (const Barrier& warp : warps) before += warp.round;
        for (const Barrier& barrier : named) before += barrier.round;
        for (unsigned turn = 0; turn < threads; ++turn) {
            unsigned t = descending ? threads - 1 - turn : turn;
            if (fibers[t].done) continue;
            running = true;
            resume(t);
            after += fibers[t].done;
        }
        if (!running) return true;
        for (const Barrier& warp : warps) after += warp.round;
        for (const Barrier& barrier : named) after += barrier.round;
        idle = after + block.round + progress == before ? idle + 1 : 0;
    }
    return false;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::block, emulator::fibers.size()); }
inline int __syncthreads_or(int predicate) {
    unsigned poll = emulator::polls;
    emulator::any[poll & 1] |= predicate != 0;
    __syncthreads();
    int result = emulator::any[poll & 1];
    emulator::any[~poll & 1] = 0;
    __syncthreads();
    emulator::polls = poll + 1;
    return result;
}
inline void __syncwarp(unsigned = ~0u) { emulator::wait_warp(); }

template <typename T>
T emulated_shuffle(T value, unsigned source) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    emulator::slots[threadIdx.x] = bits;
    emulator::wait_warp();
    bits = emulator::slots[threadIdx.x / 32 * 32 + source % 32];
    emulator::wait_warp();
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
    return emulated_shuffle(value, threadIdx.x % 32 ^ lanes);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) { return emulated_shuffle(value, lane); }

inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned bits = predicate ? 1u << threadIdx.x % 32 : 0;
    for (int lanes = 1; lanes < 32; lanes *= 2) bits |= __shfl_xor_sync(~0u, bits, lanes);
    return bits;
}
inline bool __any_sync(unsigned lanes, int predicate) { return __ballot_sync(lanes, predicate); }
inline bool __all_sync(unsigned lanes, int predicate) { return !__any_sync(lanes, !predicate); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }

inline unsigned atomicInc(unsigned* to, unsigned limit) {
    unsigned old = *to;
    *to = old >= limit ? 0 : old + 1;
    return old;
}
template <typename T>
T atomicAdd(T* to, T value) { T old = *to; *to += value; return old; }

template <typename To, typename From>
To emulated_bits(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
