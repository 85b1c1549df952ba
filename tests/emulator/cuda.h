// Just enough of CUDA to run a kernel of kernels/ on a CPU, one block after another: each thread is
// a fiber, and fibers switch where threads wait for each other.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

using std::signbit;

struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
static unsigned char* emulated_shared;

namespace emulator {

struct Barrier { unsigned arrived = 0, round = 0; };
struct Fiber { ucontext_t context; std::unique_ptr<char[]> stack; bool done; };

constexpr size_t STACK = 256 << 10;
static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<Barrier> warps;
static Barrier block;
static unsigned polls;                 // calls of __syncthreads_or so far
static int any[2];                     // their results, by the parity of the call
static uint64_t slots[1024];           // shuffles
static void (*entry)();

static void wait(Barrier& barrier, unsigned count) {
    unsigned round = barrier.round;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.round;
    }
    while (barrier.round == round) {
        unsigned me = threadIdx.x;
        swapcontext(&fibers[me].context, &scheduler);
    }
}

static void wait_warp() {
    unsigned first = threadIdx.x / 32 * 32, rest = fibers.size() - first;
    wait(warps[threadIdx.x / 32], rest < 32 ? rest : 32);
}

static void body() {
    entry();
    fibers[threadIdx.x].done = true;
}

// Runs the threads of one block, in ascending or descending order between barriers; false if they
// wait for each other in vain.
static bool run_block(unsigned threads, bool descending) {
    fibers.resize(threads);
    warps.assign((threads + 31) / 32, {});
    block = {};
    any[0] = any[1] = 0;
    for (Fiber& fiber : fibers) {
        fiber.done = false;
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, body, 0);
    }
    for (unsigned idle = 0; idle < 3;) {
        bool running = false;
        unsigned before = block.round, progress = 0;
        for (const Barrier& warp : warps) before += warp.round;
        for (unsigned turn = 0; turn < threads; ++turn) {
            unsigned t = descending ? threads - 1 - turn : turn;
            if (fibers[t].done) continue;
            running = true;
            threadIdx.x = t;
            swapcontext(&scheduler, &fibers[t].context);
            progress += fibers[t].done;
        }
        if (!running) return true;
        for (const Barrier& warp : warps) progress += warp.round;
        idle = progress + block.round == before ? idle + 1 : 0;
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

template <typename T>
T atomicAdd(T* to, T value) { T old = *to; *to += value; return old; }

template <typename To, typename From>
To emulated_bits(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
