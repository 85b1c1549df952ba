// Element types. `Element` is what arrays hold, `Compute` what arithmetic is done in
// (float for float16, bfloat16 and float32; double for float64). No CUDA header is needed.
#pragma once
#include "ptx.cuh"

using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using float32 = float;
using float64 = double;

__device__ __forceinline__ float to_compute(float16 x) { return float_of_half(x.bits); }
__device__ __forceinline__ float to_compute(bfloat16 x) {
    return __uint_as_float(static_cast<uint32>(x.bits) << 16);
}
__device__ __forceinline__ float to_compute(float x) { return x; }
__device__ __forceinline__ double to_compute(double x) { return x; }

__device__ __forceinline__ void round_to(float16& z, float x) { z.bits = half_of_float(x); }
__device__ __forceinline__ void round_to(bfloat16& z, float x) {
#if __CUDA_ARCH__ >= 800
    z.bits = bfloat_of_float(x);
#else
    uint32 u = __float_as_uint(x);
    z.bits = static_cast<unsigned short>(x != x ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}
__device__ __forceinline__ void round_to(float& z, float x) { z = x; }
__device__ __forceinline__ void round_to(float& z, double x) { z = static_cast<float>(x); }
__device__ __forceinline__ void round_to(double& z, double x) { z = x; }
template <typename Half>
__device__ __forceinline__ void round_to(Half& z, double x) { round_to(z, static_cast<float>(x)); }

// To nearest, ties to even.
template <typename To, typename From>
__device__ __forceinline__ To convert(From x) {
    To z;
    round_to(z, x);
    return z;
}

// `N` elements that travel in one memory access.
template <typename Type, int N>
struct alignas(sizeof(Type) * N) Vector { Type at[N]; };

template <typename Real>
__device__ __forceinline__ Real infinity() {
    if constexpr (sizeof(Real) == 8) return __longlong_as_double(0x7ff0000000000000LL);
    else return __uint_as_float(0x7f800000u);
}
