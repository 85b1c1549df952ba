// Gradients of q, k and v, recomputed from (q, k, v, out, lse), for any dtype, head size, stride
// and option, without tensor cores. A block takes BLOCK_N keys of one kv head, walks over the
// queries of the whole group that see them, sums dk and dv in registers and adds its share of dq
// to memory (ADD_DQ; the deterministic dq has a kernel of its own).
// With scores s, logits l, p = exp(l - lse), D = rowsum(dout * out) - dlse:
//   dv = p^T dout,  dp = dout v^T,  dl = p * (dp - D),  ds = dl * dl/ds,  dq = ds k,  dk = ds^T q
//
// Grid: one-dimensional over (key tile, kv head, batch, column slice). Threads: THREADS_M x THREADS_N.
// Shared memory, in Compute: probability and gradient [BLOCK_M][SCORE_STRIDE], ring 2 x [RING]
//
// Constants beside those of scores.cuh and tile.cuh: HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_K (rows
// in one chunk of the last three products), SLICES (blocks that share the columns of dk, dv, dq),
// DQ_COLUMNS (columns of dq summed at a time), ADD_DQ, MIN_BLOCKS.
#include "recompute.cuh"

constexpr int HEAD_SLICE = round_up(HEAD_DIM, COLUMN_GROUP * SLICES) / SLICES;
constexpr int VALUE_SLICE = round_up(VALUE_DIM, COLUMN_GROUP * SLICES) / SLICES;
constexpr int DQ_WIDTH = DQ_COLUMNS < HEAD_SLICE ? DQ_COLUMNS : HEAD_SLICE;
constexpr int WIDEST = HEAD_SLICE > VALUE_SLICE ? HEAD_SLICE : VALUE_SLICE;
constexpr int RING = SCORE_RING > BLOCK_K * WIDEST ? SCORE_RING : BLOCK_K * WIDEST;
constexpr int KEY_ROWS = BLOCK_N / THREADS_M;   // rows of dk and dv of one thread
static_assert(BLOCK_N % THREADS_M == 0 && BLOCK_M % BLOCK_K == 0 && BLOCK_N % BLOCK_K == 0,
              "threads and chunks share the tile evenly");
static_assert(2 * (BLOCK_M * SCORE_STRIDE + RING) * sizeof(Compute) == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");
static_assert(HEAD_SLICE % DQ_WIDTH == 0, "dq is summed in equal parts");

// Adds the thread's part of a [BLOCK_M][DQ_WIDTH] product to rows of the sums of dq.
__device__ __forceinline__ void add_dq(const Params& p, const ScoreTile& t, int first,
                                       const Compute (&sum)[ROWS][DQ_WIDTH / THREADS_N]) {
    const int64 row_stride = p.q_heads * HEAD_DIM;
    Compute* sums = p.sums + (t.b * p.q_len + t.m) * row_stride + t.h * HEAD_DIM;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int row = score_row(r);
        if (row >= t.rows) continue;
#pragma unroll
        for (int c = 0; c < DQ_WIDTH / THREADS_N; ++c) {
            int column = first + product_column(c);
            if (column < HEAD_DIM)
                atomicAdd(sums + row * row_stride + column, sum[r][c] * p.scale);
        }
    }
}

