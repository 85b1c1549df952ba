// D = rowsum(dout * out) - dlse, one number per query row: what softmax's gradient subtracts.
// Rows with lse -inf, which see nothing, get 0, whatever dout holds there.
//
// Grid: one-dimensional, LANES lanes take rows, + rows in the grid, ... Constants: VALUE_DIM, VECTOR
// (elements per global access), LANES (a power of two), THREADS.
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_prepare(const __grid_constant__ Params p) {
    constexpr int CHUNKS = VALUE_DIM / VECTOR;
    const int lane = threadIdx.x % LANES;
    const int64 rows = p.batch * p.q_heads * p.q_len;
    const int64 stride = static_cast<int64>(gridDim.x) * (THREADS / LANES);
    int64 row = static_cast<int64>(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    for (; row - threadIdx.x / LANES < rows; row += stride) {   // warps stay together
        const bool exists = row < rows;
        const int64 i = row % p.q_len, h = row / p.q_len % p.q_heads, b = row / p.q_len / p.q_heads;
        const Element* out = p.out + b * p.out_strides.batch + i * p.out_strides.row +
                             h * p.out_strides.head;
        const Element* dout = p.dout + b * p.dout_strides.batch + i * p.dout_strides.row +
                              h * p.dout_strides.head;
        Compute sum = 0;
        for (int chunk = lane; exists && chunk < CHUNKS; chunk += LANES) {
            const int64 x = chunk * VECTOR * (VECTOR > 1 ? 1 : p.out_strides.channel);
            const int64 y = chunk * VECTOR * (VECTOR > 1 ? 1 : p.dout_strides.channel);
            const auto left = *reinterpret_cast<const Vector<Element, VECTOR>*>(out + x);
            const auto right = *reinterpret_cast<const Vector<Element, VECTOR>*>(dout + y);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                sum += static_cast<Compute>(to_compute(left.at[e])) *
                       static_cast<Compute>(to_compute(right.at[e]));
        }
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
            sum += __shfl_xor_sync(~0u, sum, other);
        if (!exists || lane != 0) continue;
        if (p.dlse != nullptr) sum -= p.dlse[row];
        p.delta[row] = p.lse[row] == -infinity<Compute>() ? 0 : sum;
    }
}
