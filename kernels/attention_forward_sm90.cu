// Exact attention, forward, on Hopper (sm_90a): TMA, wgmma, and softmax behind products
// (FlashAttention-3's design), for float16 and bfloat16. A block takes BLOCK_M queries of one head.
//
// Threads: the first WARPS / 4 warp groups are consumers with 64 queries each. Of the last group, the
// producer, one warp finds out what tiles need and copies keys and values, another one copies queries.
// With a mask or a bias, the other two write a sheet for each tile of keys in which a pair is visible.
// Consumers' products run behind softmax: while a tile's weights are made, the scores of the next tile
// and the output of the one before are on their way. With PING_PONG, groups take turns at the tensor
// cores, so that one's softmax meets another's products.
//
// Grid: one-dimensional, no more blocks than the GPU holds; each takes tile blockIdx.x and then, by a
// counter, one after the other that nobody has taken; the last take sets the counter back to 0. Shared
// memory, in panels (mma.cuh), from a multiple of 1024 bytes on: QUERY_BUFFERS x (queries, later outputs)
// [BLOCK_M], STAGES x keys [BLOCK_N], STAGES x values [BLOCK_N], SHEETS x (biases [BLOCK_M][BLOCK_N],
// MaskBits, a Block), barriers, two jobs.
//
// Constants beside those of mma_scores.cuh: HEAD_DIM, VALUE_DIM, PRODUCT_WIDTH (VALUE_DIM, or the next
// that wgmma.cuh has), STAGES, QUERY_BUFFERS, SHEETS, PING_PONG, HAS_SINKS, PRODUCER_REGISTERS,
// CONSUMER_REGISTERS.
#include "mma_outputs.cuh"
#include "mma_sm90.cuh"

constexpr int GROUPS = WARPS / 4;
constexpr int HEAD_WIDTH = (HEAD_DIM + 15) / 16 * 16, VALUE_WIDTH = PRODUCT_WIDTH;
using Queries = Panels<BLOCK_M, HEAD_WIDTH>;
using Keys = Panels<BLOCK_N, HEAD_WIDTH>;
using Values = Panels<BLOCK_N, VALUE_WIDTH>;
using Outs = Panels<BLOCK_M, VALUE_WIDTH>;
// Outputs leave by the copy engine where queries came in, if the next ones come in elsewhere.
constexpr bool STORES_BOXES = QUERY_BUFFERS > 1;
constexpr int QUERY_BYTES =
    STORES_BOXES && Outs::BYTES > Queries::BYTES ? Outs::BYTES : Queries::BYTES;
// What a tile of scores needs beside products, and its number: who walks over keys follows the sheets.
constexpr bool HAS_SHEETS = HAS_MASK || HAS_BIAS;
static_assert(HAS_SHEETS == (SHEETS > 0), "the plan knows what needs sheets");
constexpr int SHEET_BYTES = HAS_SHEETS ? BiasTile::BYTES + MaskBits::BYTES + 16 : 0;
constexpr int WRITERS = HAS_SHEETS ? 2 : 0, WRITER_THREADS = 32 * WRITERS;   // warps that write sheets
constexpr int WRITER_BARRIER = 1 + 2 * GROUPS;   // behind those of turns and of outputs
constexpr int BARRIERS = 2 * QUERY_BUFFERS * GROUPS + 4 * STAGES + 2 * SHEETS + 4;
static_assert(BLOCK_M == 64 * GROUPS && WARPS_M == WARPS, "64 rows for each group");
static_assert(!PING_PONG || GROUPS > 1, "somebody must take the turn");
constexpr int STEPS = BLOCK_N / 16;
using Weights = uint32[STEPS][4];
// Whether groups may see different tiles of keys.
constexpr bool IN_BAND =
    (HAS_LEFT || HAS_RIGHT) && !HAS_BLOCKS && !HAS_SHEETS && PING_PONG && BLOCK_M > BLOCK_N;

