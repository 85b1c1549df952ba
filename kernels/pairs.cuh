// Pairs (query, key) one after another, by a warp. Tensor cores make 0 * inf = NaN of a hidden pair
// that meets an infinity or NaN. Rows that do not come out finite are therefore made again from
// their visible pairs alone; that is rare.
//
// Constants beside those of scores.cuh: HEAD_DIM, VALUE_DIM. Channels lie side by side.
#pragma once
#include "scores.cuh"

// The lanes' rows for which any of their four lanes asks, one bit for the first lane of each.
__device__ __forceinline__ uint32 rows_that(bool ask) {
    uint32 lanes = __ballot_sync(~0u, ask);
    return (lanes | lanes >> 1 | lanes >> 2 | lanes >> 3) & 0x11111111u;
}
// Rows of one batch element and head (of its group, for keys).
struct Heads {
    int64 b, h, kv_head;
    __device__ __forceinline__ Heads(const Params& p, int64 b, int64 h)
        : b(b), h(h), kv_head(h / (p.q_heads / p.kv_heads)) {}
    __device__ __forceinline__ const Element* query(const Params& p, int64 i) const {
        return p.q + b * p.q_strides.batch + h * p.q_strides.head + i * p.q_strides.row;
    }
    __device__ __forceinline__ const Element* dout(const Params& p, int64 i) const {
        return p.dout + b * p.dout_strides.batch + h * p.dout_strides.head + i * p.dout_strides.row;
    }
    __device__ __forceinline__ const Element* key(const Params& p, int64 j) const {
        return p.k + b * p.k_strides.batch + kv_head * p.k_strides.head + j * p.k_strides.row;
    }
    __device__ __forceinline__ const Element* value(const Params& p, int64 j) const {
        return p.v + b * p.v_strides.batch + kv_head * p.v_strides.head + j * p.v_strides.row;
    }
};

template <int LENGTH>
__device__ __forceinline__ float inner_product(const Element* x, const Element* y) {
    float sum = 0;
    for (int d = threadIdx.x % 32; d < LENGTH; d += 32) sum += to_compute(x[d]) * to_compute(y[d]);
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
}

// A sum of weighted rows, each lane with every 32nd channel.
template <int LENGTH>
struct RowSum {
    float sum[(LENGTH + 31) / 32] = {};
    template <typename Number>
    __device__ __forceinline__ void add(float weight, const Number* row) {
        for (int d = threadIdx.x % 32, e = 0; d < LENGTH; d += 32, ++e)
            sum[e] += weight * to_compute(row[d]);
    }
    // Nothing that is still added can change the row: it is all NaN.
    __device__ __forceinline__ bool is_lost() const {
        bool lost = true;
        for (int d = threadIdx.x % 32, e = 0; d < LENGTH; d += 32, ++e) lost &= sum[e] != sum[e];
        return __all_sync(~0u, lost);
    }
    // Whether an infinity or NaN is among the sums.
    __device__ __forceinline__ bool is_special() const {
        bool special = false;
        for (int d = threadIdx.x % 32, e = 0; d < LENGTH; d += 32, ++e) special |= !(sum[e] - sum[e] == 0);
        return __any_sync(~0u, special);
    }
    // Writes `channels` channels from `first` on.
    __device__ __forceinline__ void write(Element* row, float factor, int first = 0,
                                          int channels = LENGTH) const {
        for (int d = threadIdx.x % 32, e = 0; d < LENGTH; d += 32, ++e)
            if (d >= first && d < first + channels) row[d] = convert<Element>(sum[e] * factor);
    }
};

// The probability of a pair, its factor by dropout, and the derivative of its logit.
struct Pair {
    bool seen = false;   // visible, and not hidden by an infinite bias
    float probability = 0, keep = 1, slope = 1;

    // Of query i and key j, in the tile t.
    __device__ __forceinline__ Pair(const Params& p, const Heads& heads, const ScoreTile& t, int64 i,
                                    int64 j, float lse) {
        const int row = static_cast<int>(i - t.m), column = static_cast<int>(j - t.n);
        if (lse == -infinity<float>() || !is_visible(p, t, row, column)) return;
        const float product = inner_product<HEAD_DIM>(heads.query(p, i), heads.key(p, j));
        const float l = logit(p, t, row, column, product, bias_of(p, t, row, column), slope);
        if (l == -infinity<float>()) return;
        seen = true;
        probability = exp_of(l - lse);
        if (HAS_DROPOUT) keep = is_dropped(p, heads.b, heads.h, i, j) ? 0 : p.keep_scale;
    }

