// dq on tensor cores by mma.sync, in a fixed order of summation: for float16, bfloat16, and float32 as
// TF32; sm_80 and newer. Built like attention_forward.cu: a block takes BLOCK_M queries, each warp
// 16 * M_TILES of its rows, whose scores and gradients stay in registers.
//
// Grid and threads: as attention_forward.cu. Shared memory: queries and dout [BLOCK_M], then STAGES x
// (keys, values [BLOCK_N], biases [BLOCK_M][BLOCK_N]), rows in panels; 2 x MaskBits.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, MIN_BLOCKS, STAGES.
#include "mma_gradients.cuh"
#include "pairs.cuh"

constexpr int HEAD_WIDTH = (HEAD_DIM + 15) / 16 * 16, VALUE_WIDTH = (VALUE_DIM + 15) / 16 * 16;
using Queries = Panels<BLOCK_M, HEAD_WIDTH>;
using Douts = Panels<BLOCK_M, VALUE_WIDTH>;
using Keys = Panels<BLOCK_N, HEAD_WIDTH>;
using Values = Panels<BLOCK_N, VALUE_WIDTH>;
constexpr int FIRST_STAGE = Queries::BYTES + Douts::BYTES;
constexpr int STAGE = Keys::BYTES + Values::BYTES + BiasTile::BYTES;
static_assert(FIRST_STAGE + STAGES * STAGE + 2 * MaskBits::BYTES == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");
static_assert(WARPS_M == WARPS, "a row lives in one warp");
static_assert(HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0, "pieces of 8 columns are whole");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward_query(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Queries queries{shared_address(shared)};
    const Douts douts{queries.base + Queries::BYTES};
    auto keys = [&](int stage) { return Keys{queries.base + FIRST_STAGE + stage * STAGE}; };
    auto values = [&](int stage) { return Values{keys(stage).base + Keys::BYTES}; };
    auto biases = [&](int stage) {
        const uint32 offset = FIRST_STAGE + (stage + 1) * STAGE - BiasTile::BYTES;
        return BiasTile{{queries.base + offset}, shared + offset};
    };
    auto mask = [&](int stage) {
        constexpr int FIRST = FIRST_STAGE + STAGES * STAGE;
        return MaskBits{reinterpret_cast<uint32*>(shared + FIRST + stage * MaskBits::BYTES)};
    };

    const int64 row_tiles = (p.q_len + BLOCK_M - 1) / BLOCK_M, heads = p.batch * p.q_heads;
    const int64 works = HAS_BLOCKS ? p.works : row_tiles;   // of a head
    for (int64 tile = blockIdx.x; tile < works * heads; tile += gridDim.x) {
        const Turn<> turn(tile, works, heads, p.section_heads);
        const int64 b = turn.head / p.q_heads, h = turn.head % p.q_heads;
        const int64 place = HAS_RIGHT && !HAS_BLOCKS ? works - 1 - turn.tile : turn.tile;
        const Work work = work_at(p, b, h, place);
        if (HAS_BLOCKS && work.tile < 0) continue;
        const int64 m = static_cast<int64>(work.tile) * BLOCK_M;
        const int64 kv_head = h / (p.q_heads / p.kv_heads);
        const Element* k = p.k + b * p.k_strides.batch + kv_head * p.k_strides.head;
        const Element* v = p.v + b * p.v_strides.batch + kv_head * p.v_strides.head;

        // On to a tile of keys in which a score is visible; its mask is written.
        int mask_stage = 0;
        auto seek = [&](KeyWalk& walk) {
            if constexpr (HAS_MASK)
                for (; walk.more(); walk.next(p))
                    if (__syncthreads_or(mask(mask_stage ^ 1).fill(p, walk.tile(p)))) break;
        };
        auto fetch = [&](const KeyWalk& walk, int stage) {
            const int64 n = walk.at();
            keys(stage).fetch(k + n * p.k_strides.row, p.k_strides.row, p.kv_len - n, HEAD_DIM);
            values(stage).fetch(v + n * p.v_strides.row, p.v_strides.row, p.kv_len - n, VALUE_DIM);
            if constexpr (HAS_BIAS) biases(stage).fetch(p, walk.tile(p));
        };

        __syncthreads();   // the tile before is done with shared memory
        queries.fetch(p.q + b * p.q_strides.batch + h * p.q_strides.head + m * p.q_strides.row,
                      p.q_strides.row, p.q_len - m, HEAD_DIM);
        douts.fetch(
            p.dout + b * p.dout_strides.batch + h * p.dout_strides.head + m * p.dout_strides.row,
            p.dout_strides.row, p.q_len - m, VALUE_DIM);
        KeyWalk walk(p, b, h, m, work);
        seek(walk);
        if (walk.more()) fetch(walk, 0);
        end_copies();

        const RowState rows(p, ScoreTile(p, b, h, m, 0));
        Sums<M_TILES, HEAD_WIDTH / 8> dq = {};
        for (int stage = 0; walk.more(); stage ^= STAGES - 1) {
            wait_copies<0>();
            __syncthreads();   // keys and values have arrived; all warps are done with the tile before
            mask_stage ^= 1;
            const int64 n = walk.at();
            const int bits = walk.now.bits;
            walk.next(p);
            if constexpr (STAGES == 2) {
                seek(walk);
                if (walk.more()) fetch(walk, stage ^ 1);
                end_copies();
            }
            ScoreSums s = {}, dp = {};
            multiply_rows<HEAD_WIDTH>(
                s, [&](uint32 (&to)[4], int t, int step) {
                    load_left(to, queries, warp_row(), t, step);
                }, keys(stage), 0);
            multiply_rows<VALUE_WIDTH>(
                dp, [&](uint32 (&to)[4], int t, int step) {
                    load_left(to, douts, warp_row(), t, step);
                }, values(stage), 0);
            const ScoreTile t(p, b, h, m, n, bits);
            to_gradients(p, t, mask(mask_stage), biases(stage), rows, s, dp);
            multiply_columns<BLOCK_N>(
                dq, [&](uint32 (&to)[4], int t, int step) {
                    sums_as_left(to, dp, t, step);
                }, keys(stage), 0);
            if constexpr (STAGES == 1) {
                seek(walk);
                __syncthreads();   // all warps are done with keys and values
                if (walk.more()) fetch(walk, 0);
                end_copies();
            }
        }
        wait_copies<0>();
        __syncthreads();

        if (HAS_BLOCKS && work.split >= 0) {
            constexpr int SIZE = BLOCK_M * HEAD_DIM;
            store_floats<HEAD_DIM>(partial(p, p.partials, turn.head, work.split, SIZE), warp_row(), 0, dq,
                                   [](int) { return 1.0f; });
            continue;
        }
        // The warp's rows of dq take the place of its queries.
        Element* target = p.dq + b * p.dq_strides.batch + h * p.dq_strides.head +
                          m * p.dq_strides.row;
        const int last = static_cast<int>(min64(warp_row() + 16 * M_TILES, p.q_len - m));
        store_sums(queries, warp_row(), 0, dq, [&](int) { return p.scale; });
        __syncwarp();
        copy_rows<HEAD_DIM>(queries, shared, target, p.dq_strides.row, warp_row(), last,
                            lane_index(), 32);
        __syncwarp();
        if constexpr (CAN_HIDE)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const bool ask = score_row(r) < last && row_is_special(dq, r);
                for (uint32 asked = rows_that(ask); asked != 0; asked &= asked - 1)
                    make_dq(p, b, h, m + __shfl_sync(~0u, score_row(r), __ffs(asked) - 1));
            }
    }
}