// Heads of a section (scores.cuh). Fewer would end with long jobs; more of short sequences would have to
// be read at once.
constexpr uint32 SECTION = HAS_RIGHT || HAS_BLOCKS ? 4096 / HEAD_WIDTH : 1;

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

// What a block does next: a tile of queries, and its walk over keys.
struct Job {
    int tile;   // -1: nothing, or an end of all jobs
    int b, h, split, place, end;

    // Number `index` of `works` of each head.
    __device__ __forceinline__ Job(const Params& p, uint32 index, uint32 works) : tile(-1) {
        const uint32 q_heads = static_cast<uint32>(p.q_heads), heads = static_cast<uint32>(p.batch) * q_heads;
        if (index >= works * heads) return;
        const Turn<uint32> turn(index, works, heads, SECTION < heads ? SECTION : heads);
        b = static_cast<int>(turn.head / q_heads), h = static_cast<int>(turn.head % q_heads);
        const Work work = work_at(p, b, h, HAS_RIGHT && !HAS_BLOCKS ? works - 1 - turn.tile : turn.tile);
        tile = work.tile, split = work.split;
        if (tile < 0) return;
        const KeyWalk walk(p, b, h, first_row(), work);
        place = walk.place, end = walk.end;
    }
    __device__ __forceinline__ int64 first_row() const { return static_cast<int64>(tile) * BLOCK_M; }
    __device__ __forceinline__ KeyWalk walk(const Params& p) const {
        return KeyWalk(p, b, h, first_row(), place, end);
    }
    // To shared memory, and back.
    static constexpr int WORDS = 6;
    __device__ __forceinline__ void store(uint32 to) const {
        const int words[WORDS] = {tile, b, h, split, place, end};
#pragma unroll
        for (int i = 0; i < WORDS; ++i) store_shared(to + i * 4, words[i]);
    }
    __device__ __forceinline__ explicit Job(uint32 from) {
        int* words[WORDS] = {&tile, &b, &h, &split, &place, &end};
#pragma unroll
        for (int i = 0; i < WORDS; ++i) *words[i] = uniform(load_shared(from + i * 4));
    }
};
static_assert(QUERY_BUFFERS * QUERY_BYTES + STAGES * (Keys::BYTES + Values::BYTES) +
                  SHEETS * SHEET_BYTES + BARRIERS * 8 + 2 * Job::WORDS * 4 + 1024 == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");

// Tiles of keys that a group's 64 queries, from m on, see: any of them any pair, and all of them all.
struct Tiles {
    int begin, end, whole_begin, whole_end;
    __device__ __forceinline__ Tiles(const Params& p, int64 m) {
        const Range any = visible_keys<64>(p, m);
        begin = tiles(any.begin), end = tiles(any.end + BLOCK_N - 1);
        whole_begin = HAS_LEFT ? tiles(min64(p.kv_len, m + 63 + p.offset - p.left) + BLOCK_N - 1) : 0;
        whole_end = tiles(HAS_RIGHT ? min64(p.kv_len, m + p.offset + p.right + 1) : p.kv_len);
    }
    static __device__ __forceinline__ int tiles(int64 keys) {
        return uniform(static_cast<int>(max64(0, keys)) / BLOCK_N);
    }
};

struct State {
    float reference[ROWS], sum[ROWS];   // sum: the thread's share
    Sums<1, VALUE_WIDTH / 8> out;
};

// Products become scores, -inf where hidden. `whole`: nothing is hidden by band and lengths.
__device__ __forceinline__ void to_scores(const Params& p, const KeyWalk& walk, bool whole,
                                          const MaskBits& mask, const BiasTile& biases, ScoreSums& s) {
    if constexpr (!FOLDS_SCALE) to_logits(p, walk.tile(p), biases, s, [](int, int, float) {});
    if (whole && !HAS_MASK && !(HAS_BLOCKS && walk.now.bits >= 0)) return;
    keep_branch();
    const Visible visible(p, walk.tile(p), mask);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (!visible.at(r, c)) at(s, r, c) = -infinity<float>();
}

// Weights are 2^(factor * score - reference). The reference of a row is the largest score that it had
// when the reference was last set; it stays as long as no thread's BLOCK_N / 4 weights of a tile sum up
// to more than this, 1.1 for each. So most tiles need no maximum, and where a few keys get most of the
// weight, theirs is 1 as a rule, which rounding leaves alone.
constexpr float LIMIT = 1.1f * BLOCK_N / 4;

// References become the largest scores so far, and what has been summed up shrinks. Returns whether all
// rows of the warp have one.
__device__ __forceinline__ bool set_references(const Params& p, ScoreSums& s, State& state) {
    const float factor = factor_of(p);
    bool all = true;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float even = at(s, r, 0), odd = at(s, r, 1);
#pragma unroll
        for (int c = 2; c < COLUMNS; c += 2) {
            even = fmaxf(even, at(s, r, c));
            odd = fmaxf(odd, at(s, r, c + 1));
        }
        const float top = factor * over_row(fmaxf(even, odd), [](float x, float y) { return fmaxf(x, y); });
        const float shrink = top > state.reference[r] ? exp2_approximate(state.reference[r] - top) : 1;
        state.reference[r] = fmaxf(state.reference[r], top);
        state.sum[r] *= shrink;
#pragma unroll
        for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) *= shrink;
        all &= state.reference[r] > -infinity<float>();
    }
    return __all_sync(~0u, all);
}

