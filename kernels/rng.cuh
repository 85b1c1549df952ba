// Philox4x32-10 (Salmon et al., 2011), keyed by (seed, batch, head, query, key) and nothing else,
// so that every kernel, tile size and device drops the same elements. cuflash/_dropout.py is the
// same function in NumPy.
//
// A pair has 15 random bits; eight pairs share a call. The rarer of being kept and dropped happens to
// numbers below a limit of at most 2^14, where bits are ordered as the float16 numbers that they are:
// two pairs are compared at once (drops_of).
#pragma once
#include "params.cuh"

struct Words { uint32 at[4]; };

__device__ __forceinline__ Words philox(const Params& p, uint32 c0, uint32 c1, uint32 c2, uint32 c3) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        uint64 product0 = static_cast<uint64>(0xD2511F53u) * c0;
        uint64 product1 = static_cast<uint64>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32>(product1 >> 32) ^ c1 ^ p.round_keys[round][0];
        c1 = static_cast<uint32>(product1);
        c2 = static_cast<uint32>(product0 >> 32) ^ c3 ^ p.round_keys[round][1];
        c3 = static_cast<uint32>(product0);
    }
    return {c0, c1, c2, c3};
}

// Within 16 keys, j, j + 1, j + 8 and j + 9 for even j below 8 share their call, in this group: the
// pattern is what one thread holds of a 16-column tensor-core accumulator.
__device__ __forceinline__ uint32 key_group(int64 j) {
    return static_cast<uint32>((j >> 4) * 4 + ((j & 7) >> 1));
}
// The random bits of a key group in queries i and i + 8 of 16: word 0, 1 (query i), 2, 3 for keys j
// and j + 1 in the low and high half, then j + 8 and j + 9. The highest bit of a half is not used.
__device__ __forceinline__ Words random_words(const Params& p, uint32 group, int64 b, int64 h,
                                              int64 i) {
    const uint32 rows = static_cast<uint32>((i >> 4) * 8 + (i & 7));
    return philox(p, group, rows, static_cast<uint32>(h), static_cast<uint32>(b));
}
__device__ __forceinline__ bool is_dropped(const Params& p, const Words& words, int64 i, int64 j) {
    const uint32 word = i & 8 ? (j & 8 ? words.at[3] : words.at[2])
                              : (j & 8 ? words.at[1] : words.at[0]);
    const uint32 bits = (j & 1 ? word >> 16 : word) & 0x7fff;
    return (bits < (p.drop_limits & 0x7fff)) != p.drops_above;
}
__device__ __forceinline__ bool is_dropped(const Params& p, int64 b, int64 h, int64 i, int64 j) {
    return is_dropped(p, random_words(p, key_group(j), b, h, i), i, j);
}
