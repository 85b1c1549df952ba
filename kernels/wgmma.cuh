// The matrix products of Hopper (wgmma, sm_90a), 64 rows x N columns, 16 deep: a function for each N and
// type. mma_sm90.cuh tells where factors and sums lie.
#pragma once
#include "types.cuh"

// rows: sums (+)= a b^T, both from shared memory; columns: sums += a b, a from registers.
template <typename Type, int N> struct Wgmma;

// HIGH is the upper half of all descriptors: 1024 bytes from eight rows to the next, swizzled.
#define WGMMA(TYPE, NAME, N, REGISTERS, SUMS, P0, P1, P2, P3, P4)                                        \
    template <> struct Wgmma<TYPE, N> {                                                                 \
        static __device__ __forceinline__ void rows(float (&d)[N / 2], uint32 a, uint32 b, int add) {   \
            asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %" #P2 ", 0;\n\t"               \
                         "mov.b64 a, {%" #P0 ", " HIGH "}; mov.b64 b, {%" #P1 ", " HIGH "};\n\t"        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                \
                         " {" REGISTERS "}, a, b, p, 1, 1, 0, 0;}"                                      \
                         : SUMS : "r"(a), "r"(b), "r"(add));                                            \
        }                                                                                               \
        static __device__ __forceinline__ void columns(float (&d)[N / 2], const uint32 (&a)[4],         \
                                                       uint32 b) {                                      \
            asm volatile("{.reg .b64 b; mov.b64 b, {%" #P4 ", " HIGH "};\n\t"                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                \
                         " {" REGISTERS "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, b, 1, 1, 1, 1;}"  \
                         : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                  \
        }                                                                                               \
    };
#define HIGH "0x40000040"

// Eight registers, by name and as sums.
#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define S(I)                                                                                           \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]),          \
        "+f"(d[I + 6]), "+f"(d[I + 7])
#define R_64 R0 ", " R1 ", " R2 ", " R3
#define S_64 S(0), S(8), S(16), S(24)
#define R_80 R_64 ", " R4
#define S_80 S_64, S(32)
#define R_96 R_80 ", " R5
#define S_96 S_80, S(40)
#define R_112 R_96 ", " R6
#define S_112 S_96, S(48)
#define R_128 R_112 ", " R7
#define S_128 S_112, S(56)
#define R_160 R_128 ", " R8 ", " R9
#define S_160 S_128, S(64), S(72)
#define R_176 R_160 ", " R10
#define S_176 S_160, S(80)
#define R_192 R_176 ", " R11
#define S_192 S_176, S(88)
#define R_256 R_192 ", " R12 ", " R13 ", " R14 ", " R15
#define S_256 S_192, S(96), S(104), S(112), S(120)

WGMMA(float16, "f16", 64, R_64, S_64, 32, 33, 34, 35, 36)
WGMMA(bfloat16, "bf16", 64, R_64, S_64, 32, 33, 34, 35, 36)
WGMMA(float16, "f16", 80, R_80, S_80, 40, 41, 42, 43, 44)
WGMMA(bfloat16, "bf16", 80, R_80, S_80, 40, 41, 42, 43, 44)
WGMMA(float16, "f16", 96, R_96, S_96, 48, 49, 50, 51, 52)
WGMMA(bfloat16, "bf16", 96, R_96, S_96, 48, 49, 50, 51, 52)
WGMMA(float16, "f16", 112, R_112, S_112, 56, 57, 58, 59, 60)
WGMMA(bfloat16, "bf16", 112, R_112, S_112, 56, 57, 58, 59, 60)
WGMMA(float16, "f16", 128, R_128, S_128, 64, 65, 66, 67, 68)
WGMMA(bfloat16, "bf16", 128, R_128, S_128, 64, 65, 66, 67, 68)
WGMMA(float16, "f16", 160, R_160, S_160, 80, 81, 82, 83, 84)
WGMMA(bfloat16, "bf16", 160, R_160, S_160, 80, 81, 82, 83, 84)
WGMMA(float16, "f16", 176, R_176, S_176, 88, 89, 90, 91, 92)
WGMMA(bfloat16, "bf16", 176, R_176, S_176, 88, 89, 90, 91, 92)
WGMMA(float16, "f16", 192, R_192, S_192, 96, 97, 98, 99, 100)
WGMMA(bfloat16, "bf16", 192, R_192, S_192, 96, 97, 98, 99, 100)
WGMMA(float16, "f16", 256, R_256, S_256, 128, 129, 130, 131, 132)
WGMMA(bfloat16, "bf16", 256, R_256, S_256, 128, 129, 130, 131, 132)