// Writes the thread's part of [BLOCK_N][SLICE], times `factor`, to rows of dk or dv.
template <int SLICE>
__device__ __forceinline__ void write_keys(Element* target, const Strides& strides, int rows,
                                           int first, int columns, Compute factor,
                                           const Compute (&sum)[KEY_ROWS][SLICE / THREADS_N]) {
#pragma unroll
    for (int r = 0; r < KEY_ROWS; ++r) {
        int row = thread_row() * KEY_ROWS + r;
        if (row >= rows) continue;
#pragma unroll
        for (int c = 0; c < SLICE / THREADS_N; ++c) {
            int column = first + product_column(c);
            if (column < columns)
                target[row * strides.row + channel_offset(column, strides.channel)] =
                    convert<Element>(sum[r][c] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward_generic(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Compute* probability = reinterpret_cast<Compute*>(shared);
    Compute* gradient = probability + BLOCK_M * SCORE_STRIDE;
    Ring<RING> ring{gradient + BLOCK_M * SCORE_STRIDE, 0};

    const int64 key_tiles = (p.kv_len + BLOCK_N - 1) / BLOCK_N;
    const int64 heads = p.batch * p.kv_heads, group = p.q_heads / p.kv_heads;
    for (int64 tile = blockIdx.x; tile < key_tiles * heads * SLICES; tile += gridDim.x) {
        const int slice = static_cast<int>(tile % SLICES);
        // Causal: the first keys are seen by most queries, so all heads' first tiles come first.
        const int64 rest = tile / SLICES;
        const int64 head = HAS_RIGHT ? rest % heads : rest / key_tiles;
        const int64 n = (HAS_RIGHT ? rest / heads : rest % key_tiles) * BLOCK_N;
        const int64 b = head / p.kv_heads, kv_head = head % p.kv_heads;
        const Rows k(p.k, p.k_strides, b, kv_head, n, p.kv_len, HEAD_DIM);
        const Rows v(p.v, p.v_strides, b, kv_head, n, p.kv_len, VALUE_DIM);

        Compute dk[KEY_ROWS][HEAD_SLICE / THREADS_N] = {};
        Compute dv[KEY_ROWS][VALUE_SLICE / THREADS_N] = {};
        for (int64 step = 0; step < group; ++step) {
            const int64 h = kv_head * group + step;
            for (QueryWalk walk(p, b, h, n); walk.more(); walk.next(p)) {
                const int64 m = walk.at();
                const ScoreTile t = walk.tile(p);
                const uint64 visible = visible_bits(p, t);
                if (HAS_MASK && !__syncthreads_or(visible != 0)) continue;
                const Rows q(p.q, p.q_strides, b, h, m, p.q_len, HEAD_DIM);
                const Rows dout(p.dout, p.dout_strides, b, h, m, p.q_len, VALUE_DIM);

                Compute s[ROWS][COLUMNS] = {}, dp[ROWS][COLUMNS] = {};
                row_products<HEAD_DIM>(s, q, k, ring);
                row_products<VALUE_DIM>(dp, dout, v, ring);
                gradients(p, t, visible, s, dp);
                store_scores(probability, s);
                store_scores(gradient, dp);

                add_products<true, BLOCK_M, VALUE_SLICE>(dv, probability, dout,
                                                         slice * VALUE_SLICE, ring);
                add_products<true, BLOCK_M, HEAD_SLICE>(dk, gradient, q, slice * HEAD_SLICE, ring);
                if constexpr (ADD_DQ) {
#pragma unroll 1
                    for (int part = 0; part < HEAD_SLICE; part += DQ_WIDTH) {
                        const int first = slice * HEAD_SLICE + part;
                        Compute dq[ROWS][DQ_WIDTH / THREADS_N] = {};
                        add_products<false, BLOCK_N, DQ_WIDTH>(dq, gradient, k, first, ring);
                        add_dq(p, t, first, dq);
                    }
                }
            }
        }
        const int rows = static_cast<int>(min64(BLOCK_N, p.kv_len - n));
        const Strides &dk_strides = p.dk_strides, &dv_strides = p.dv_strides;
        write_keys<HEAD_SLICE>(
            p.dk + b * dk_strides.batch + n * dk_strides.row + kv_head * dk_strides.head,
            dk_strides, rows, slice * HEAD_SLICE, HEAD_DIM, p.scale, dk);
        write_keys<VALUE_SLICE>(
            p.dv + b * dv_strides.batch + n * dv_strides.row + kv_head * dv_strides.head,
            dv_strides, rows, slice * VALUE_SLICE, VALUE_DIM, 1, dv);
    }
}
