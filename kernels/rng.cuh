// Philox4x32-10 (Salmon et al., 2011), keyed by (seed, batch, head, query, key) and nothing else,
// so that every kernel, tile size and device drops the same elements. cuflash/_dropout.py is the
// same function in NumPy.
//
// A pair is dropped if its 32 random bits are below p.drop_below. The high 16 of them come from a
// call that eight pairs share; the low 16, from another, decide only where the high ones are those
// of p.drop_below, once in 65,536 pairs.
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

// Within 16 keys, j, j + 1, j + 8 and j + 9 for even j below 8 share their calls, in this group: the
// pattern is what one thread holds of a 16-column tensor-core accumulator.
__device__ __forceinline__ uint32 key_group(int64 j) {
    return static_cast<uint32>((j >> 4) * 4 + ((j & 7) >> 1));
}
// The high bits of a key group in queries i and i + 8 of 16: word 0, 1 (query i), 2, 3 for keys j
// and j + 1 in the low and high half, then j + 8 and j + 9.
__device__ __forceinline__ Words high_words(const Params& p, uint32 group, int64 b, int64 h, int64 i) {
    const uint32 rows = static_cast<uint32>((i >> 4) * 8 + (i & 7));
    return philox(p, group, rows, static_cast<uint32>(h), static_cast<uint32>(b));
}
__device__ __forceinline__ uint32 high_bits(const Words& words, int64 i, int64 j) {
    const uint32 word = i & 8 ? (j & 8 ? words.at[3] : words.at[2])
                              : (j & 8 ? words.at[1] : words.at[0]);
    return j & 1 ? word >> 16 : word & 0xffff;
}
// Whether a pair is dropped whose high bits are those of p.drop_below.
__device__ __forceinline__ bool is_dropped_by_low_bits(const Params& p, int64 b, int64 h, int64 i,
                                                    int64 j) {
    const Words words = philox(p, key_group(j), static_cast<uint32>(i), static_cast<uint32>(h),
                               static_cast<uint32>(b) | 0x80000000u);
    const uint32 word = j & 8 ? (j & 1 ? words.at[3] : words.at[2])
                              : (j & 1 ? words.at[1] : words.at[0]);
    return word >> 16 < (p.drop_below & 0xffff);
}
__device__ __forceinline__ bool is_dropped(const Params& p, const Words& high, int64 b, int64 h,
                                           int64 i, int64 j) {
    const uint32 bits = high_bits(high, i, j), limit = static_cast<uint32>(p.drop_below >> 16);
    return bits == limit ? is_dropped_by_low_bits(p, b, h, i, j) : bits < limit;
}
__device__ __forceinline__ bool is_dropped(const Params& p, int64 b, int64 h, int64 i, int64 j) {
    return is_dropped(p, high_words(p, key_group(j), b, h, i), b, h, i, j);
}