// The weights of a tile as left factors, and the sums of the thread's. Returns whether the warp's are
// within the limit.
__device__ __forceinline__ bool make_weights(const Params& p, ScoreSums& s, const State& state,
                                             Weights& weights, float (&sums)[ROWS]) {
    const float factor = factor_of(p);
    float safe[ROWS], even[ROWS] = {}, odd[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        safe[r] = state.reference[r] == -infinity<float>() ? 0 : state.reference[r];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        Sums<1, 2> w;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                auto weight = [&](int c) { return exp2_approximate(fmaf(at(s, r, step * 4 + c), factor, -safe[r])); };
                even[r] += at(w, r, c) = weight(c);
                odd[r] += at(w, r, c + 1) = weight(c + 1);
            }
        sums_as_left(weights[step], w, 0, 0);
    }
    bool within = true;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sums[r] = even[r] + odd[r];
        within &= sums[r] <= LIMIT;
    }
    return __all_sync(~0u, within);
}

// The warp's rows of the output to shared memory.
__device__ __forceinline__ void store_out(const Outs& outs, const State& state) {
    const uint32 first = outs.lane_at(warp_row() + lane_index() % 16, lane_index() / 16);
#pragma unroll
    for (int step = 0; step < VALUE_WIDTH / 16; ++step) {
        uint32 pairs[4];
        sums_as_left(pairs, state.out, 0, step);
        store_matrices(Outs::step_of(first, step), pairs);
    }
}

// The same straight to global memory, 16 bytes of a lane: the four lanes of a row exchange what they
// have of 32 columns.
__device__ __forceinline__ void write_out(const Params& p, const ScoreTile& t, State& state) {
    Element* out = output_at(p, t);
    const int lane = lane_index() % 4;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int piece = 0; piece < VALUE_WIDTH / 8; piece += 4) {
            uint32 chunk[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (piece + i < VALUE_WIDTH / 8)
                    chunk[i] = pack(Element{}, at(state.out, r, (piece + i) * 2), at(state.out, r, (piece + i) * 2 + 1));
#pragma unroll
            for (int step = 1; step <= 2; step *= 2)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if ((i & step) == 0) {
                        uint32 &low = chunk[i], &high = chunk[i + step];
                        const uint32 other = __shfl_xor_sync(~0u, lane & step ? low : high, step);
                        (lane & step ? low : high) = other;
                    }
            const int column = (piece + lane) * 8;
            if (score_row(r) < t.rows && column < VALUE_DIM)
                *reinterpret_cast<Vector<uint32, 4>*>(out + score_row(r) * p.out_strides.row + column) =
                    {chunk[0], chunk[1], chunk[2], chunk[3]};
        }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 128, 1)
