// Exact attention, forward, on Hopper (sm_90a): TMA, wgmma, and softmax behind products
// (FlashAttention-3's design), for float16 and bfloat16. A block takes BLOCK_M queries of one head.
//
// Threads: the first WARPS / 4 warp groups are consumers with 64 queries each. Of the last group, the
// producer, one warp fetches tiles' numbers and copies keys and values, another one queries. Consumers' products run behind softmax: while a tile's
// weights are made, the scores of the next tile and the output of the one before are on their way.
// With PING_PONG, two groups take turns at the tensor cores, so that one's softmax meets the other's
// products.
//
// Grid: one-dimensional, no more blocks than the GPU holds; each takes tile blockIdx.x and then, by a
// counter, one after the other that nobody has taken. Shared memory, in panels (mma.cuh), from a
// multiple of 1024 bytes on: QUERY_BUFFERS x queries [BLOCK_M], STAGES x keys [BLOCK_N], STAGES x values
// [BLOCK_N], barriers, two tiles' numbers.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, PRODUCT_WIDTH (VALUE_DIM, or the next
// that wgmma.cuh has), STAGES, QUERY_BUFFERS, PING_PONG, HAS_SINKS, PRODUCER_REGISTERS,
// CONSUMER_REGISTERS.
#include "mma_outputs.cuh"
#include "mma_sm90.cuh"

constexpr int GROUPS = WARPS / 4;
constexpr int HEAD_WIDTH = (HEAD_DIM + 15) / 16 * 16, VALUE_WIDTH = PRODUCT_WIDTH;
using Queries = Panels<BLOCK_M, HEAD_WIDTH>;
using Keys = Panels<BLOCK_N, HEAD_WIDTH>;
using Values = Panels<BLOCK_N, VALUE_WIDTH>;
using Outs = Panels<BLOCK_M, VALUE_WIDTH>;
constexpr int BARRIERS = 2 * QUERY_BUFFERS * GROUPS + 4 * STAGES + 4;
static_assert(QUERY_BUFFERS * Queries::BYTES + STAGES * (Keys::BYTES + Values::BYTES) + BARRIERS * 8 +
                  8 + 1024 == SHARED_BYTES, "the plan counts shared memory as the kernel does");
static_assert(BLOCK_M == 64 * GROUPS && WARPS_M == WARPS, "64 rows for each group");
static_assert(Outs::BYTES <= Queries::BYTES, "outputs go where queries were");
static_assert(!HAS_MASK && !HAS_BIAS, "these go through the portable kernel");
static_assert(!PING_PONG || GROUPS > 1, "somebody must take the turn");
constexpr int STEPS = BLOCK_N / 16;
using Weights = uint32[STEPS][4];

