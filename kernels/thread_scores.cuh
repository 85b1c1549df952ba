// What happens to the scores of one thread of the generic kernels, ROWS x COLUMNS of a tile
// (tile.cuh).
#pragma once
#include "scores.cuh"
#include "tile.cuh"

static_assert(ROWS * COLUMNS <= 64, "visible_bits holds 64 scores");

// Bit r * COLUMNS + c: the thread's score (r, c) is visible.
__device__ __forceinline__ uint64 visible_bits(const Params& p, const ScoreTile& t) {
    if (t.whole()) return ~0ull;
    uint64 bits = 0;
#pragma unroll 1
    for (int r = 0; r < ROWS; ++r)
#pragma unroll 1
        for (int c = 0; c < COLUMNS; ++c) {
            uint64 visible = is_visible(p, t, score_row(r), score_column(c));
            bits |= visible << (r * COLUMNS + c);
        }
    return bits;
}

// The logit of the thread's score (r, c), from the product <q, k>.
__device__ __forceinline__ Compute score_logit(const Params& p, const ScoreTile& t, int r, int c,
                                               Compute product, Compute& slope) {
    const int row = score_row(r), column = score_column(c);
    return logit(p, t, row, column, product, bias_of(p, t, row, column), slope);
}

// Turns the thread's products into logits, -inf where hidden.
__device__ __forceinline__ void to_logits(const Params& p, const ScoreTile& t, uint64 visible,
                                          Compute (&s)[ROWS][COLUMNS]) {
    Compute slope;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) s[r][c] = score_logit(p, t, r, c, s[r][c], slope);
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
            int64 i = t.m + score_row(r);
            int64 j = t.n + score_column(c);
            Words words = random_words(p, key_group(j), t.b, t.h, i);
            for (int next = 0; next < SHARING; ++next) {
                uint64 keep = !is_dropped(p, words, i, j + 8 * next);
                bits |= keep << (r * COLUMNS + c + next);
            }
        }
    return bits;
}
