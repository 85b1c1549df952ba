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

// Writes the rows of the warp, or a partial result of them. THROUGH_SHARED: by way of its rows of
// `outs`, which begins at `memory`; nobody else uses them now.
template <bool THROUGH_SHARED, bool CALLS_NOTHING, typename State, typename Outs>
__device__ __forceinline__ void write_rows(const Params& p, const ScoreTile& t, State& state,
                                           const Outs& outs, unsigned char* memory, int split) {
    Element* out = p.out + t.b * p.out_strides.batch + t.m * p.out_strides.row +
                   t.h * p.out_strides.head;
    const bool is_split = HAS_BLOCKS && split >= 0;
    float* lse = is_split ? partial(p, p.partial_lse, t.b * p.q_heads + t.h, split, BLOCK_M)
                          : p.lse + (t.b * p.q_heads + t.h) * p.q_len + t.m;
    float row_lse[ROWS], factors[ROWS];
    bool special[ROWS];
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
        row_lse[r] = sum == 0 ? -infinity<float>() : top / LOG2_E + log_of(sum);
        special[r] = row < t.rows && row_is_special(state.out, r);
        if ((is_split || p.lse != nullptr) && row < t.rows && lane_index() % 4 == 0)
            lse[row] = row_lse[r];
    }
    if (is_split) {
        constexpr int SIZE = BLOCK_M * VALUE_DIM;
        store_floats<VALUE_DIM>(partial(p, p.partials, t.b * p.q_heads + t.h, split, SIZE), warp_row(),
                                0, state.out, [&](int r) { return factors[r]; });
        return;
    }
    if constexpr (THROUGH_SHARED) {
        __syncwarp();
        store_sums(outs, warp_row(), 0, state.out, [&](int r) { return factors[r]; });
        __syncwarp();
        copy_rows<VALUE_DIM>(outs, memory, out, p.out_strides.row, warp_row(),
                             min(warp_row() + 16 * M_TILES, t.rows), lane_index(), 32);
        __syncwarp();
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < VALUE_DIM / 8; ++c) {
                const int row = score_row(r), column = c * 8 + lane_index() % 4 * 2;
                Element* to = out + row * p.out_strides.row + column;
                if (row < t.rows)
                    store_pair(to, at(state.out, r, c * 2) * factors[r],
                               at(state.out, r, c * 2 + 1) * factors[r]);
            }
        __syncwarp();
    }
    if constexpr (CAN_HIDE)
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            for (uint32 rows = rows_that(special[r]); rows != 0; rows &= rows - 1) {
                const int lane = __ffs(rows) - 1;
                const int64 row = t.m + __shfl_sync(~0u, score_row(r), lane);
                const float own_lse = __shfl_sync(~0u, row_lse[r], lane);
                if constexpr (CALLS_NOTHING) make_output_here(p, t.b, t.h, row, own_lse);
                else make_output(p, t.b, t.h, row, own_lse);
            }
}

