// What happens to one score: visibility, softcap, bias, ALiBi, dropout (contract: section 1).
//
// Constants: BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT (ends of the band: causal and window),
// HAS_MASK, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, HAS_DROPOUT.
#pragma once
#include "params.cuh"
#include "rng.cuh"
#include "tile.cuh"

constexpr int ROWS = BLOCK_M / THREADS_M;      // scores of one thread
constexpr int COLUMNS = BLOCK_N / THREADS_N;
static_assert(ROWS * COLUMNS <= 64, "visible_bits holds 64 scores");
constexpr int SCORE_STRIDE = BLOCK_N + 2 * PAD;   // of tiles of scores in shared memory
static_assert(BLOCK_N % 16 == 0, "random words are shared within 16 keys");

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

// Bit r * COLUMNS + c: the thread's score (r, c) is visible.
__device__ __forceinline__ uint64 visible_bits(const Params& p, const ScoreTile& t) {
    if (t.whole()) return ~0ull;
    const unsigned char* mask = nullptr;
    if constexpr (HAS_MASK)
        mask = p.mask + t.b * p.mask_strides.batch + t.h * p.mask_strides.head +
               t.m * p.mask_strides.query + t.n * p.mask_strides.key;
    uint64 bits = 0;
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r)
#pragma unroll 1
        for (int c = 0; c < COLUMNS; ++c) {
            int row = thread_row() + r * THREADS_M, column = thread_column() + c * THREADS_N;
            bool visible = row < t.rows && t.in_band(row, column);
            if constexpr (HAS_MASK)
                visible = visible && mask[row * p.mask_strides.query + column * p.mask_strides.key];
            bits |= static_cast<uint64>(visible) << (r * COLUMNS + c);
        }
    return bits;
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

// The logit of the thread's score (r, c) from <q, k>. `slope` becomes its derivative by the
// scaled product.
__device__ __forceinline__ Compute logit(const Params& p, const ScoreTile& t, int r, int c,
                                         Compute product, Compute& slope) {
    slope = 1;
    int row = thread_row() + r * THREADS_M, column = thread_column() + c * THREADS_N;
    Compute s = product * p.scale;
    if constexpr (HAS_SOFTCAP) {
        Compute bent = tanh_of(s / p.softcap);
        slope = 1 - bent * bent;
        s = p.softcap * bent;
    }
    if constexpr (HAS_BIAS)
        if (row < t.rows && column < t.columns) {
            const ScoreStrides& stride = p.bias_strides;
            s += static_cast<Compute>(to_compute(
                p.bias[t.b * stride.batch + t.h * stride.head + (t.m + row) * stride.query +
                       (t.n + column) * stride.key]));
        }
    if constexpr (HAS_ALIBI) {
        Compute away = t.distance + static_cast<Compute>(row - column);
        s -= t.slope * (away < 0 ? -away : away);
    }
    return s;
}

// Turns the thread's products into logits, -inf where hidden.
__device__ __forceinline__ void to_logits(const Params& p, const ScoreTile& t, uint64 visible,
                                          Compute (&s)[ROWS][COLUMNS]) {
    Compute slope;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) s[r][c] = logit(p, t, r, c, s[r][c], slope);
    if (t.whole()) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (!(visible >> (r * COLUMNS + c) & 1)) s[r][c] = -infinity<Compute>();
}

// Bit r * COLUMNS + c: dropout keeps the thread's score (r, c).
__device__ __forceinline__ uint64 kept_bits(const Params& p, const ScoreTile& t) {
    if constexpr (!HAS_DROPOUT) return ~0ull;
    constexpr int SHARING = THREADS_N == 8 ? 2 : 1;   // keys 8 apart share their random words
    uint64 bits = 0;
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r)
#pragma unroll 1
        for (int c = 0; c < COLUMNS; c += SHARING) {
            int64 i = t.m + thread_row() + r * THREADS_M;
            int64 j = t.n + thread_column() + c * THREADS_N;
            Words words = random_words(p.seed, t.b, t.h, i, j);
            for (int next = 0; next < SHARING; ++next) {
                uint64 keep = word_of(words, j + 8 * next) >= p.drop_below;
                bits |= keep << (r * COLUMNS + c + next);
            }
        }
    return bits;
}
