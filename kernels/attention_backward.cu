// Gradients of q, k and v on tensor cores by mma.sync: float16, bfloat16, and float32 as TF32; sm_80
// and newer. A block takes BLOCK_N keys of one kv head and walks over the queries of its group.
// Probabilities and score gradients pass through shared memory as elements, so that each product is
// shared by the warps in the way that suits it. Mathematics: attention_backward_generic.cu.
//
// WARPS_M warps with the same keys of a tile of scores are a group: they share the rows of dk and
// dv of these keys too, so that only dq needs the gradients of all groups.
//
// Grid: one-dimensional over (key tile, kv head, batch). Threads: 32 x WARPS. Shared memory, in
// panels: keys and values [BLOCK_N], probabilities [BLOCK_M][BLOCK_N], then STAGES x (queries, dout
// [BLOCK_M], gradients, biases [BLOCK_M][BLOCK_N]); 2 x MaskBits.
// With two stages, the next queries and dout arrive during a whole step, and dq of a step is made
// in the next one: by half of the warps first, by the others last, so that the tensor cores have
// work from some while the others are busy with probabilities. With one stage, the next queries
// and dout arrive during dq.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, MIN_BLOCKS, STAGES,
// QUERY_WARPS (warps that split the rows of dq; the others its columns), ADD_DQ (else
// attention_backward_query.cu makes dq).
#include "mma_gradients.cuh"
#include "pairs.cuh"

constexpr int HEAD_WIDTH = (HEAD_DIM + 15) / 16 * 16, VALUE_WIDTH = (VALUE_DIM + 15) / 16 * 16;
using Queries = Panels<BLOCK_M, HEAD_WIDTH>;
using Douts = Panels<BLOCK_M, VALUE_WIDTH>;
using Keys = Panels<BLOCK_N, HEAD_WIDTH>;
using Values = Panels<BLOCK_N, VALUE_WIDTH>;
using Scores = Panels<BLOCK_M, BLOCK_N>;
constexpr int FIRST_STAGE = Keys::BYTES + Values::BYTES + Scores::BYTES;
constexpr int STAGE = Queries::BYTES + Douts::BYTES + Scores::BYTES + BiasTile::BYTES;
static_assert(FIRST_STAGE + STAGES * STAGE + 2 * MaskBits::BYTES == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");
static_assert(HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0, "pieces of 8 columns are whole");

// A product of HEIGHT rows and LENGTH columns: rows split over ALONG warps, columns over the others
// in steps of 16; the last ones may lie beyond LENGTH, but not beyond the panels. Warps with the
// same rows follow each other.
template <int HEIGHT, int LENGTH_, int ALONG>
struct Share {
    static constexpr int LENGTH = LENGTH_, WIDTH = (LENGTH + 15) / 16 * 16;
    static constexpr int ACROSS = WARPS / ALONG, TILES = HEIGHT / (16 * ALONG);
    static constexpr int STEPS = (WIDTH / 16 + ACROSS - 1) / ACROSS;
    static_assert(HEIGHT % (16 * ALONG) == 0 && WARPS % ALONG == 0, "warps share the rows evenly");
    static_assert(STEPS * ACROSS * 16 <= (WIDTH + 63) / 64 * 64, "columns lie within the panels");
    static constexpr bool FILLED = STEPS * ACROSS * 16 == LENGTH;
    using Product = Sums<TILES, STEPS * 2>;

    static __device__ __forceinline__ int row() { return warp_index() / ACROSS * 16 * TILES; }
    static __device__ __forceinline__ int step() { return warp_index() % ACROSS * STEPS; }
    static __device__ __forceinline__ int row(int r) {
        return row() + r / 2 * 16 + r % 2 * 8 + lane_index() / 4;
    }
};
using KeyShare = Share<BLOCK_N, HEAD_DIM, WARPS_N>;
using ValueShare = Share<BLOCK_N, VALUE_DIM, WARPS_N>;
using QueryShare = Share<BLOCK_M, HEAD_DIM, QUERY_WARPS>;

// Scores in registers to shared memory, as elements.
__device__ __forceinline__ void store_scores(const Scores& tile, ScoreSums& s) {
    constexpr int PIECES = WARP_COLUMNS / 8, CHUNKS = 8 / Scores::CHUNK;   // of a piece
    static_assert((PIECES & (PIECES - 1)) == 0, "a warp's first chunk has no bit in common with others");
    const int pair = lane_index() % 4 * 2;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const uint32 first = tile.at(score_row(r), (warp_column() + pair) / Scores::CHUNK) +
                             pair % Scores::CHUNK * sizeof(Element);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            store_shared_pair(
                Element{},
                (first ^ piece * CHUNKS % 8 * 16) + piece * CHUNKS / 8 * Scores::PANEL,
                at(s, r, piece * 2), at(s, r, piece * 2 + 1));
    }
}

