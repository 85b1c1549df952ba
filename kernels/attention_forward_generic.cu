// Exact attention, forward, for any dtype, head size, stride and option, without tensor cores.
// A block takes BLOCK_M queries of one head and walks over the keys they see, with an online
// softmax: scores never leave the chip. Reference: cuflash/reference.py, the same in NumPy.
//
// Grid: one-dimensional, each block takes tiles blockIdx.x, + gridDim.x, ...; causal tiles with
// most keys first. Threads: THREADS_M x THREADS_N (tile.cuh). Shared memory, in Compute:
//   query [BLOCK_M][HEAD_WIDTH + PAD], probability [BLOCK_M][SCORE_STRIDE], ring 2 x [RING]
//
// Constants beside those of scores.cuh and tile.cuh: HEAD_DIM, VALUE_DIM, BLOCK_D (columns of q
// and k in one chunk), BLOCK_K (rows of v in one chunk), MIN_BLOCKS (per multiprocessor),
// HAS_SINKS.
#include "thread_scores.cuh"

constexpr int HEAD_WIDTH = round_up(HEAD_DIM, BLOCK_D);
constexpr int VALUE_WIDTH = round_up(VALUE_DIM, COLUMN_GROUP);
constexpr int HEAD_CHUNKS = HEAD_WIDTH / BLOCK_D;
constexpr int VALUE_CHUNKS = BLOCK_N / BLOCK_K;
constexpr int QUERY_STRIDE = HEAD_WIDTH + PAD;
constexpr int KEY_STRIDE = BLOCK_D + PAD;
constexpr int KEY_CHUNK = BLOCK_N * KEY_STRIDE, VALUE_CHUNK = BLOCK_K * VALUE_WIDTH;
constexpr int RING = KEY_CHUNK > VALUE_CHUNK ? KEY_CHUNK : VALUE_CHUNK;
constexpr int OUT_COLUMNS = VALUE_WIDTH / THREADS_N;
static_assert(BLOCK_N % BLOCK_K == 0, "chunks of v tile the keys");
static_assert((BLOCK_M * (QUERY_STRIDE + SCORE_STRIDE) + 2 * RING) * sizeof(Compute) ==
                  SHARED_BYTES, "the plan counts shared memory as the kernel does");

// Running maximum, sum and unnormalised output of the thread's rows; `sum` is the thread's share.
struct State {
    Compute maximum[ROWS], sum[ROWS], out[ROWS][OUT_COLUMNS];
};

// One step of the online softmax: takes in the logits s, leaves probabilities relative to the new
// maximum in shared memory. An exact -0 there marks a hidden score.
__device__ __forceinline__ void take_in(const Params& p, const ScoreTile& t,
                                        const Compute (&s)[ROWS][COLUMNS], State& state,
                                        Compute* probability) {
    const uint64 kept = kept_bits(p, t);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        Compute largest = state.maximum[r];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) largest = larger(largest, s[r][c]);
        largest = over_row(largest, [](Compute x, Compute y) { return larger(x, y); });
        Compute safe = largest == -infinity<Compute>() ? 0 : largest;
        Compute shrink = exp_of(state.maximum[r] - safe);
        state.maximum[r] = largest;
        state.sum[r] *= shrink;
#pragma unroll
        for (int c = 0; c < OUT_COLUMNS; ++c) state.out[r][c] *= shrink;

        Compute* row = probability + score_row(r) * SCORE_STRIDE;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            Compute weight = exp_of(s[r][c] - safe);
            state.sum[r] += weight;
            if (HAS_DROPOUT && !(kept >> (r * COLUMNS + c) & 1)) weight *= 0;
            if (CAN_HIDE && s[r][c] == -infinity<Compute>()) weight = hidden_zero();
            row[score_column(c)] = weight;
        }
    }
}

