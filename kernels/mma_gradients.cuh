// The gradients of a tile of scores in the fragments of mma.cuh, recomputed.
#pragma once
#include "mma_scores.cuh"

// lse, in units of base 2, and delta of the thread's rows of scores.
struct RowState {
    float lse[ROWS], delta[ROWS];

    __device__ __forceinline__ RowState(const Params& p, const ScoreTile& t) {
        const int64 first = (t.b * p.q_heads + t.h) * p.q_len + t.m;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool exists = score_row(r) < t.rows;
            lse[r] = exists ? p.lse[first + score_row(r)] * LOG2_E : infinity<float>();
            delta[r] = exists ? p.delta[first + score_row(r)] : 0;
            if (lse[r] == -infinity<float>()) lse[r] = infinity<float>();   // the row sees nothing
        }
    }
};

// From products s = <q, k> and dp = <dout, v>: s becomes the probabilities that v was weighted
// with, without 1 / (1 - dropout), and dp the gradients of the products s, without the scale. Both
// are 0 where hidden.
__device__ __forceinline__ void to_gradients(const Params& p, const ScoreTile& t, const MaskBits& mask,
                                             const BiasTile& biases, const RowState& rows,
                                             ScoreSums& s, ScoreSums& dp) {
    const float factor = factor_of(p);
    auto centre = [&](int r, int c, bool dropped) {
        float& x = at(dp, r, c);
        if (dropped) x = 0;
        x = HAS_DROPOUT ? fmaf(x, p.keep_scale, -rows.delta[r]) : x - rows.delta[r];
    };
    if constexpr (HAS_SOFTCAP) for_scores(p, t, centre);
    if constexpr (!FOLDS_SCALE)
        to_logits(p, t, biases, s, [&](int r, int c, float slope) {
            if (HAS_SOFTCAP) at(dp, r, c) *= slope;
        });
    for_scores(p, t, [&](int r, int c, bool dropped) {
        float &score = at(s, r, c), &gradient = at(dp, r, c);
        if (!HAS_SOFTCAP) centre(r, c, dropped);
        if (HAS_BIAS && score == -infinity<float>()) gradient = 0;
        score = exp2_approximate(fmaf(score, factor, -rows.lse[r]));
        gradient *= score;
        if (dropped) score = 0;
    });
    if (t.whole()) return;
    keep_branch();
    const Visible visible(p, t, mask);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (!visible.at(r, c)) at(s, r, c) = at(dp, r, c) = 0;
}
