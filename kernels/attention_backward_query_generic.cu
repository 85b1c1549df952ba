// The deterministic gradient of q, companion of attention_backward_generic.cu: a block takes
// BLOCK_M queries of one head and walks over the keys they see, always in the same order.
//   dq = ds k  (names: attention_backward_generic.cu)
//
// Grid: one-dimensional over (query tile, head, batch, column slice). Threads: THREADS_M x THREADS_N.
// Shared memory, in Compute: gradient [BLOCK_M][SCORE_STRIDE], ring 2 x [RING]
//
// Constants beside those of recompute.cuh: HEAD_DIM, VALUE_DIM, SLICES, MIN_BLOCKS.
#include "recompute.cuh"

constexpr int SLICE = round_up(HEAD_DIM, COLUMN_GROUP * SLICES) / SLICES;
constexpr int RING = SCORE_RING > BLOCK_K * SLICE ? SCORE_RING : BLOCK_K * SLICE;
static_assert(BLOCK_N % BLOCK_K == 0, "chunks of k tile the keys");
static_assert((BLOCK_M * SCORE_STRIDE + 2 * RING) * sizeof(Compute) == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward_query_generic(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Compute* gradient = reinterpret_cast<Compute*>(shared);
    Ring<RING> ring{gradient + BLOCK_M * SCORE_STRIDE, 0};

    const int64 row_tiles = (p.q_len + BLOCK_M - 1) / BLOCK_M, heads = p.batch * p.q_heads;
    for (int64 tile = blockIdx.x; tile < row_tiles * heads * SLICES; tile += gridDim.x) {
        const int first = static_cast<int>(tile % SLICES) * SLICE;
        const int64 rest = tile / SLICES;
        const int64 head = HAS_RIGHT ? rest % heads : rest / row_tiles;
        const int64 m = (HAS_RIGHT ? row_tiles - 1 - rest / heads : rest % row_tiles) * BLOCK_M;
        const int64 b = head / p.q_heads, h = head % p.q_heads;
        const int64 kv_head = h / (p.q_heads / p.kv_heads);
        const Rows q(p.q, p.q_strides, b, h, m, p.q_len, HEAD_DIM);
        const Rows dout(p.dout, p.dout_strides, b, h, m, p.q_len, VALUE_DIM);

        Compute dq[ROWS][SLICE / THREADS_N] = {};
        for (KeyWalk walk(p, b, h, m); walk.more(); walk.next(p)) {
            const int64 n = walk.at();
            const ScoreTile t = walk.tile(p);
            const uint64 visible = visible_bits(p, t);
            if (HAS_MASK && !__syncthreads_or(visible != 0)) continue;
            const Rows k(p.k, p.k_strides, b, kv_head, n, p.kv_len, HEAD_DIM);
            const Rows v(p.v, p.v_strides, b, kv_head, n, p.kv_len, VALUE_DIM);
            Compute s[ROWS][COLUMNS] = {}, dp[ROWS][COLUMNS] = {};
            row_products<HEAD_DIM>(s, q, k, ring);
            row_products<VALUE_DIM>(dp, dout, v, ring);
            gradients(p, t, visible, s, dp);
            store_scores(gradient, dp);
            add_products<false, BLOCK_N, SLICE>(dq, gradient, k, first, ring);
        }

        const int rows = static_cast<int>(min64(BLOCK_M, p.q_len - m));
        Element* target = p.dq + b * p.dq_strides.batch +
                          m * p.dq_strides.row + h * p.dq_strides.head;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            int row = score_row(r);
            if (row >= rows) continue;
#pragma unroll
            for (int c = 0; c < SLICE / THREADS_N; ++c) {
                int column = first + product_column(c);
                if (column < HEAD_DIM)
                    target[row * p.dq_strides.row + channel_offset(column, p.dq_strides.channel)] =
                        convert<Element>(dq[r][c] * p.scale);
            }
        }
    }
}
