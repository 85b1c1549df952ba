// Exact attention, forward, on Hopper (sm_90a): TMA, wgmma, and softmax behind products
// (FlashAttention-3's design), for float16 and bfloat16. A block takes BLOCK_M queries of one head.
//
// Threads: the first WARPS / 4 warp groups are consumers with 64 queries each; of the last group, the
// producer, one thread starts all copies. Consumers' products run behind softmax: while a tile's
// weights are made, the scores of the next tile and the output of the one before are on their way.
// With PING_PONG, two groups take turns at the tensor cores, so that one's softmax meets the other's
// products.
//
// Grid: one-dimensional, each block takes tiles blockIdx.x, + gridDim.x, ... Shared memory, in panels
// (mma.cuh), from a multiple of 1024 bytes on: queries [BLOCK_M], STAGES x keys [BLOCK_N], STAGES x
// values [BLOCK_N], barriers.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, STAGES, PING_PONG, HAS_SINKS,
// PRODUCER_REGISTERS, CONSUMER_REGISTERS.
#include "mma_outputs.cuh"
#include "mma_sm90.cuh"

constexpr int GROUPS = WARPS / 4;
constexpr int HEAD_WIDTH = (HEAD_DIM + 15) / 16 * 16, VALUE_WIDTH = PRODUCT_WIDTH;
using Queries = Panels<BLOCK_M, HEAD_WIDTH>;
using Keys = Panels<BLOCK_N, HEAD_WIDTH>;
using Values = Panels<BLOCK_N, VALUE_WIDTH>;
using Outs = Panels<BLOCK_M, VALUE_WIDTH>;
constexpr int BARRIERS = 2 * GROUPS + 4 * STAGES;
static_assert(Queries::BYTES + STAGES * (Keys::BYTES + Values::BYTES) + BARRIERS * 8 + 1024 ==
                  SHARED_BYTES, "the plan counts shared memory as the kernel does");
static_assert(BLOCK_M == 64 * GROUPS && WARPS_M == WARPS, "64 rows for each group");
static_assert(Outs::BYTES <= Queries::BYTES, "outputs go where queries were");
static_assert(!HAS_MASK && !HAS_BIAS, "these go through the portable kernel");
static_assert(!PING_PONG || GROUPS > 1, "somebody must take the turn");
constexpr int STEPS = BLOCK_N / 16;
using Weights = uint32[STEPS][4];

// A ring of STAGES buffers: the one at hand, and the phase of its barriers.
struct Ring {
    int stage = 0;
    uint32 phase;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// What of a head a block works on.
struct Tile {
    int64 b, h, m;
    Work work;

    // Number `index` of all.
    __device__ __forceinline__ Tile(const Params& p, int64 index, int64 works) {
        const int64 heads = p.batch * p.q_heads;
        const Turn turn(index, works, heads, min64(heads, HAS_RIGHT ? 4 * p.section_heads : 1));
        b = turn.head / p.q_heads, h = turn.head % p.q_heads;
        work = work_at(p, b, h, HAS_RIGHT && !HAS_BLOCKS ? works - 1 - turn.tile : turn.tile);
        m = static_cast<int64>(work.tile) * BLOCK_M;
    }
};

struct State {
    float reference[ROWS], sum[ROWS], shrink[ROWS];
    Sums<1, VALUE_WIDTH / 8> out;
};

// Products become scores, -inf where hidden, and these weights. Returns whether the output so far
// must shrink; the reference is as in attention_forward.cu.
constexpr float SLACK = 8;
__device__ __forceinline__ bool take_in(const Params& p, const ScoreTile& t, ScoreSums& s, State& state) {
    if constexpr (!FOLDS_SCALE) to_logits(p, t, BiasTile{{0}, nullptr}, s, [](int, int, float) {});
    if (!t.whole()) {
        keep_branch();
        const Visible visible(p, t, MaskBits{nullptr});
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (!visible.at(r, c)) at(s, r, c) = -infinity<float>();
    }
    const float factor = factor_of(p);
    bool grown = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float top = at(s, r, 0), other = at(s, r, 1);
#pragma unroll
        for (int c = 2; c < COLUMNS; c += 2) {
            top = fmaxf(top, at(s, r, c));
            other = fmaxf(other, at(s, r, c + 1));
        }
        top = factor * over_row(fmaxf(top, other), [](float x, float y) { return fmaxf(x, y); });
        const bool grows = top > state.reference[r] + SLACK;
        grown |= grows;
        if (!grows) top = state.reference[r];
        state.shrink[r] = grows ? exp2_approximate(state.reference[r] - top) : 1;
        state.reference[r] = top;
        const float safe = top == -infinity<float>() ? 0 : top;
        float even = 0, odd = 0;
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            even += at(s, r, c) = exp2_approximate(fmaf(at(s, r, c), factor, -safe));
            odd += at(s, r, c + 1) = exp2_approximate(fmaf(at(s, r, c + 1), factor, -safe));
        }
        state.sum[r] = fmaf(state.sum[r], state.shrink[r], even + odd);
    }
    return __any_sync(~0u, grown);
}