__device__ __forceinline__ void write_rows(const Params& p, const ScoreTile& t, State& state) {
    Element* out = p.out + t.b * p.out_strides.batch + t.m * p.out_strides.row +
                   t.h * p.out_strides.head;
    Compute* lse = p.lse + (t.b * p.q_heads + t.h) * p.q_len + t.m;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int row = score_row(r);
        Compute sum = over_row(state.sum[r], [](Compute x, Compute y) { return x + y; });
        Compute largest = state.maximum[r], factor = 1;
        if constexpr (HAS_SINKS) {
            Compute sink = p.sinks[t.h], top = larger(largest, sink);
            Compute safe = top == -infinity<Compute>() ? 0 : top;
            factor = exp_of(largest - safe);
            sum = sum * factor + exp_of(sink - safe);
            largest = top;
        }
        factor = sum == 0 ? 0 : factor / sum;
        if constexpr (HAS_DROPOUT) factor *= p.keep_scale;
        if (row >= t.rows) continue;
        if (p.lse != nullptr && thread_column() == 0)
            lse[row] = sum == 0 ? -infinity<Compute>() : largest + log_of(sum);
        constexpr int WIDTH = VECTOR < LANES ? VECTOR : LANES;
#pragma unroll
        for (int c = 0; c < OUT_COLUMNS; c += WIDTH) {
            int column = product_column(c);
            if (column >= VALUE_DIM) continue;
            Vector<Element, WIDTH> values;
#pragma unroll
            for (int e = 0; e < WIDTH; ++e)
                values.at[e] = convert<Element>(state.out[r][c + e] * factor);
            *reinterpret_cast<Vector<Element, WIDTH>*>(
                out + row * p.out_strides.row + channel_offset(column, p.out_strides.channel)) = values;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_forward_generic(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Compute* query = reinterpret_cast<Compute*>(shared);
    Compute* probability = query + BLOCK_M * QUERY_STRIDE;
    Ring<RING> ring{probability + BLOCK_M * SCORE_STRIDE, 0};

    const int64 row_tiles = (p.q_len + BLOCK_M - 1) / BLOCK_M, heads = p.batch * p.q_heads;
    for (int64 tile = blockIdx.x; tile < row_tiles * heads; tile += gridDim.x) {
        // Causal rows differ in length: all heads' longest first. Else a head's tiles together.
        const int64 head = HAS_RIGHT ? tile % heads : tile / row_tiles;
        const int64 m = (HAS_RIGHT ? row_tiles - 1 - tile / heads : tile % row_tiles) * BLOCK_M;
        const int64 b = head / p.q_heads, h = head % p.q_heads;
        const int64 kv_head = h / (p.q_heads / p.kv_heads);
        const Element* q = p.q + b * p.q_strides.batch + h * p.q_strides.head;
        const Element* k = p.k + b * p.k_strides.batch + kv_head * p.k_strides.head;
        const Element* v = p.v + b * p.v_strides.batch + kv_head * p.v_strides.head;

        Chunk<BLOCK_N, BLOCK_D> keys;
        Chunk<BLOCK_K, VALUE_WIDTH> values;
        auto fetch_keys = [&](int64 n, int chunk) {
            int d = chunk * BLOCK_D;
            keys.fetch(k + n * p.k_strides.row + channel_offset(d, p.k_strides.channel), p.k_strides.row,
                       p.k_strides.channel, p.kv_len - n, HEAD_DIM - d);
        };
        auto fetch_values = [&](int64 n) {
            values.fetch(v + n * p.v_strides.row, p.v_strides.row, p.v_strides.channel,
                         p.kv_len - n, VALUE_DIM);
        };
        // On to a tile in which a score is visible, and the thread's share of it.
        uint64 visible = 0;
        auto seek = [&](KeyWalk& walk) {
            for (; walk.more(); walk.next(p)) {
                visible = visible_bits(p, walk.tile(p));
                if (!HAS_MASK || __syncthreads_or(visible != 0)) break;
            }
        };

        __syncthreads();   // the tile before is done with shared memory
        for (int d = 0; d < HEAD_WIDTH; d += BLOCK_D) {
            Chunk<BLOCK_M, BLOCK_D> queries;
            queries.fetch(q + m * p.q_strides.row + channel_offset(d, p.q_strides.channel), p.q_strides.row,
                          p.q_strides.channel, p.q_len - m, HEAD_DIM - d);
            queries.template store<QUERY_STRIDE>(query + d);
        }

        State state;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            state.maximum[r] = -infinity<Compute>();
            state.sum[r] = 0;
#pragma unroll
            for (int c = 0; c < OUT_COLUMNS; ++c) state.out[r][c] = 0;
        }

        KeyWalk walk(p, b, h, m);
        seek(walk);
        if (walk.more()) fetch_keys(walk.at(), 0);
        while (walk.more()) {
            const ScoreTile t = walk.tile(p);
            Compute s[ROWS][COLUMNS] = {};
#pragma unroll 1
            for (int chunk = 0; chunk < HEAD_CHUNKS; ++chunk) {
                Compute* buffer = ring.next();
                keys.template store<KEY_STRIDE>(buffer);
                __syncthreads();
                if (chunk + 1 < HEAD_CHUNKS) fetch_keys(t.n, chunk + 1);
                else fetch_values(t.n);
                multiply_transposed<BLOCK_D, QUERY_STRIDE, KEY_STRIDE>(
                    s, query + chunk * BLOCK_D, buffer);
            }

            to_logits(p, t, visible, s);
            take_in(p, t, s, state, probability);

            walk.next(p);
            seek(walk);
#pragma unroll 1
            for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
                Compute* buffer = ring.next();
                bool special = values.template store<VALUE_WIDTH>(buffer);
                bool guarded = CAN_HIDE ? __syncthreads_or(special) : (__syncthreads(), false);
                if (chunk + 1 < VALUE_CHUNKS) fetch_values(t.n + (chunk + 1) * BLOCK_K);
                else if (walk.more()) fetch_keys(walk.at(), 0);
                const Compute* weights = probability + chunk * BLOCK_K;
                if (guarded)
                    multiply<false, true, BLOCK_K, SCORE_STRIDE, VALUE_WIDTH>(
                        state.out, weights, buffer);
                else
                    multiply<false, false, BLOCK_K, SCORE_STRIDE, VALUE_WIDTH>(
                        state.out, weights, buffer);
            }
        }
        write_rows(p, ScoreTile(p, b, h, m, 0), state);
    }
}
