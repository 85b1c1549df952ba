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
// Arrives when the copies that the thread has started (ptx.cuh, copy_async) are done, without waiting.
__device__ __forceinline__ void arrive_after_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of a phase: 0, 1, 0, ... from the first on.
__device__ __forceinline__ void wait_phase(uint32 barrier, uint32 phase) {
    uint32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}

// Brings a map near.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Starts to copy a box of a tensor (channel, row, head, batch), whose bytes the barrier gets.
__device__ __forceinline__ void copy_box(uint32 to, const TensorMap& map, uint32 barrier, int channel,
                                         int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(channel),
                 "r"(row), "r"(head), "r"(batch) : "memory");
}
// Starts to copy a box from shared memory to a tensor, of which what lies beyond the ends is left out;
// end_stores ends a group of such copies.
__device__ __forceinline__ void store_box(const TensorMap& map, uint32 from, int channel, int row, int head,
                                          int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from), "r"(channel), "r"(row), "r"(head), "r"(batch) : "memory");
}
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all the thread's stores have read shared memory, or are done.
__device__ __forceinline__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Four 8 x 8 matrices of 16-bit elements, as load_matrices (ptx.cuh) has them.
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
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