__device__ __forceinline__ void shrink_out(State& state) {
    keep_branch();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) *= state.shrink[r];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 128, 1)
attention_forward_sm90(const __grid_constant__ MappedParams mapped) {
    const Params& p = mapped.params;
    extern __shared__ __align__(16) unsigned char shared[];
    const uint32 start = shared_address(shared), first = (start + 1023) & ~1023u;
    const Queries queries{first};
    auto keys = [&](int stage) { return Keys{first + Queries::BYTES + stage * Keys::BYTES}; };
    auto values = [&](int stage) {
        return Values{first + Queries::BYTES + STAGES * Keys::BYTES + stage * Values::BYTES};
    };
    const uint32 barriers = first + Queries::BYTES + STAGES * (Keys::BYTES + Values::BYTES);
    auto queries_full = [&](int group) { return barriers + group * 8; };
    auto queries_free = [&](int group) { return barriers + (GROUPS + group) * 8; };
    auto keys_full = [&](int stage) { return barriers + (2 * GROUPS + stage) * 8; };
    auto keys_free = [&](int stage) { return barriers + (2 * GROUPS + STAGES + stage) * 8; };
    auto values_full = [&](int stage) { return barriers + (2 * GROUPS + 2 * STAGES + stage) * 8; };
    auto values_free = [&](int stage) { return barriers + (2 * GROUPS + 3 * STAGES + stage) * 8; };

    if (threadIdx.x == 0) {
        for (int group = 0; group < GROUPS; ++group) {
            init_barrier(queries_full(group), 1);
            init_barrier(queries_free(group), 4);
        }
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(keys_full(stage), 1);
            init_barrier(keys_free(stage), WARPS);
            init_barrier(values_full(stage), 1);
            init_barrier(values_free(stage), WARPS);
        }
        end_init_barriers();
    }
    __syncthreads();

    const int64 works = HAS_BLOCKS ? p.works : (p.q_len + BLOCK_M - 1) / BLOCK_M;
    const int64 tiles = works * p.batch * p.q_heads, group_size = p.q_heads / p.kv_heads;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == GROUPS) {
        shrink_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 >= 32) return;
        const bool leads = lane_index() == 0;   // starts the copies
        Ring key_ring{0, 1}, value_ring{0, 1};
        uint32 query_phase = 1;
        for (int64 index = blockIdx.x; index < tiles; index += gridDim.x) {
            const Tile tile(p, index, works);
            if (HAS_BLOCKS && tile.work.tile < 0) continue;
            const int b = static_cast<int>(tile.b), h = static_cast<int>(tile.h);
            const int kv_head = static_cast<int>(h / group_size), m = static_cast<int>(tile.m);
            KeyWalk walk(p, tile.b, tile.h, tile.m, tile.work);
            // A tile of `map`, panel after panel, when its place is free.
            auto copy = [&](const TensorMap& map, uint32 to, int panels, int panel_bytes, uint32 full,
                            uint32 free, uint32 phase, int row, int head) {
                if (!leads) return;
                wait_phase(free, phase);
                arrive_with_bytes(full, panels * panel_bytes);
#pragma unroll 1
                for (int panel = 0; panel < panels; ++panel)
                    copy_box(to + panel * panel_bytes, map, full, panel * 64, row, head, b);
            };
            auto copy_keys = [&](int64 n) {
                const int stage = key_ring.stage;
                copy(mapped.k, keys(stage).base, Keys::BYTES / Keys::PANEL, Keys::PANEL,
                     keys_full(stage), keys_free(stage), key_ring.phase, static_cast<int>(n), kv_head);
                key_ring.next();
            };
            auto copy_values = [&](int64 n) {
                const int stage = value_ring.stage;
                copy(mapped.v, values(stage).base, Values::BYTES / Values::PANEL, Values::PANEL,
                     values_full(stage), values_free(stage), value_ring.phase, static_cast<int>(n),
                     kv_head);
                value_ring.next();
            };
#pragma unroll 1
            for (int group = 0; group < GROUPS && leads; ++group) {
                wait_phase(queries_free(group), query_phase);
                arrive_with_bytes(queries_full(group), Queries::BYTES / GROUPS);
#pragma unroll 1
                for (int panel = 0; panel < Queries::BYTES / Queries::PANEL; ++panel)
                    copy_box(queries.base + panel * Queries::PANEL + group * 64 * 128, mapped.q,
                             queries_full(group), panel * 64, m + group * 64, h, b);
            }
            query_phase ^= 1;
            if (walk.more()) copy_keys(walk.at());
            while (walk.more()) {   // the keys of the next tile ahead of the values of this one
                const int64 n = walk.at();
                walk.next(p);
                if (walk.more()) copy_keys(walk.at());
                copy_values(n);
            }
        }
        return;
    }

    grow_registers<CONSUMER_REGISTERS>();
    const int group = role;
    const bool leads = lane_index() == 0;   // arrives for its warp
    Ring key_ring{0, 0}, value_ring{0, 0};
    uint32 query_phase = 0;
    auto take_turn = [&]() {
        if constexpr (PING_PONG) sync_some(1 + group, 256);
    };
    auto hand_on_turn = [&]() {
        if constexpr (PING_PONG) arrive_some(1 + (group + 1) % GROUPS, 256);
    };
    if (group == GROUPS - 1) hand_on_turn();   // the first turn is group 0's
    for (int64 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile(p, index, works);
        if (HAS_BLOCKS && tile.work.tile < 0) continue;
        KeyWalk walk(p, tile.b, tile.h, tile.m, tile.work);
        State state;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            state.reference[r] = -infinity<float>();
            state.sum[r] = 0;
#pragma unroll
            for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) = 0;
        }
        const uint32 own_queries = queries.base + group * 64 * 128;
        auto start_scores = [&](ScoreSums& s) {
            start_rows<HEAD_WIDTH, BLOCK_M>(s, own_queries, keys(key_ring.stage).base);
        };
        auto start_outputs = [&](const Weights& weights) {
            start_columns<BLOCK_N>(state.out, weights, values(value_ring.stage).base);
        };
        auto free_keys = [&]() {
            if (leads) arrive(keys_free(key_ring.stage));
            key_ring.next();
        };
        auto free_values = [&]() {
            if (leads) arrive(values_free(value_ring.stage));
            value_ring.next();
        };
        auto make_weights = [&](Weights& weights, const ScoreTile& t, const ScoreSums& s) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                sums_as_left(weights[step], s, 0, step);
                drop_weights(weights[step], p, t, 0, step);
            }
        };

        wait_phase(queries_full(group), query_phase);
        query_phase ^= 1;
        if (walk.more()) {
            Weights weights;
            {
                ScoreSums s;
                wait_phase(keys_full(key_ring.stage), key_ring.phase);
                start_scores(s);
                wait_products<0>();
                pin(s);
                free_keys();
                const ScoreTile t = walk.tile(p);
                take_in(p, t, s, state);
                make_weights(weights, t, s);
            }
            walk.next(p);
#pragma unroll 1
            for (; walk.more(); walk.next(p)) {
                ScoreSums s;
                wait_phase(keys_full(key_ring.stage), key_ring.phase);
                take_turn();
                start_scores(s);
                wait_phase(values_full(value_ring.stage), value_ring.phase);
                start_outputs(weights);
                hand_on_turn();
                wait_products<1>();
                pin(s);
                free_keys();
                const ScoreTile t = walk.tile(p);
                const bool shrinks = take_in(p, t, s, state);
                wait_products<0>();
                pin(state.out);
                free_values();
                make_weights(weights, t, s);
                if (shrinks) shrink_out(state);
            }
            wait_phase(values_full(value_ring.stage), value_ring.phase);
            start_outputs(weights);
            wait_products<0>();
            pin(state.out);
            free_values();
        }
        write_rows<true>(p, ScoreTile(p, tile.b, tile.h, tile.m, 0), state, Outs{queries.base},
                         shared + (first - start), tile.work.split);
        end_own_writes();   // before the copies of the next queries
        __syncwarp();
        if (leads) arrive(queries_free(group));
    }
    if (group == 0) take_turn();   // the turn that is left
}