// A ring of buffers: the one at hand, and the phase of its barriers.
template <int COUNT>
struct Ring {
    int stage = 0;
    uint32 phase;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) {
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
        // Uniform, which the compiler cannot see behind 64-bit divisions: else each descriptor of a product
        // has to be moved to uniform registers.
        const int head = uniform(static_cast<int>(turn.head)), q_heads = static_cast<int>(p.q_heads);
        const int place = uniform(static_cast<int>(turn.tile));
        b = head / q_heads, h = head % q_heads;
        work = work_at(p, b, h, HAS_RIGHT && !HAS_BLOCKS ? works - 1 - place : place);
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
    constexpr int ALL_QUERIES = QUERY_BUFFERS * Queries::BYTES;
    auto queries = [&](int buffer) { return Queries{first + buffer * Queries::BYTES}; };
    auto keys = [&](int stage) { return Keys{first + ALL_QUERIES + stage * Keys::BYTES}; };
    auto values = [&](int stage) {
        return Values{first + ALL_QUERIES + STAGES * Keys::BYTES + stage * Values::BYTES};
    };
    // Barriers in pairs: what they guard is full, or free.
    const uint32 barriers = first + ALL_QUERIES + STAGES * (Keys::BYTES + Values::BYTES);
    auto full = [](uint32 pair) { return pair; };
    auto free = [](uint32 pair) { return pair + 8; };
    auto tile_pair = [&](int slot) { return barriers + slot * 16; };
    auto key_pair = [&](int stage) { return barriers + (2 + stage) * 16; };
    auto value_pair = [&](int stage) { return barriers + (2 + STAGES + stage) * 16; };
    auto query_pair = [&](int buffer, int group) {
        return barriers + (2 + 2 * STAGES + buffer * GROUPS + group) * 16;
    };
    auto tile_number = [&](int slot) { return barriers + BARRIERS * 8 + slot * 4; };

    if (threadIdx.x == 0) {
        auto init = [&](uint32 pair, int users) {
            init_barrier(full(pair), 1);
            init_barrier(free(pair), users);
        };
        for (int slot = 0; slot < 2; ++slot) init(tile_pair(slot), WARPS + 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            init(key_pair(stage), WARPS);
            init(value_pair(stage), WARPS);
        }
        for (int i = 0; i < QUERY_BUFFERS * GROUPS; ++i) init(query_pair(0, i), 4);
        end_init_barriers();
    }
    __syncthreads();

    const int64 works = HAS_BLOCKS ? p.works : (p.q_len + BLOCK_M - 1) / BLOCK_M;
    const int64 tiles = works * p.batch * p.q_heads, group_size = p.q_heads / p.kv_heads;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const bool leads = lane_index() == 0;   // acts for its warp
    Ring<2> slots{0, 0};
    // The next tile's number, at least `tiles` at the end.
    auto receive = [&]() {
        wait_phase(full(tile_pair(slots.stage)), slots.phase);
        const uint32 number = uniform(load_shared(tile_number(slots.stage)));
        __syncwarp();
        if (leads) arrive(free(tile_pair(slots.stage)));
        slots.next();
        return static_cast<int64>(number);
    };
    if (role == GROUPS) {
        shrink_registers<PRODUCER_REGISTERS>();
        // A tile of `map`, panel after panel, when its place is free.
        auto copy = [&](const TensorMap& map, uint32 to, int panels, int panel_bytes, int bytes,
                        uint32 pair, uint32 phase, int64 row, int64 head, int64 batch) {
            if (!leads) return;
            wait_phase(free(pair), phase);
            arrive_with_bytes(full(pair), panels * bytes);
#pragma unroll 1
            for (int panel = 0; panel < panels; ++panel)
                copy_box(to + panel * panel_bytes, map, full(pair), panel * 64, static_cast<int>(row),
                         static_cast<int>(head), static_cast<int>(batch));
        };
        if (threadIdx.x / 32 % 4 == 0) {
            Ring<STAGES> key_ring{0, 1}, value_ring{0, 1};
            slots.phase = 1;
            for (int64 index = blockIdx.x;;) {
                if (leads) {
                    wait_phase(free(tile_pair(slots.stage)), slots.phase);
                    store_shared(tile_number(slots.stage), static_cast<uint32>(min64(index, tiles)));
                    arrive(full(tile_pair(slots.stage)));
                }
                slots.next();
                if (index >= tiles) break;
                const uint32 taken = leads ? atomicAdd(mapped.taken, 1u) : 0;
                const Tile tile(p, index, works);
                if (!HAS_BLOCKS || tile.work.tile >= 0) {
                    const int64 kv_head = tile.h / group_size;
                    KeyWalk walk(p, tile.b, tile.h, tile.m, tile.work);
                    auto copy_keys = [&](int64 n) {
                        copy(mapped.k, keys(key_ring.stage).base, Keys::BYTES / Keys::PANEL, Keys::PANEL,
                             Keys::PANEL, key_pair(key_ring.stage), key_ring.phase, n, kv_head, tile.b);
                        key_ring.next();
                    };
                    if (walk.more()) copy_keys(walk.at());
                    while (walk.more()) {   // the keys of the next tile ahead of the values of this one
                        const int64 n = walk.at();
                        walk.next(p);
                        if (walk.more()) copy_keys(walk.at());
                        copy(mapped.v, values(value_ring.stage).base, Values::BYTES / Values::PANEL,
                             Values::PANEL, Values::PANEL, value_pair(value_ring.stage),
                             value_ring.phase, n, kv_head, tile.b);
                        value_ring.next();
                    }
                }
                index = static_cast<int64>(gridDim.x) + __shfl_sync(~0u, taken, 0);
            }
        } else if (threadIdx.x / 32 % 4 == 1) {
            // Queries have their own warp: waiting for their place holds up no keys of the next tile.
            Ring<QUERY_BUFFERS> ring{0, 1};
            for (int64 index; (index = receive()) < tiles;) {
                const Tile tile(p, index, works);
                if (HAS_BLOCKS && tile.work.tile < 0) continue;
#pragma unroll 1
                for (int group = 0; group < GROUPS; ++group)
                    copy(mapped.q, queries(ring.stage).base + group * 64 * 128,
                         Queries::BYTES / Queries::PANEL, Queries::PANEL, 64 * 128,
                         query_pair(ring.stage, group), ring.phase, tile.m + group * 64, tile.h, tile.b);
                ring.next();
            }
        }
        return;
    }

    grow_registers<CONSUMER_REGISTERS>();
    const int group = role;
    Ring<STAGES> key_ring{0, 0}, value_ring{0, 0};
    Ring<QUERY_BUFFERS> query_ring{0, 0};
    auto take_turn = [&]() {
        if constexpr (PING_PONG) sync_some(1 + group, 256);
    };
    auto hand_on_turn = [&]() {
        if constexpr (PING_PONG) arrive_some(1 + (group + 1) % GROUPS, 256);
    };
    if (group == GROUPS - 1) hand_on_turn();   // the first turn is group 0's
    for (int64 index; (index = receive()) < tiles;) {
        const Tile tile(p, index, works);
        if (HAS_BLOCKS && tile.work.tile < 0) continue;
        KeyWalk walk(p, tile.b, tile.h, tile.m, tile.work);
        walk.place = uniform(walk.place), walk.end = uniform(walk.end);   // as tiles' numbers
        const Queries own = queries(query_ring.stage);
        State state;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            state.reference[r] = -infinity<float>();
            state.sum[r] = 0;
#pragma unroll
            for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) = 0;
        }
        auto start_scores = [&](ScoreSums& s) {
            start_rows<HEAD_WIDTH, BLOCK_M>(s, own.base + group * 64 * 128, keys(key_ring.stage).base);
        };
        auto start_outputs = [&](const Weights& weights) {
            start_columns<BLOCK_N>(state.out, weights, values(value_ring.stage).base);
        };
        auto free_keys = [&]() {
            if (leads) arrive(free(key_pair(key_ring.stage)));
            key_ring.next();
        };
        auto free_values = [&]() {
            if (leads) arrive(free(value_pair(value_ring.stage)));
            value_ring.next();
        };
        auto make_weights = [&](Weights& weights, const ScoreTile& t, const ScoreSums& s) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                sums_as_left(weights[step], s, 0, step);
                drop_weights(weights[step], p, t, 0, step);
            }
        };

        wait_phase(full(query_pair(query_ring.stage, group)), query_ring.phase);
        if (walk.more()) {
            Weights weights;
            {
                ScoreSums s;
                wait_phase(full(key_pair(key_ring.stage)), key_ring.phase);
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
                wait_phase(full(key_pair(key_ring.stage)), key_ring.phase);
                take_turn();
                start_scores(s);
                wait_phase(full(value_pair(value_ring.stage)), value_ring.phase);
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
            wait_phase(full(value_pair(value_ring.stage)), value_ring.phase);
            start_outputs(weights);
            wait_products<0>();
            pin(state.out);
            free_values();
        }
        write_rows<true, true>(p, ScoreTile(p, tile.b, tile.h, tile.m, 0), state, Outs{own.base},
                         shared + (own.base - start), tile.work.split);
        end_own_writes();   // before the copies of other queries
        __syncwarp();
        if (leads) arrive(free(query_pair(query_ring.stage, group)));
        query_ring.next();
    }
    if (group == 0) take_turn();   // the turn that is left
}
