// Single PTX instructions, a small function each. Nothing else in this folder holds inline assembly.
#pragma once

// Binary16 bits to a float, exactly.
__device__ __forceinline__ float float_of_half(unsigned short bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

// A float to the bits of the nearest binary16, ties to even.
__device__ __forceinline__ unsigned short half_of_float(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

#if __CUDA_ARCH__ >= 800
// A float to the bits of the nearest bfloat16, ties to even.
__device__ __forceinline__ unsigned short bfloat_of_float(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

// 2^x within 2 ulp; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A number that all lanes of a warp have, so that the compiler knows that they do: it then keeps it in
// one register for all and takes branches without preparing for lanes that part.
__device__ __forceinline__ int uniform(int x) {
#if __CUDA_ARCH__ >= 800
    asm volatile("redux.sync.or.b32 %0, %0, 0xffffffff;" : "+r"(x));
#endif
    return x;
}

// --- sm_80 and newer -------------------------------------------------------------------------

// An address in shared memory, as PTX wants it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of `bytes` (0 to 16) from global memory; the rest of 16 bytes becomes 0.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes));
}
// Ends a group of copies.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// d += a b for a 16 x 16, b 16 x 8, of float16 or bfloat16.
__device__ __forceinline__ void multiply_half(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bfloat(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A float's bits to those of the nearest TF32 number, and d += a b for a 16 x 8, b 8 x 8, of those.
__device__ __forceinline__ unsigned round_tf32(unsigned x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
    return rounded;
}
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned load_shared(unsigned from) {
    unsigned value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}
__device__ __forceinline__ void store_shared(unsigned to, unsigned value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Adds four floats to the lane's share of 128 at `to`, each atomically: numbers 4 lane to 4 lane + 3
// on sm_90, else numbers lane, lane + 32, lane + 64 and lane + 96, in either case side by side for
// the warp.
__device__ __forceinline__ int share_index(int lane, int e) {
#if __CUDA_ARCH__ >= 900
    return lane * 4 + e;
#else
    return lane + e * 32;
#endif
}
__device__ __forceinline__ void add_share(float* to, const float (&x)[4]) {
    float* first = to + share_index(threadIdx.x % 32, 0);
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(first), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
    asm volatile("red.global.add.f32 [%0], %1;\n\tred.global.add.f32 [%0 + 128], %2;\n\t"
                 "red.global.add.f32 [%0 + 256], %3;\n\tred.global.add.f32 [%0 + 384], %4;" ::
                 "l"(first), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#endif
}

// A barrier, 1 to 15, for `threads` threads of the block: whole warps.
__device__ __forceinline__ void sync_some(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same; returns whether x is true for any of them.
__device__ __forceinline__ bool any_of_some(int barrier, int threads, bool x) {
    int any;
    asm volatile("{.reg .pred x, any; setp.ne.s32 x, %3, 0; bar.red.or.pred any, %1, %2, x; "
                 "selp.s32 %0, 1, 0, any;}" : "=r"(any) : "r"(barrier), "r"(threads), "r"(int(x)) : "memory");
    return any;
}

// Whether the low and the high half of a word, without their highest bits, are below those of `limits`,
// or not below if `negate` is 1. Limits are at most 2^14: numbers that float16 orders as they are.
__device__ __forceinline__ void halves_below(bool& low, bool& high, unsigned word, unsigned limits,
                                             unsigned negate) {
    unsigned is_low, is_high;
    asm("{.reg .pred p, q, n; .reg .b32 x;\n\t"
        "setp.ne.u32 n, %4, 0; abs.f16x2 x, %2;\n\t"
        "setp.lt.xor.f16x2 p|q, x, %3, n;\n\t"
        "selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q;}"
        : "=r"(is_low), "=r"(is_high) : "r"(word), "r"(limits), "r"(negate));
    low = is_low != 0, high = is_high != 0;
}
// The same as masks of 16 bits.
__device__ __forceinline__ unsigned mask_below(unsigned word, unsigned limits) {
    unsigned mask;
    asm("{.reg .b32 x; abs.f16x2 x, %1; set.lt.u32.f16x2 %0, x, %2;}"
        : "=r"(mask) : "r"(word), "r"(limits));
    return mask;
}

// Nothing; but the compiler keeps the branch that it stands in, instead of computing both ways.
__device__ __forceinline__ void keep_branch() { asm volatile(""); }

// Two floats to the nearest 16-bit elements in one register, the first in the low half.
__device__ __forceinline__ unsigned pack_half(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned pack_bfloat(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
