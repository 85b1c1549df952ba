// Outputs and lse of queries whose lists of a block mask are split: the partial results of
// attention_forward.cu, each with the weight that its own lse has in that of all.
//
// Grid: one-dimensional, each warp takes rows warp, + warps in the grid, ... Threads: 32 x WARPS.
// Constants: those of attention_forward.cu.
#include "pairs.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
combine_outputs(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % 32;
    const int64 warps = static_cast<int64>(gridDim.x) * WARPS;
    int64 warp = static_cast<int64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    for (; warp < p.batch * p.q_heads * p.cut_count * BLOCK_M; warp += warps) {
        const int64 head = warp / BLOCK_M / p.cut_count, b = head / p.q_heads, h = head % p.q_heads;
        const Work cut = p.cuts[first_list(p, b, h, p.cut_count) + warp / BLOCK_M % p.cut_count];
        const int row = static_cast<int>(warp % BLOCK_M);
        const int64 i = static_cast<int64>(cut.tile) * BLOCK_M + row;
        if (cut.tile < 0 || i >= p.q_len) continue;
        auto lse_of = [&](int split) {
            return partial(p, p.partial_lse, head, split, BLOCK_M)[row] * LOG2_E;
        };

        const float sink = HAS_SINKS ? p.sinks[h] * LOG2_E : -infinity<float>();
        float top = sink;
        for (int split = cut.begin; split < cut.end; ++split) top = fmaxf(top, lse_of(split));
        const float safe = top == -infinity<float>() ? 0 : top;
        float sum = exp2_approximate(sink - safe);
        RowSum<VALUE_DIM> out;
        for (int split = cut.begin; split < cut.end; ++split) {
            const float weight = exp2_approximate(lse_of(split) - safe);
            sum += weight;
            out.add(weight, partial(p, p.partials, head, split, BLOCK_M * VALUE_DIM) + row * VALUE_DIM);
        }
        const float lse = sum == 0 ? -infinity<float>() : top / LOG2_E + log_of(sum);
        if (p.lse != nullptr && lane == 0) p.lse[(b * p.q_heads + h) * p.q_len + i] = lse;
        if (out.is_special()) make_output(p, b, h, i, lse);
        else out.write(p.out + b * p.out_strides.batch + h * p.out_strides.head + i * p.out_strides.row,
                       sum == 0 ? 0 : 1 / sum);
    }
}
