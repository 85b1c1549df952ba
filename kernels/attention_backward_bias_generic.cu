// The gradient of the bias, summed over the axes that were broadcast, in a fixed order and with no
// memory beside the result: a block takes one tile of the bias and walks over all batch elements,
// heads, query tiles and key tiles that share it.
//   dbias = sum of p * (dp - D)  (names: attention_backward_generic.cu)
//
// Grid: one-dimensional over tiles of the bias. Threads: THREADS_M x THREADS_N.
// Shared memory, in Compute: sums [BLOCK_M][SCORE_STRIDE], ring 2 x [SCORE_RING]
//
// Constants beside those of recompute.cuh: HEAD_DIM, VALUE_DIM, MIN_BLOCKS.
#include "recompute.cuh"

constexpr int RING = SCORE_RING;
static_assert((BLOCK_M * SCORE_STRIDE + 2 * RING) * sizeof(Compute) == SHARED_BYTES,
              "the plan counts shared memory as the kernel does");

// One tile of dbias from the thread's sums; an axis of length 1 is summed over, in order.
__device__ __forceinline__ void write_tile(const Params& p, BiasElement* target, int rows,
                                           int columns, const Compute* sums) {
    const bool one_row = p.bias_queries == 1, one_column = p.bias_keys == 1;
    const int out_rows = one_row ? 1 : rows, out_columns = one_column ? 1 : columns;
    for (int at = threadIdx.x; at < out_rows * out_columns; at += THREADS) {
        int row = at / out_columns, column = at % out_columns;
        Compute sum = 0;
        for (int r = row; r < (one_row ? BLOCK_M : row + 1); ++r)
            for (int c = column; c < (one_column ? BLOCK_N : column + 1); ++c)
                sum += sums[r * SCORE_STRIDE + c];
        target[row * p.bias_keys + column] = convert<BiasElement>(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward_bias_generic(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Compute* sums = reinterpret_cast<Compute*>(shared);
    Ring<RING> ring{sums + BLOCK_M * SCORE_STRIDE, 0};

    const int64 row_tiles = (p.bias_queries + BLOCK_M - 1) / BLOCK_M;
    const int64 key_tiles = (p.bias_keys + BLOCK_N - 1) / BLOCK_N;
    const int64 tiles = p.bias_batch * p.bias_heads * row_tiles * key_tiles;
    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64 n0 = tile % key_tiles * BLOCK_N, m0 = tile / key_tiles % row_tiles * BLOCK_M;
        const int64 plane = tile / key_tiles / row_tiles;
        const int64 b0 = plane / p.bias_heads, h0 = plane % p.bias_heads;
        const int64 b1 = p.bias_batch == 1 ? p.batch : b0 + 1;
        const int64 h1 = p.bias_heads == 1 ? p.q_heads : h0 + 1;
        const int64 m1 = p.bias_queries == 1 ? p.q_len : m0 + 1;
        const int64 n1 = p.bias_keys == 1 ? p.kv_len : n0 + 1;

        Compute sum[ROWS][COLUMNS] = {};
        for (int64 b = b0; b < b1; ++b)
            for (int64 h = h0; h < h1; ++h)
                for (int64 m = m0; m < m1; m += BLOCK_M) {
                    const Rows q(p.q, p.q_strides, b, h, m, p.q_len, HEAD_DIM);
                    const Rows dout(p.dout, p.dout_strides, b, h, m, p.q_len, VALUE_DIM);
                    for (KeyWalk walk(p, b, h, m, p.bias_keys == 1 ? 0 : n0); walk.at() < n1 && walk.more();
                         walk.next(p)) {
                        const int64 n = walk.at();
                        const ScoreTile t = walk.tile(p);
                        const uint64 visible = visible_bits(p, t);
                        if (!__syncthreads_or(visible != 0)) continue;
                        const int64 g = h / (p.q_heads / p.kv_heads);
                        const Rows k(p.k, p.k_strides, b, g, n, p.kv_len, HEAD_DIM);
                        const Rows v(p.v, p.v_strides, b, g, n, p.kv_len, VALUE_DIM);
                        Compute s[ROWS][COLUMNS] = {}, dp[ROWS][COLUMNS] = {};
                        row_products<HEAD_DIM>(s, q, k, ring);
                        row_products<VALUE_DIM>(dp, dout, v, ring);
                        gradients(p, t, visible, s, dp, true);
#pragma unroll
                        for (int r = 0; r < ROWS; ++r)
#pragma unroll
                            for (int c = 0; c < COLUMNS; ++c) sum[r][c] += dp[r][c];
                    }
                }
        __syncthreads();   // the tile before has been written
        store_scores(sums, sum);
        __syncthreads();
        const int rows = static_cast<int>(min64(BLOCK_M, p.bias_queries - m0));
        const int columns = static_cast<int>(min64(BLOCK_N, p.bias_keys - n0));
        write_tile(p, p.dbias + (plane * p.bias_queries + m0) * p.bias_keys + n0, rows, columns,
                   sums);
    }
}
