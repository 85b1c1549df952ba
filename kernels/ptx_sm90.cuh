// Single PTX instructions of Hopper (sm_90a), a small function each; the matrix products are in
// mma_sm90.cuh.
#pragma once
#include "types.cuh"

// A tensor in global memory as the copy engine (TMA) knows it: made by the host.
struct alignas(64) TensorMap { uint64 words[16]; };

// Barriers in shared memory, 8 bytes each. A phase ends when so many threads have arrived and all
// bytes that were announced have come.
__device__ __forceinline__ void init_barrier(uint32 barrier, int threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Makes what init_barrier wrote known to the copy engine.
__device__ __forceinline__ void end_init_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_with_bytes(uint32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits for the end of a phase: 0, 1, 0, ... from the first on.
__device__ __forceinline__ void wait_phase(uint32 barrier, uint32 phase) {
    uint32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}

// Starts to copy a box of a tensor (channel, row, head, batch), whose bytes the barrier gets.
__device__ __forceinline__ void copy_box(uint32 to, const TensorMap& map, uint32 barrier, int channel,
                                         int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(channel),
                 "r"(row), "r"(head), "r"(batch) : "memory");
}
// Orders the thread's own writes to shared memory before copies that are started later.
__device__ __forceinline__ void end_own_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Gives registers of a warp group away, or takes some.
template <int COUNT>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Arrives at a barrier (ptx.cuh, sync_some) without waiting.
__device__ __forceinline__ void arrive_some(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Products of a warp group run behind its back: between begin_products and wait_products their
// registers must not be touched.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving a register of products across this place.
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
