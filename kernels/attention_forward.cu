// Exact attention, forward, on tensor cores by mma.sync: float16, bfloat16, and float32 as TF32;
// sm_80 and newer (FlashAttention-2's design). A block takes BLOCK_M queries of one head; each warp
// owns 16 * M_TILES of its rows, so softmax needs no other warp. Scores and probabilities stay in
// registers.
//
// Grid: one-dimensional, each block takes tiles blockIdx.x, + gridDim.x, ...; causal tiles with most
// keys of a section first (scores.cuh). Threads: 32 x WARPS (mma.cuh). Shared memory:
//   queries [BLOCK_M], then STAGES x (keys [BLOCK_N], values [BLOCK_N], biases [BLOCK_M][BLOCK_N]),
//   rows in panels; 2 x MaskBits.
// With two stages the next keys and values arrive during a whole tile; with one, values arrive
// during q k^T and the next keys during p v.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, MIN_BLOCKS, STAGES,
// HAS_SINKS.
#include "mma_outputs.cuh"

constexpr int HEAD_WIDTH = (HEAD_DIM + 15) / 16 * 16, VALUE_WIDTH = (VALUE_DIM + 15) / 16 * 16;
using Queries = Panels<BLOCK_M, HEAD_WIDTH>;
using Keys = Panels<BLOCK_N, HEAD_WIDTH>;
using Values = Panels<BLOCK_N, VALUE_WIDTH>;
using Outs = Panels<BLOCK_M, VALUE_WIDTH>;
constexpr int STAGE = Keys::BYTES + Values::BYTES + BiasTile::BYTES;
static_assert(Queries::BYTES + STAGES * STAGE + 2 * MaskBits::BYTES == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");
static_assert(WARPS_M == WARPS, "a row lives in one warp");
static_assert(HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0, "pieces of 8 columns are whole");

struct State {
    float reference[ROWS], sum[ROWS];   // sum: the thread's share
    Sums<M_TILES, VALUE_WIDTH / 8> out;
};

// Products become scores (mma_scores.cuh), -inf where hidden.
__device__ __forceinline__ void to_scores(const Params& p, const ScoreTile& t, const MaskBits& mask,
                                          const BiasTile& biases, ScoreSums& s) {
    if constexpr (!FOLDS_SCALE) to_logits(p, t, biases, s, [](int, int, float) {});
    if (t.whole()) return;
    keep_branch();
    const Visible visible(p, t, mask);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (!visible.at(r, c)) at(s, r, c) = -infinity<float>();
}

// One step of the online softmax: scores become weights. The reference follows the row's maximum
// only when that has grown by more than SLACK; until then weights are at most 2^SLACK, and the sums
// need no new scale.
constexpr float SLACK = 8;

__device__ __forceinline__ void take_in(const Params& p, const ScoreTile& t, ScoreSums& s,
                                        State& state) {
    const float factor = factor_of(p);
    float largest[ROWS];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        largest[r] = at(s, r, 0);
#pragma unroll
        for (int c = 1; c < COLUMNS; ++c) largest[r] = fmaxf(largest[r], at(s, r, c));
        largest[r] = factor * over_row(largest[r], [](float x, float y) { return fmaxf(x, y); });
        grown |= largest[r] > state.reference[r] + SLACK;
    }
    if (__any_sync(~0u, grown)) {
        keep_branch();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (!(largest[r] > state.reference[r] + SLACK)) largest[r] = state.reference[r];
            const float shrink = largest[r] == state.reference[r]
                                     ? 1 : exp2_approximate(state.reference[r] - largest[r]);
            state.reference[r] = largest[r];
            state.sum[r] *= shrink;
#pragma unroll
            for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) *= shrink;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float safe = state.reference[r] == -infinity<float>() ? 0 : state.reference[r];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            float& weight = at(s, r, c);
            weight = exp2_approximate(fmaf(weight, factor, -safe));
            state.sum[r] += weight;
        }
    }
}

