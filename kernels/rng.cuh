// Philox4x32-10 (Salmon et al., 2011), keyed by (seed, batch, head, query, key) and nothing else,
// so that every kernel, tile size and device drops the same elements. cuflash/_dropout.py is the
// same function in NumPy.
#pragma once
#include "types.cuh"

struct Words { uint32 at[4]; };

__device__ __forceinline__ Words philox(uint32 c0, uint32 c1, uint32 c2, uint32 c3, uint64 seed) {
    uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        uint64 product0 = static_cast<uint64>(0xD2511F53u) * c0;
        uint64 product1 = static_cast<uint64>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32>(product1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32>(product1);
        c2 = static_cast<uint32>(product0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32>(product0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

// Four keys share one call: within 16 keys, j, j + 1, j + 8 and j + 9 for even j below 8. The
// pattern is what one thread holds of a 16-column tensor-core accumulator.
__device__ __forceinline__ Words random_words(uint64 seed, int64 b, int64 h, int64 i, int64 j) {
    uint32 group = static_cast<uint32>((j >> 4) * 4 + ((j & 7) >> 1));
    return philox(group, static_cast<uint32>(i), static_cast<uint32>(h), static_cast<uint32>(b), seed);
}
__device__ __forceinline__ uint32 word_of(const Words& words, int64 j) {
    return j & 8 ? (j & 1 ? words.at[3] : words.at[2]) : (j & 1 ? words.at[1] : words.at[0]);
}