attention_forward_sm90(const __grid_constant__ MappedParams mapped) {
    const Params& p = mapped.params;
    extern __shared__ __align__(16) unsigned char shared[];
    const uint32 first = (shared_address(shared) + 1023) & ~1023u;
    constexpr int ALL_QUERIES = QUERY_BUFFERS * QUERY_BYTES;
    auto queries = [&](int buffer) { return Queries{first + buffer * QUERY_BYTES}; };
    auto keys = [&](int stage) { return Keys{first + ALL_QUERIES + stage * Keys::BYTES}; };
    auto values = [&](int stage) {
        return Values{first + ALL_QUERIES + STAGES * Keys::BYTES + stage * Values::BYTES};
    };
    const uint32 sheets = first + ALL_QUERIES + STAGES * (Keys::BYTES + Values::BYTES);
    auto biases = [&](int sheet) {
        const uint32 base = sheets + sheet * SHEET_BYTES;
        return BiasTile{{base}, shared + (base - shared_address(shared))};
    };
    auto mask = [&](int sheet) {
        return MaskBits{reinterpret_cast<uint32*>(biases(sheet).memory + BiasTile::BYTES)};
    };
    auto block_at = [&](int sheet) { return sheets + (sheet + 1) * SHEET_BYTES - 16; };
    // Barriers in pairs: what they guard is full, or free.
    const uint32 barriers = sheets + SHEETS * SHEET_BYTES;
    auto full = [](uint32 pair) { return pair; };
    auto free = [](uint32 pair) { return pair + 8; };
    auto job_pair = [&](int slot) { return barriers + slot * 16; };
    auto key_pair = [&](int stage) { return barriers + (2 + stage) * 16; };
    auto value_pair = [&](int stage) { return barriers + (2 + STAGES + stage) * 16; };
    auto query_pair = [&](int buffer, int group) {
        return barriers + (2 + 2 * STAGES + buffer * GROUPS + group) * 16;
    };
    auto sheet_pair = [&](int sheet) { return query_pair(QUERY_BUFFERS, sheet); };
    auto job_at = [&](int slot) { return barriers + BARRIERS * 8 + slot * Job::WORDS * 4; };

    if (threadIdx.x == 32 * WARPS)
        for (const TensorMap* map : {&mapped.q, &mapped.k, &mapped.v, &mapped.out}) prefetch(*map);
    if (threadIdx.x == 0) {
        auto init = [&](uint32 pair, int users) {
            init_barrier(full(pair), 1);
            init_barrier(free(pair), users);
        };
        for (int slot = 0; slot < 2; ++slot) init(job_pair(slot), WARPS + 1 + WRITERS);
        for (int stage = 0; stage < STAGES; ++stage) {
            init(key_pair(stage), WARPS);
            init(value_pair(stage), WARPS);
        }
        for (int i = 0; i < QUERY_BUFFERS * GROUPS; ++i) init(query_pair(0, i), 4);
        for (int sheet = 0; sheet < SHEETS; ++sheet) {
            init_barrier(full(sheet_pair(sheet)), WRITERS + WRITER_THREADS);
            init_barrier(free(sheet_pair(sheet)), WARPS + 1);
        }
        end_init_barriers();
    }
    __syncthreads();

    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const bool leads = lane_index() == 0;   // acts for its warp
    Ring<2> slots{0, 0};
    // The next job; at the end, none.
    auto receive = [&]() {
        wait_phase(full(job_pair(slots.stage)), slots.phase);
        const Job job(job_at(slots.stage));
        __syncwarp();
        if (leads) arrive(free(job_pair(slots.stage)));
        slots.next();
        return job;
    };
    Ring<HAS_SHEETS ? SHEETS : 1> sheet_ring{0, 0};
    // On to the tile of the next sheet; at the end, to none.
    auto follow = [&](KeyWalk& walk) {
        wait_phase(full(sheet_pair(sheet_ring.stage)), sheet_ring.phase);
        const uint32 from = block_at(sheet_ring.stage);
        const int tile = load_shared(from), bits = load_shared(from + 4);
        walk.now = {uniform(tile), uniform(bits)};
        walk.place = walk.now.tile;
        walk.end = walk.place + (walk.place >= 0);
    };
    auto free_sheet = [&]() {
        __syncwarp();
        if (leads) arrive(free(sheet_pair(sheet_ring.stage)));
        sheet_ring.next();
    };
    if (role == GROUPS) {
        shrink_registers<PRODUCER_REGISTERS>();
        // A tile of `map`, panel after panel, when its place is free.
        auto copy = [&](const TensorMap& map, uint32 to, int panels, int panel_bytes, int bytes,
                        uint32 pair, uint32 phase, int64 row, int head, int batch) {
            if (!leads) return;
            wait_phase(free(pair), phase);
            arrive_with_bytes(full(pair), panels * bytes);
#pragma unroll 1
            for (int panel = 0; panel < panels; ++panel)
                copy_box(to + panel * panel_bytes, map, full(pair), panel * 64, static_cast<int>(row), head,
                         batch);
        };
        if (threadIdx.x / 32 % 4 == 0) {
            const uint32 works = HAS_BLOCKS ? p.works : static_cast<uint32>((p.q_len + BLOCK_M - 1) / BLOCK_M);
            const uint32 jobs = works * static_cast<uint32>(p.batch * p.q_heads);
            const int group_size = static_cast<int>(p.q_heads) / static_cast<int>(p.kv_heads);
            Ring<STAGES> key_ring{0, 1}, value_ring{0, 1};
            slots.phase = 1;
            for (uint32 index = blockIdx.x;;) {
                const Job job(p, index, works);
                if (job.tile >= 0 || index >= jobs) {
                    if (leads) {
                        wait_phase(free(job_pair(slots.stage)), slots.phase);
                        job.store(job_at(slots.stage));
                        arrive(full(job_pair(slots.stage)));
                    }
                    slots.next();
                }
                if (index >= jobs) break;
                const uint32 taken = leads ? atomicInc(mapped.taken, jobs - 1) : 0;
                if (job.tile >= 0) {
                    const int kv_head = job.h / group_size;
                    KeyWalk walk = job.walk(p);
                    auto find = [&]() {
                        follow(walk);
                        free_sheet();
                    };
                    auto copy_keys = [&](int64 n) {
                        copy(mapped.k, keys(key_ring.stage).base, Keys::BYTES / Keys::PANEL, Keys::PANEL,
                             Keys::PANEL, key_pair(key_ring.stage), key_ring.phase, n, kv_head, job.b);
                        key_ring.next();
                    };
                    if constexpr (HAS_SHEETS) find();
                    if (walk.more()) copy_keys(walk.at());
                    while (walk.more()) {   // the keys of the next tile ahead of the values of this one
                        const int64 n = walk.at();
                        if constexpr (HAS_SHEETS) find();
                        else walk.next(p);
                        if (walk.more()) copy_keys(walk.at());
                        copy(mapped.v, values(value_ring.stage).base, Values::BYTES / Values::PANEL,
                             Values::PANEL, Values::PANEL, value_pair(value_ring.stage),
                             value_ring.phase, n, kv_head, job.b);
                        value_ring.next();
                    }
                }
                index = gridDim.x + __shfl_sync(~0u, taken, 0);
            }
        } else if (threadIdx.x / 32 % 4 == 1) {
            // Queries have their own warp: waiting for their place holds up no keys of the next tile.
            Ring<QUERY_BUFFERS> ring{0, 1};
            for (Job job = receive(); job.tile >= 0; job = receive()) {
#pragma unroll 1
                for (int group = 0; group < GROUPS; ++group)
                    copy(mapped.q, queries(ring.stage).base + group * 64 * 128,
                         Queries::BYTES / Queries::PANEL, Queries::PANEL, 64 * 128,
                         query_pair(ring.stage, group), ring.phase, job.first_row() + group * 64, job.h, job.b);
                ring.next();
            }
        } else if constexpr (HAS_SHEETS) {
            const int thread = threadIdx.x % WRITER_THREADS;
            sheet_ring.phase = 1;
            auto take_sheet = [&]() {
                wait_phase(free(sheet_pair(sheet_ring.stage)), sheet_ring.phase);
                sync_some(WRITER_BARRIER, WRITER_THREADS);
            };
            auto give_sheet = [&](int tile, int bits) {
                if (thread == 0) {
                    store_shared(block_at(sheet_ring.stage), tile);
                    store_shared(block_at(sheet_ring.stage) + 4, bits);
                }
                arrive_after_copies(full(sheet_pair(sheet_ring.stage)));
                __syncwarp();
                if (leads) arrive(full(sheet_pair(sheet_ring.stage)));
                sheet_ring.next();
            };
            for (Job job = receive(); job.tile >= 0; job = receive()) {
                for (KeyWalk walk = job.walk(p); walk.more(); walk.next(p)) {
                    take_sheet();
                    const ScoreTile t = walk.tile(p);
                    if constexpr (HAS_MASK) {
                        const bool any = mask(sheet_ring.stage).fill<WRITER_THREADS>(p, t, thread);
                        if (!any_of_some(WRITER_BARRIER, WRITER_THREADS, any)) continue;
                    }
                    if constexpr (HAS_BIAS) biases(sheet_ring.stage).fetch<WRITER_THREADS>(p, t, thread);
                    give_sheet(HAS_BLOCKS ? walk.now.tile : walk.place, walk.now.bits);
                }
                take_sheet();
                give_sheet(-1, -1);
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
    // Lets other queries come where outputs have left.
    uint32 leaving = 0;   // the pair of that place, or 0
    auto let_leave = [&]() {
        if (STORES_BOXES && leads && leaving != 0) {
            wait_stores_read();
            arrive(free(leaving));
        }
    };
    for (Job job = receive(); job.tile >= 0; job = receive()) {
        KeyWalk walk = job.walk(p);
        if constexpr (HAS_SHEETS) follow(walk);
        const Tiles tiles(p, job.first_row() + group * 64);
        // Other groups' tiles pass by: at the end, and at the beginning.
        const int behind = IN_BAND ? max(0, walk.end - max(walk.place, tiles.end)) : 0;
        const int ahead = IN_BAND ? max(0, min(walk.end - behind, tiles.begin) - walk.place) : 0;
        walk.place += ahead, walk.end -= behind;
        const Queries own = queries(query_ring.stage);
        const uint32 own_pair = query_pair(query_ring.stage, group);
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
        auto free_queries = [&]() {
            if (!STORES_BOXES && leads) arrive(free(own_pair));
        };
        auto free_keys = [&]() {
            if (leads) arrive(free(key_pair(key_ring.stage)));
            key_ring.next();
        };
        auto free_values = [&]() {
            if (leads) arrive(free(value_pair(value_ring.stage)));
            value_ring.next();
        };
        auto make_scores = [&](ScoreSums& s) {
            const int at = HAS_BLOCKS ? walk.now.tile : walk.place;
            const bool whole = (!HAS_LEFT || at >= tiles.whole_begin) && at < tiles.whole_end;
            to_scores(p, walk, whole, mask(sheet_ring.stage), biases(sheet_ring.stage), s);
            if constexpr (HAS_SHEETS) free_sheet();
        };
        auto find_next = [&]() {
            if constexpr (HAS_SHEETS) follow(walk);
            else walk.next(p);
        };
        bool all_have_references = false;
        auto take_in = [&](ScoreSums& s, Weights& weights) {
            float sums[ROWS];
            if (!(make_weights(p, s, state, weights, sums) & all_have_references)) {
                keep_branch();
                all_have_references = set_references(p, s, state);
                make_weights(p, s, state, weights, sums);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) state.sum[r] += sums[r];
            if constexpr (HAS_DROPOUT)
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    drop_weights(weights[step], p, walk.tile(p), 0, step);
        };

        // Lets so many tiles pass by, and as many turns, less one for the first tile of a job.
        bool begun = false;
        auto pass = [&](int count) {
#pragma unroll 1
            for (; IN_BAND && count > 0; --count) {
                wait_phase(full(key_pair(key_ring.stage)), key_ring.phase);
                __syncwarp();   // nobody still waits for a phase that others end
                free_keys();
                if (begun) {
                    take_turn();
                    hand_on_turn();
                }
                begun = true;
                wait_phase(full(value_pair(value_ring.stage)), value_ring.phase);
                __syncwarp();
                free_values();
            }
        };

        pass(ahead);
        wait_phase(full(own_pair), query_ring.phase);
        if (walk.more()) {
            Weights weights;
            {
                ScoreSums s;
                wait_phase(full(key_pair(key_ring.stage)), key_ring.phase);
                if (begun) take_turn();
                start_scores(s);
                if (begun) hand_on_turn();
                begun = true;
                let_leave();
                wait_products<0>();
                pin(s);
                free_keys();
                if (!HAS_SHEETS && walk.is_last()) free_queries();
                make_scores(s);
                take_in(s, weights);
            }
            find_next();
#pragma unroll 1
            for (; walk.more(); find_next()) {
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
                if (!HAS_SHEETS && walk.is_last()) free_queries();
                make_scores(s);
                wait_products<0>();
                pin(state.out);
                free_values();
                take_in(s, weights);
            }
            if (HAS_SHEETS) free_queries();
            wait_phase(full(value_pair(value_ring.stage)), value_ring.phase);
            start_outputs(weights);
            wait_products<0>();
            pin(state.out);
            free_values();
        } else {
            let_leave();
            free_queries();
        }
        if constexpr (HAS_SHEETS) free_sheet();   // which said that there are no more
        pass(behind);

        leaving = own_pair;
        query_ring.next();
        const ScoreTile t(p, job.b, job.h, job.first_row(), 0);
        const bool is_split = HAS_BLOCKS && job.split >= 0;
        const Ends ends(p, t, state, is_split, job.split);
        if (is_split) {
            write_partial(p, t, state, ends, job.split);
            continue;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < VALUE_WIDTH / 4; ++c) at(state.out, r, c) *= ends.factors[r];
        if constexpr (STORES_BOXES) {
            sync_some(1 + GROUPS + group, 128);   // no product needs the queries any more
            store_out(Outs{own.base}, state);
            end_own_writes();
            __syncwarp();
            if (leads) {
#pragma unroll 1
                for (int panel = 0; panel < Outs::BYTES / Outs::PANEL; ++panel)
                    store_box(mapped.out, own.base + panel * Outs::PANEL + warp_row() * 128, panel * 64,
                              static_cast<int>(t.m) + warp_row(), job.h, job.b);
                end_stores();
            }
        } else {
            write_out(p, t, state);
        }
        if (ends.any_special()) {
            if (STORES_BOXES && leads) wait_stores();
            __syncwarp();
            ends.for_special(t, [&](int64 row, float lse) { make_output_here(p, t.b, t.h, row, lse); });
        }
    }
    if (group == 0) take_turn();   // the turn that is left
    if (STORES_BOXES && leads) wait_stores();
}
