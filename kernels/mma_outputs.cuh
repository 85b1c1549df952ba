// Weights and outputs of a forward pass in the fragments of mma.cuh.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, HAS_SINKS.
#pragma once
#include "mma_scores.cuh"
#include "pairs.cuh"

// Of the weights of 16 rows and 16 keys as a left factor, those that dropout drops become 0.
__device__ __forceinline__ void drop_weights(uint32 (&to)[4], const Params& p, const ScoreTile& t,
                                             int tile, int step) {
    if constexpr (HAS_DROPOUT && !IS_TF32) {
        const Words words = score_words(p, t, tile * 2, step * 4);
        const uint32 kept_below = p.drops_above ? ~0u : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)   // to: rows r, r + 8, then 8 columns on; words: the other way
            to[i] &= mask_below(words.at[i % 2 * 2 + i / 2], p.drop_limits) ^ ~kept_below;
    }
}

// The thread's rows at the end of a pass: what their sums are to be multiplied with, and whether
// those hold an infinity or NaN.
struct Ends {
    float lse[ROWS], factors[ROWS];
    bool special[ROWS];

    // Writes lse, too: of the rows, or of a partial result of them.
    template <typename State>
    __device__ __forceinline__ Ends(const Params& p, const ScoreTile& t, State& state, bool is_split,
                                    int split) {
        float* to = is_split ? partial(p, p.partial_lse, t.b * p.q_heads + t.h, split, BLOCK_M)
                             : p.lse + (t.b * p.q_heads + t.h) * p.q_len + t.m;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = score_row(r);
            float sum = over_row(state.sum[r], [](float x, float y) { return x + y; });
            float top = state.reference[r], factor = 1;
            if (HAS_SINKS && !is_split) {
                const float sink = p.sinks[t.h] * LOG2_E;
                top = fmaxf(top, sink);
                const float safe = top == -infinity<float>() ? 0 : top;
                factor = exp2_approximate(state.reference[r] - safe);
                sum = sum * factor + exp2_approximate(sink - safe);
            }
            factors[r] = sum == 0 ? 0 : factor / sum;
            if constexpr (HAS_DROPOUT) factors[r] *= p.keep_scale;
            lse[r] = sum == 0 ? -infinity<float>() : top / LOG2_E + log_of(sum);
            special[r] = row < t.rows && row_is_special(state.out, r);
            if ((is_split || p.lse != nullptr) && row < t.rows && lane_index() % 4 == 0) to[row] = lse[r];
        }
    }
    __device__ __forceinline__ bool any_special() const {
        bool any = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) any |= special[r];
        return CAN_HIDE && __any_sync(~0u, any);
    }
    // Calls `make(row, lse)` for each special row of the warp.
    template <typename Make>
    __device__ __forceinline__ void for_special(const ScoreTile& t, Make make) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            for (uint32 rows = rows_that(special[r]); rows != 0; rows &= rows - 1) {
                const int lane = __ffs(rows) - 1;
                const int64 row = t.m + __shfl_sync(~0u, score_row(r), lane);
                make(row, __shfl_sync(~0u, lse[r], lane));
            }
    }
};

// Writes the sums of a partial result.
template <typename State>
__device__ __forceinline__ void write_partial(const Params& p, const ScoreTile& t, State& state,
                                              const Ends& ends, int split) {
    constexpr int SIZE = BLOCK_M * VALUE_DIM;
    store_floats<VALUE_DIM>(partial(p, p.partials, t.b * p.q_heads + t.h, split, SIZE), warp_row(), 0,
                            state.out, [&](int r) { return ends.factors[r]; });
}

// Where a tile's outputs go.
__device__ __forceinline__ Element* output_at(const Params& p, const ScoreTile& t) {
    return p.out + t.b * p.out_strides.batch + t.m * p.out_strides.row + t.h * p.out_strides.head;
}