// Adds a product to the sums of dq, without the scale. Those lie as the fragments of products do:
// for each 16 queries of a head and 8 channels the four numbers of each lane (ptx.cuh, share_index).
__device__ __forceinline__ void add_dq(const Params& p, const ScoreTile& t,
                                       const QueryShare::Product& dq) {
    using Share = QueryShare;
    const int64 row_blocks = (p.q_len + 15) / 16;
    const int64 block = (t.b * p.q_heads + t.h) * row_blocks + (t.m + Share::row()) / 16;
    float* sums = p.sums + (block * (HEAD_DIM / 8) + Share::step() * 2) * 128;
#pragma unroll
    for (int tile = 0; tile < Share::TILES; ++tile) {
        if (Share::row() + tile * 16 >= t.rows) break;
#pragma unroll
        for (int piece = 0; piece < Share::STEPS * 2; ++piece) {
            if (Share::FILLED || Share::step() * 2 + piece < HEAD_DIM / 8)
                add_share(sums + (tile * (HEAD_DIM / 8) + piece) * 128, dq[tile][piece]);
        }
    }
}

// Bit r: the thread's row r of a product holds an infinity or NaN.
template <int TILES, int PIECES>
__device__ __forceinline__ int special_rows(const Sums<TILES, PIECES>& sums) {
    int special = 0;
#pragma unroll
    for (int r = 0; r < 2 * TILES; ++r) special |= row_is_special(sums, r) << r;
    return special;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Keys keys{shared_address(shared)};
    const Values values{keys.base + Keys::BYTES};
    const Scores probabilities{values.base + Values::BYTES};
    auto queries = [&](int stage) { return Queries{keys.base + FIRST_STAGE + stage * STAGE}; };
    auto douts = [&](int stage) { return Douts{queries(stage).base + Queries::BYTES}; };
    auto gradients = [&](int stage) { return Scores{douts(stage).base + Douts::BYTES}; };
    auto biases = [&](int stage) {
        const uint32 offset = FIRST_STAGE + (stage + 1) * STAGE - BiasTile::BYTES;
        return BiasTile{{keys.base + offset}, shared + offset};
    };
    auto mask = [&](int stage) {
        constexpr int FIRST = FIRST_STAGE + STAGES * STAGE;
        return MaskBits{reinterpret_cast<uint32*>(shared + FIRST + stage * MaskBits::BYTES)};
    };

    const int64 key_tiles = (p.kv_len + BLOCK_N - 1) / BLOCK_N;
    const int64 heads = p.batch * p.kv_heads, group = p.q_heads / p.kv_heads;
    const int64 works = HAS_BLOCKS ? p.works : key_tiles;   // of a head
    for (int64 tile = blockIdx.x; tile < works * heads; tile += gridDim.x) {
        const Turn<> turn(tile, works, heads, max64(1, p.section_heads / group));
        const int64 b = turn.head / p.kv_heads, kv_head = turn.head % p.kv_heads;
        const Work work = work_at(p, b, kv_head * group, turn.tile);
        if (HAS_BLOCKS && work.tile < 0) continue;
        const int64 n = static_cast<int64>(work.tile) * BLOCK_N;
        __syncthreads();   // the tile before is done with shared memory
        keys.fetch(
            p.k + b * p.k_strides.batch + kv_head * p.k_strides.head + n * p.k_strides.row,
            p.k_strides.row, p.kv_len - n, HEAD_DIM);
        values.fetch(
            p.v + b * p.v_strides.batch + kv_head * p.v_strides.head + n * p.v_strides.row,
            p.v_strides.row, p.kv_len - n, VALUE_DIM);

        // The steps: all visible query tiles of all heads of the group.
        const int64 last_head = (kv_head + 1) * group;
        int mask_stage = 0;
        // On to a step in which a score is visible, or to h == last_head; its mask is written.
        auto seek = [&](QueryWalk& walk) {
            for (;; walk.next(p)) {
                while (!walk.more() && ++walk.h < last_head)
                    walk = work.split < 0 ? QueryWalk(p, b, walk.h, n)
                                          : QueryWalk(p, b, walk.h, n, work);
                if (walk.h == last_head || !HAS_MASK) return;
                if (__syncthreads_or(mask(mask_stage ^ 1).fill(p, walk.tile(p)))) return;
            }
        };
        auto fetch = [&](const QueryWalk& walk, int stage) {
            const int64 h = walk.h, m = walk.at();
            queries(stage).fetch(
                p.q + b * p.q_strides.batch + h * p.q_strides.head + m * p.q_strides.row,
                p.q_strides.row, p.q_len - m, HEAD_DIM);
            douts(stage).fetch(
                p.dout + b * p.dout_strides.batch + h * p.dout_strides.head + m * p.dout_strides.row,
                p.dout_strides.row, p.q_len - m, VALUE_DIM);
            if constexpr (HAS_BIAS) biases(stage).fetch(p, walk.tile(p));
        };

        KeyShare::Product dk = {};
        ValueShare::Product dv = {};
        QueryWalk walk(p, b, kv_head * group, n, work);
        seek(walk);
        if (walk.h < last_head) fetch(walk, 0);
        end_copies();
        auto make_dq = [&](int64 h, int64 m, int stage) {
            if constexpr (!ADD_DQ) return;
            QueryShare::Product dq = {};
            multiply_columns<BLOCK_N>(
                dq, [&](uint32 (&to)[4], int tile, int k) {
                    load_left_for_rows(to, gradients(stage), QueryShare::row(), tile, k);
                }, keys, QueryShare::step());
            add_dq(p, ScoreTile(p, b, h, m, n), dq);
        };
        const bool dq_first = warp_index() < WARPS / 2;
        int h_before = -1;   // of the step before
        int64 m_before = 0;
        int stage = 0;
        for (; walk.h < last_head; stage ^= STAGES - 1) {
            wait_copies<0>();
            __syncthreads();   // queries and dout have arrived; all warps are done with the step before
            mask_stage ^= 1;
            const ScoreTile t = walk.tile(p);
            const RowState rows(p, t);
            walk.next(p);
            if constexpr (STAGES == 2) {
                seek(walk);
                if (walk.h < last_head) fetch(walk, stage ^ 1);
                end_copies();
                if (dq_first && h_before >= 0) make_dq(h_before, m_before, stage ^ 1);
            }
            ScoreSums s = {}, dp = {};
            multiply_rows<HEAD_WIDTH>(
                s, [&](uint32 (&to)[4], int tile, int k) {
                    load_left(to, queries(stage), warp_row(), tile, k);
                }, keys, warp_column());
            multiply_rows<VALUE_WIDTH>(
                dp, [&](uint32 (&to)[4], int tile, int k) {
                    load_left(to, douts(stage), warp_row(), tile, k);
                }, values, warp_column());
            to_gradients(p, t, mask(mask_stage), biases(stage), rows, s, dp);
            store_scores(probabilities, s);
            store_scores(gradients(stage), dp);
            sync_some(1 + warp_index() / WARPS_M, WARPS_M * 32);

            multiply_columns<BLOCK_M>(
                dv, [&](uint32 (&to)[4], int tile, int k) {
                    load_left_transposed(to, probabilities, ValueShare::row() + tile * 16, k);
                }, douts(stage), ValueShare::step());
            multiply_columns<BLOCK_M>(
                dk, [&](uint32 (&to)[4], int tile, int k) {
                    load_left_transposed(to, gradients(stage), KeyShare::row() + tile * 16, k);
                }, queries(stage), KeyShare::step());
            if constexpr (STAGES == 2) {
                if (!dq_first && h_before >= 0) make_dq(h_before, m_before, stage ^ 1);
                h_before = static_cast<int>(t.h);
                m_before = t.m;
            } else {
                seek(walk);
                __syncthreads();   // all warps are done with queries and dout
                if (walk.h < last_head) fetch(walk, 0);
                end_copies();
                make_dq(t.h, t.m, 0);
            }
        }
        if constexpr (STAGES == 2) {
            __syncthreads();
            if (h_before >= 0) make_dq(h_before, m_before, stage ^ 1);
        }
        wait_copies<0>();
        if (HAS_BLOCKS && work.split >= 0) {
            constexpr int SIZE = BLOCK_N * (HEAD_DIM + VALUE_DIM);
            float* part = partial(p, p.partials, turn.head, work.split, SIZE);
            auto factor = [](int) { return 1.0f; };
            store_floats<HEAD_DIM>(part, KeyShare::row(), KeyShare::step(), dk, factor);
            store_floats<VALUE_DIM>(part + BLOCK_N * HEAD_DIM, ValueShare::row(), ValueShare::step(), dv,
                                    factor);
            continue;
        }
        __syncthreads();   // keys and values give their places to dk and dv
        const int rows = static_cast<int>(min64(BLOCK_N, p.kv_len - n));
        const int special = CAN_HIDE ? special_rows(dk) | special_rows(dv) : 0;
        store_sums(keys, KeyShare::row(), KeyShare::step(), dk, [&](int) { return p.scale; });
        store_sums(values, ValueShare::row(), ValueShare::step(), dv,
                   [&](int) { return HAS_DROPOUT ? p.keep_scale : 1.0f; });
        __syncthreads();
        copy_rows<HEAD_DIM>(
            keys, shared,
            p.dk + b * p.dk_strides.batch + kv_head * p.dk_strides.head + n * p.dk_strides.row,
            p.dk_strides.row, 0, rows, threadIdx.x, THREADS);
        copy_rows<VALUE_DIM>(
            values, shared + Keys::BYTES,
            p.dv + b * p.dv_strides.batch + kv_head * p.dv_strides.head + n * p.dv_strides.row,
            p.dv_strides.row, 0, rows, threadIdx.x, THREADS);
        if constexpr (CAN_HIDE) {   // convert_dq_fragments.cu looks after dq
            __syncthreads();
            for (int r = 0; r < 2 * KeyShare::TILES; ++r) {
                const bool ask = (special >> r & 1) && KeyShare::row(r) < rows;
                for (uint32 asked = rows_that(ask); asked != 0; asked &= asked - 1)
                    make_dk_dv<KeyShare, ValueShare>(
                        p, b, kv_head, n + __shfl_sync(~0u, KeyShare::row(r), __ffs(asked) - 1));
            }
        }
    }
}