// Writes the warp's rows: by way of where its queries were, from `base` and `memory` on, if they fit.
__device__ __forceinline__ void write_rows(const Params& p, const ScoreTile& t, State& state,
                                           const Ends& ends, uint32 base, const unsigned char* memory) {
    Element* out = output_at(p, t);
    if constexpr (Outs::BYTES <= Queries::BYTES) {
        const Outs outs{base};
        __syncwarp();
        store_sums(outs, warp_row(), 0, state.out, [&](int r) { return ends.factors[r]; });
        __syncwarp();
        copy_rows<VALUE_DIM>(outs, memory, out, p.out_strides.row, warp_row(),
                             min(warp_row() + 16 * M_TILES, t.rows), lane_index(), 32);
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < VALUE_DIM / 8; ++c) {
                const int row = score_row(r), column = c * 8 + lane_index() % 4 * 2;
                Element* to = out + row * p.out_strides.row + column;
                if (row < t.rows)
                    store_pair(to, at(state.out, r, c * 2) * ends.factors[r],
                               at(state.out, r, c * 2 + 1) * ends.factors[r]);
            }
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Queries queries{shared_address(shared)};
    auto keys = [&](int stage) { return Keys{queries.base + Queries::BYTES + stage * STAGE}; };
    auto values = [&](int stage) { return Values{keys(stage).base + Keys::BYTES}; };
    auto biases = [&](int stage) {
        constexpr int FIRST = Queries::BYTES + Keys::BYTES + Values::BYTES;
        const uint32 offset = FIRST + stage * STAGE;
        return BiasTile{{queries.base + offset}, shared + offset};
    };
    auto mask = [&](int stage) {
        constexpr int FIRST = Queries::BYTES + STAGES * STAGE;
        return MaskBits{reinterpret_cast<uint32*>(shared + FIRST + stage * MaskBits::BYTES)};
    };

    const int64 row_tiles = (p.q_len + BLOCK_M - 1) / BLOCK_M, heads = p.batch * p.q_heads;
    // The long tiles of a last section would end late: of long sequences all heads are one.
    const int64 section = HAS_RIGHT && !HAS_BLOCKS && row_tiles > 8 ? heads : p.section_heads;
    const int64 works = HAS_BLOCKS ? p.works : row_tiles;   // of a head
    for (int64 tile = blockIdx.x; tile < works * heads; tile += gridDim.x) {
        const Turn<> turn(tile, works, heads, section);
        const int64 b = turn.head / p.q_heads, h = turn.head % p.q_heads;
        const int64 place = HAS_RIGHT && !HAS_BLOCKS ? works - 1 - turn.tile : turn.tile;
        const Work work = work_at(p, b, h, place);
        if (HAS_BLOCKS && work.tile < 0) continue;
        const int64 m = static_cast<int64>(work.tile) * BLOCK_M;
        const int64 kv_head = h / (p.q_heads / p.kv_heads);
        const Element* q = p.q + b * p.q_strides.batch + h * p.q_strides.head + m * p.q_strides.row;
        const Element* k = p.k + b * p.k_strides.batch + kv_head * p.k_strides.head;
        const Element* v = p.v + b * p.v_strides.batch + kv_head * p.v_strides.head;

        // On to a tile of keys in which a score is visible; its mask is written.
        int mask_stage = 0;
        auto seek = [&](KeyWalk& walk) {
            if constexpr (HAS_MASK)
                for (; walk.more(); walk.next(p))
                    if (__syncthreads_or(mask(mask_stage ^ 1).fill(p, walk.tile(p)))) break;
        };
        auto fetch_keys = [&](const KeyWalk& walk, int stage) {
            keys(stage).fetch(k + walk.at() * p.k_strides.row, p.k_strides.row, p.kv_len - walk.at(),
                              HEAD_DIM);
            if constexpr (HAS_BIAS) biases(stage).fetch(p, walk.tile(p));
        };
        auto fetch_values = [&](const KeyWalk& walk, int stage) {
            values(stage).fetch(v + walk.at() * p.v_strides.row, p.v_strides.row, p.kv_len - walk.at(),
                                VALUE_DIM);
        };

        __syncthreads();   // the tile before is done with shared memory
        queries.fetch(q, p.q_strides.row, p.q_len - m, HEAD_DIM);
        KeyWalk walk(p, b, h, m, work);
        seek(walk);
        if (walk.more()) {
            fetch_keys(walk, 0);
            if constexpr (STAGES == 2) fetch_values(walk, 0);
        }
        end_copies();

        State state;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            state.reference[r] = -infinity<float>();
            state.sum[r] = 0;
#pragma unroll
            for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) = 0;
        }
        for (int stage = 0; walk.more(); stage ^= STAGES - 1) {
            wait_copies<0>();
            __syncthreads();   // keys have arrived; all warps are done with the tile before
            mask_stage ^= 1;
            const int64 n = walk.at();
            const int bits = walk.now.bits;
            if constexpr (STAGES == 1) fetch_values(walk, 0);
            walk.next(p);
            if constexpr (STAGES == 2) {
                seek(walk);
                if (walk.more()) {
                    fetch_keys(walk, stage ^ 1);
                    fetch_values(walk, stage ^ 1);
                }
            }
            end_copies();

            ScoreSums s = {};
            multiply_rows<HEAD_WIDTH>(
                s, [&](uint32 (&to)[4], int t, int step) {
                    load_left(to, queries, warp_row(), t, step);
                }, keys(stage), 0);
            const ScoreTile t(p, b, h, m, n, bits);
            to_scores(p, t, mask(mask_stage), biases(stage), s);
            take_in(p, t, s, state);
            if constexpr (IS_TF32)
                for_scores(p, t, [&](int r, int c, bool dropped) {
                    if (dropped) at(s, r, c) = 0;
                });

            if constexpr (STAGES == 1) {
                seek(walk);
                wait_copies<0>();
                __syncthreads();   // values have arrived; all warps are done with the keys
                if (walk.more()) fetch_keys(walk, 0);
                end_copies();
            }
            multiply_columns<BLOCK_N>(
                state.out, [&](uint32 (&to)[4], int tile, int step) {
                    sums_as_left(to, s, tile, step);
                    drop_weights(to, p, t, tile, step);
                }, values(stage), 0);
        }
        wait_copies<0>();
        __syncthreads();   // queries have arrived, even if no key was visible: outputs take their place
        const ScoreTile t(p, b, h, m, 0);
        const bool is_split = HAS_BLOCKS && work.split >= 0;
        const Ends ends(p, t, state, is_split, work.split);
        if (is_split) {
            write_partial(p, t, state, ends, work.split);
            continue;
        }
        write_rows(p, t, state, ends, queries.base, shared);
        if constexpr (CAN_HIDE)
            ends.for_special(t, [&](int64 row, float lse) { make_output(p, b, h, row, lse); });
    }
}
