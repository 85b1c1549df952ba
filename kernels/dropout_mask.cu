// The keep mask of dropout, one byte per score: mask[b][h][i][j], contiguous, written to p.kept.
// Grid: one-dimensional, each thread takes scores thread, + threads in the grid, ...
// Constant: THREADS.
#include "params.cuh"
#include "rng.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_mask(const __grid_constant__ Params p) {
    const int64 threads = static_cast<int64>(gridDim.x) * THREADS;
    int64 at = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    for (; at < p.batch * p.q_heads * p.q_len * p.kv_len; at += threads) {
        const int64 j = at % p.kv_len, i = at / p.kv_len % p.q_len;
        const int64 head = at / p.kv_len / p.q_len;
        p.kept[at] = !is_dropped(p, head / p.q_heads, head % p.q_heads, i, j);
    }
}
