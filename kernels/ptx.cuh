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
