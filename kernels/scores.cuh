// What happens to one score: visibility, softcap, bias, ALiBi, dropout (contract: section 1).
//
// Constants: BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT (ends of the band: causal and window),
// HAS_MASK, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, HAS_DROPOUT.
#pragma once
#include "params.cuh"
#include "rng.cuh"

// Whether a pair within the sequences can be hidden (an infinite bias hides too).
constexpr bool CAN_HIDE = HAS_LEFT || HAS_RIGHT || HAS_MASK || HAS_BIAS;

__device__ __forceinline__ int64 min64(int64 a, int64 b) { return a < b ? a : b; }
__device__ __forceinline__ int64 max64(int64 a, int64 b) { return a > b ? a : b; }

struct Range { int64 begin, end; };

// Keys that any of the queries [m, m + BLOCK_M) sees by its band; begin is a multiple of BLOCK_N.
__device__ __forceinline__ Range visible_keys(const Params& p, int64 m) {
    int64 last = min64(m + BLOCK_M, p.q_len) - 1;
    int64 begin = HAS_LEFT ? max64(0, m + p.offset - p.left) : 0;
    int64 end = HAS_RIGHT ? min64(p.kv_len, last + p.offset + p.right + 1) : p.kv_len;
    return {begin / BLOCK_N * BLOCK_N, end};
}

// Queries that see any of the keys [n, n + BLOCK_N) by their bands; begin a multiple of BLOCK_M.
__device__ __forceinline__ Range visible_queries(const Params& p, int64 n) {
    int64 last = min64(n + BLOCK_N, p.kv_len) - 1;
    int64 begin = HAS_RIGHT ? max64(0, n - p.offset - p.right) : 0;
    int64 end = HAS_LEFT ? min64(p.q_len, last - p.offset + p.left + 1) : p.q_len;
    return {begin / BLOCK_M * BLOCK_M, end};
}

// The order of blocks over tiles: sections of heads whose keys and values, or queries, fit in the L2
// cache together; in a section tile after tile, each of all heads. Without causal masks all tiles of
// a head follow each other, in sections of one head.
struct Turn {
    int64 head, tile;

    __device__ __forceinline__ Turn(int64 index, int64 tiles, int64 heads, int64 section) {
        const int64 first = index / (tiles * section) * section;
        const int64 together = min64(section, heads - first), rest = index - first * tiles;
        head = first + rest % together;
        tile = rest / together;
    }
};

// A tile of scores: queries from m, keys from n, of query head h in batch element b.
struct ScoreTile {
    int64 b, h, m, n;
    int rows, columns;   // how many exist
    int lo, hi;          // the band, in the tile's own coordinates: lo <= column - row <= hi
    Compute distance, slope;

    __device__ __forceinline__ ScoreTile(const Params& p, int64 b, int64 h, int64 m, int64 n)
        : b(b), h(h), m(m), n(n) {
        rows = static_cast<int>(min64(BLOCK_M, p.q_len - m));
        columns = static_cast<int>(min64(BLOCK_N, p.kv_len - n));
        int64 shift = m + p.offset - n;
        const int64 far = 1 << 30;
        lo = static_cast<int>(max64(-far, min64(far, shift - p.left)));
        hi = static_cast<int>(max64(-far, min64(far, shift + p.right)));
        if constexpr (HAS_ALIBI) {
            distance = static_cast<Compute>(m + p.alibi_offset - n);
            slope = p.alibi_slopes[b * p.q_heads + h];
        }
    }
    // Nothing is hidden or missing.
    __device__ __forceinline__ bool whole() const {
        return rows == BLOCK_M && columns == BLOCK_N && (!HAS_LEFT || lo <= 1 - BLOCK_M) &&
               (!HAS_RIGHT || hi >= BLOCK_N - 1) && !HAS_MASK;
    }
    __device__ __forceinline__ bool in_band(int row, int column) const {
        return column < columns && (!HAS_LEFT || column - row >= lo) &&
               (!HAS_RIGHT || column - row <= hi);
    }
};

// Whether a pair of the tile is visible.
__device__ __forceinline__ bool is_visible(const Params& p, const ScoreTile& t, int row,
                                           int column) {
    if (row >= t.rows || !t.in_band(row, column)) return false;
    if constexpr (!HAS_MASK) return true;
    const ScoreStrides& stride = p.mask_strides;
    return p.mask[t.b * stride.batch + t.h * stride.head + (t.m + row) * stride.query +
                  (t.n + column) * stride.key];
}

__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float exp_of(float x) {
    return exp2_approximate(x * 1.44269504088896341f);
}

// The bias of a pair of the tile.
__device__ __forceinline__ Compute bias_of(const Params& p, const ScoreTile& t, int row, int column) {
    if constexpr (!HAS_BIAS) return 0;
    if (row >= t.rows || column >= t.columns) return 0;
    const ScoreStrides& stride = p.bias_strides;
    return static_cast<Compute>(to_compute(
        p.bias[t.b * stride.batch + t.h * stride.head + (t.m + row) * stride.query +
               (t.n + column) * stride.key]));
}

// The logit of a pair of the tile, from <q, k>. `slope` becomes its derivative by the scaled
// product.
__device__ __forceinline__ Compute logit(const Params& p, const ScoreTile& t, int row, int column,
                                         Compute product, Compute bias, Compute& slope) {
    slope = 1;
    Compute s = product * p.scale;
    if constexpr (HAS_SOFTCAP) {
        Compute bent = tanh_of(s / p.softcap);
        slope = 1 - bent * bent;
        s = p.softcap * bent;
    }
    if constexpr (HAS_BIAS) s += bias;
    if constexpr (HAS_ALIBI) {
        Compute away = t.distance + static_cast<Compute>(row - column);
        s -= t.slope * (away < 0 ? -away : away);
    }
    return s;
}
