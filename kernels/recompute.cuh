// What the backward kernels share: the two products over rows that recompute scores and their
// gradients, and products with tiles of them. Operands stream through a ring of two buffers.
//
// Constants: BLOCK_D (columns of one chunk of the row products), BLOCK_K (rows of one chunk of
// the others).
#pragma once
#include "thread_scores.cuh"

constexpr int CHUNK_STRIDE = BLOCK_D + PAD;
constexpr int SCORE_RING = (BLOCK_M + BLOCK_N) * CHUNK_STRIDE;

// Rows [first, length) of one head of a tensor.
struct Rows {
    const Element* data;
    int64 row_stride, channel_stride, count;
    int width;

    __device__ __forceinline__ Rows(const Element* base, const Strides& strides, int64 b, int64 h,
                                    int64 first, int64 length, int width)
        : data(base + b * strides.batch + h * strides.head + first * strides.row),
          row_stride(strides.row), channel_stride(strides.channel), count(length - first),
          width(width) {}

    template <int HEIGHT, int COLUMNS>
    __device__ __forceinline__ void fetch(Chunk<HEIGHT, COLUMNS>& chunk, int row,
                                          int column) const {
        chunk.fetch(data + row * row_stride + channel_offset(column, channel_stride), row_stride,
                    channel_stride, count - row, width - column);
    }
};

// product[i][j] += <row i of a, row j of b>, over WIDTH columns.
template <int WIDTH, int SIZE>
__device__ __forceinline__ void row_products(Compute (&product)[ROWS][COLUMNS], const Rows& a,
                                             const Rows& b, Ring<SIZE>& ring) {
    Chunk<BLOCK_M, BLOCK_D> left;
    Chunk<BLOCK_N, BLOCK_D> right;
    a.fetch(left, 0, 0);
    b.fetch(right, 0, 0);
#pragma unroll 1
    for (int d = 0; d < WIDTH; d += BLOCK_D) {
        Compute* buffer = ring.next();
        left.template store<CHUNK_STRIDE>(buffer);
        right.template store<CHUNK_STRIDE>(buffer + BLOCK_M * CHUNK_STRIDE);
        __syncthreads();
        if (d + BLOCK_D < WIDTH) {
            a.fetch(left, 0, d + BLOCK_D);
            b.fetch(right, 0, d + BLOCK_D);
        }
        multiply_transposed<BLOCK_D, CHUNK_STRIDE, CHUNK_STRIDE>(
            product, buffer, buffer + BLOCK_M * CHUNK_STRIDE);
    }
}

// sum += weights b (or weights^T b with BY_COLUMN), over DEPTH rows of b and its WIDTH columns
// from `column` on; weights are scores in shared memory.
template <bool BY_COLUMN, int DEPTH, int WIDTH, int HEIGHT, int SIZE>
__device__ __forceinline__ void add_products(Compute (&sum)[HEIGHT][WIDTH / THREADS_N],
                                             const Compute* weights, const Rows& b, int column,
                                             Ring<SIZE>& ring) {
    Chunk<BLOCK_K, WIDTH> chunk;
    b.fetch(chunk, 0, column);
#pragma unroll 1
    for (int row = 0; row < DEPTH; row += BLOCK_K) {
        Compute* buffer = ring.next();
        bool special = chunk.template store<WIDTH>(buffer);
        bool guarded = CAN_HIDE ? __syncthreads_or(special) : (__syncthreads(), false);
        if (row + BLOCK_K < DEPTH) b.fetch(chunk, row + BLOCK_K, column);
        const Compute* part = weights + row * (BY_COLUMN ? SCORE_STRIDE : 1);
        if (guarded) multiply<BY_COLUMN, true, BLOCK_K, SCORE_STRIDE, WIDTH>(sum, part, buffer);
        else multiply<BY_COLUMN, false, BLOCK_K, SCORE_STRIDE, WIDTH>(sum, part, buffer);
    }
}

// From products s = <q, k> and dp = <dout, v>: s becomes the probabilities that v was weighted
// with, dp the gradients of the products s, without the scale. An exact -0 marks what is hidden.
__device__ __forceinline__ void gradients(const Params& p, const ScoreTile& t, uint64 visible,
                                          Compute (&s)[ROWS][COLUMNS],
                                          Compute (&dp)[ROWS][COLUMNS], bool of_logits = false) {
    const uint64 kept = kept_bits(p, t);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int row = score_row(r);
        int64 at = (t.b * p.q_heads + t.h) * p.q_len + t.m + row;
        Compute lse = row < t.rows ? p.lse[at] : infinity<Compute>();
        Compute delta = row < t.rows ? p.delta[at] : 0;
        if (lse == -infinity<Compute>()) lse = infinity<Compute>();   // the row sees nothing
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            Compute slope, l = score_logit(p, t, r, c, s[r][c], slope);
            bool hidden = !(visible >> (r * COLUMNS + c) & 1) || (HAS_BIAS && l == -infinity<Compute>());
            Compute weight = exp_of(l - lse);
            weight = weight > 1 ? 1 : weight;   // rounding of a large lse must not grow
            Compute keep = HAS_DROPOUT ? (kept >> (r * COLUMNS + c) & 1 ? p.keep_scale : 0) : 1;
            Compute dl = weight * (dp[r][c] * keep - delta);
            s[r][c] = hidden ? hidden_zero() : weight * keep;
            // + 0 turns a -0 that was not meant as a mark into +0
            dp[r][c] = hidden ? hidden_zero() : dl * (of_logits ? 1 : slope) + 0;
        }
    }
}

__device__ __forceinline__ void store_scores(Compute* target, const Compute (&s)[ROWS][COLUMNS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            target[score_row(r) * SCORE_STRIDE + score_column(c)] = s[r][c];
}