    // Gradient of the scaled product.
    __device__ __forceinline__ float gradient(const Params& p, const Heads& heads, int64 i,
                                              int64 j) const {
        const float dp = inner_product<VALUE_DIM>(heads.dout(p, i), heads.value(p, j));
        const float delta = p.delta[(heads.b * p.q_heads + heads.h) * p.q_len + i];
        return probability * (dp * keep - delta) * slope;
    }
};

// A row of the output, from its lse. To be put where it is used: a call costs Hopper's kernel all uniform
// registers.
__device__ __forceinline__ void make_output_here(const Params& p, int64 b, int64 h, int64 i, float lse) {
    const Heads heads(p, b, h);
    RowSum<VALUE_DIM> out;
    for (KeyWalk walk(p, b, h, i / BLOCK_M * BLOCK_M); walk.more(); walk.next(p)) {
        const ScoreTile t = walk.tile(p);
        for (int64 j = t.n; j < t.n + t.columns && !out.is_lost(); ++j) {
            const Pair pair(p, heads, t, i, j, lse);
            if (pair.seen) out.add(pair.probability * pair.keep, heads.value(p, j));
        }
    }
    out.write(p.out + b * p.out_strides.batch + h * p.out_strides.head + i * p.out_strides.row, 1);
}

__device__ __noinline__ void make_output(const Params& p, int64 b, int64 h, int64 i, float lse) {
    make_output_here(p, b, h, i, lse);
}

// A row of dq.
__device__ __noinline__ void make_dq(const Params& p, int64 b, int64 h, int64 i) {
    const Heads heads(p, b, h);
    const float lse = p.lse[(b * p.q_heads + h) * p.q_len + i];
    RowSum<HEAD_DIM> dq;
    for (KeyWalk walk(p, b, h, i / BLOCK_M * BLOCK_M); walk.more(); walk.next(p)) {
        const ScoreTile t = walk.tile(p);
        for (int64 j = t.n; j < t.n + t.columns && !dq.is_lost(); ++j) {
            const Pair pair(p, heads, t, i, j, lse);
            if (pair.seen) dq.add(pair.gradient(p, heads, i, j), heads.key(p, j));
        }
    }
    dq.write(p.dq + b * p.dq_strides.batch + h * p.dq_strides.head + i * p.dq_strides.row, p.scale);
}

// A row of dk and dv: the warp's columns of its shares.
template <typename KeyShare, typename ValueShare>
__device__ __noinline__ void make_dk_dv(const Params& p, int64 b, int64 kv_head, int64 j) {
    const int64 group = p.q_heads / p.kv_heads;
    RowSum<HEAD_DIM> dk;
    RowSum<VALUE_DIM> dv;
    for (int64 h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const Heads heads(p, b, h);
        for (QueryWalk walk(p, b, h, j / BLOCK_N * BLOCK_N); walk.more(); walk.next(p)) {
            const ScoreTile t = walk.tile(p);
            for (int64 i = t.m; i < t.m + t.rows && !(dk.is_lost() && dv.is_lost()); ++i) {
                const Pair pair(p, heads, t, i, j, p.lse[(b * p.q_heads + h) * p.q_len + i]);
                if (!pair.seen) continue;
                dk.add(pair.gradient(p, heads, i, j), heads.query(p, i));
                dv.add(pair.probability * pair.keep, heads.dout(p, i));
            }
        }
    }
    dk.write(p.dk + b * p.dk_strides.batch + kv_head * p.dk_strides.head + j * p.dk_strides.row,
             p.scale, KeyShare::step() * 16, KeyShare::STEPS * 16);
    dv.write(p.dv + b * p.dv_strides.batch + kv_head * p.dv_strides.head + j * p.dv_strides.row, 1,
             ValueShare::step() * 16, ValueShare::STEPS * 16);
}
