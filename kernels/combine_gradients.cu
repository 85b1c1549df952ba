// Gradients of keys and values (OF_KEYS), or else of queries, whose lists of a block mask are split: the
// sums of the partial results of attention_backward.cu or attention_backward_query.cu.
//
// Grid: one-dimensional, each warp takes rows warp, + warps in the grid, ... Threads: 32 x WARPS.
// Constants: those of the other kernel, and OF_KEYS.
#include "pairs.cuh"

constexpr int HEIGHT = OF_KEYS ? BLOCK_N : BLOCK_M;

// All columns of a row of `LENGTH` (pairs.cuh).
template <int LENGTH>
struct Whole {
    static constexpr int STEPS = (LENGTH + 15) / 16;
    static __device__ __forceinline__ int step() { return 0; }
};

template <int LENGTH>
__device__ __forceinline__ RowSum<LENGTH> sum_of(const Params& p, int64 head, const Work& cut,
                                                 int size, int first) {
    RowSum<LENGTH> sum;
    for (int split = cut.begin; split < cut.end; ++split)
        sum.add(1, partial(p, p.partials, head, split, size) + first);
    return sum;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
combine_gradients(const __grid_constant__ Params p) {
    const int64 heads = OF_KEYS ? p.kv_heads : p.q_heads, group = OF_KEYS ? p.q_heads / p.kv_heads : 1;
    const int64 length = OF_KEYS ? p.kv_len : p.q_len;
    const int64 warps = static_cast<int64>(gridDim.x) * WARPS;
    int64 warp = static_cast<int64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    for (; warp < p.batch * heads * p.cut_count * HEIGHT; warp += warps) {
        const int64 head = warp / HEIGHT / p.cut_count, b = head / heads, h = head % heads;
        const Work cut = p.cuts[first_list(p, b, h * group, p.cut_count) + warp / HEIGHT % p.cut_count];
        const int row = static_cast<int>(warp % HEIGHT);
        const int64 i = static_cast<int64>(cut.tile) * HEIGHT + row;
        if (cut.tile < 0 || i >= length) continue;
        if constexpr (OF_KEYS) {
            constexpr int SIZE = BLOCK_N * (HEAD_DIM + VALUE_DIM);
            const auto dk = sum_of<HEAD_DIM>(p, head, cut, SIZE, row * HEAD_DIM);
            const auto dv = sum_of<VALUE_DIM>(p, head, cut, SIZE, BLOCK_N * HEAD_DIM + row * VALUE_DIM);
            if (dk.is_special() || dv.is_special()) {
                make_dk_dv<Whole<HEAD_DIM>, Whole<VALUE_DIM>>(p, b, h, i);
                continue;
            }
            dk.write(p.dk + b * p.dk_strides.batch + h * p.dk_strides.head + i * p.dk_strides.row, p.scale);
            dv.write(p.dv + b * p.dv_strides.batch + h * p.dv_strides.head + i * p.dv_strides.row,
                     HAS_DROPOUT ? p.keep_scale : 1);
        } else {
            const auto dq = sum_of<HEAD_DIM>(p, head, cut, BLOCK_M * HEAD_DIM, row * HEAD_DIM);
            if (dq.is_special()) make_dq(p, b, h, i);
            else dq.write(p.dq + b * p.dq_strides.batch + h * p.dq_strides.head + i * p.dq_strides.row,
                          p.scale);
        }
    }
}
