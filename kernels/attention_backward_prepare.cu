// D = rowsum(dout * out) - dlse, one number per query row: what softmax's gradient subtracts.
// Rows with lse -inf, which see nothing, get 0, whatever dout holds there.
//
// Grid: one-dimensional, each warp takes rows warp, + warps in the grid, ...
// Constants: VALUE_DIM, THREADS.
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_prepare(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % 32;
    const int64 warps = static_cast<int64>(gridDim.x) * (THREADS / 32);
    int64 row = static_cast<int64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    for (; row < p.batch * p.q_heads * p.q_len; row += warps) {
        const int64 i = row % p.q_len, h = row / p.q_len % p.q_heads, b = row / p.q_len / p.q_heads;
        const Element* out = p.out + b * p.out_strides.batch + i * p.out_strides.row +
                             h * p.out_strides.head;
        const Element* dout = p.dout + b * p.dout_strides.batch + i * p.dout_strides.row +
                              h * p.dout_strides.head;
        Compute sum = 0;
        for (int c = lane; c < VALUE_DIM; c += 32)
            sum += static_cast<Compute>(to_compute(out[c * p.out_strides.channel])) *
                   static_cast<Compute>(to_compute(dout[c * p.dout_strides.channel]));
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane != 0) continue;
        if (p.dlse != nullptr) sum -= p.dlse[row];
        p.delta[row] = p.lse[row] == -infinity<Compute>() ? 0 : sum;
    }
}
