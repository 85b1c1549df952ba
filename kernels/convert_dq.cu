// dq from its sums in Compute to the element type; both are contiguous.
// Grid: one-dimensional, each thread takes values thread, + threads in the grid, ...
// Constants: THREADS, HEAD_DIM.
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
convert_dq(const __grid_constant__ Params p) {
    Element* dq = static_cast<Element*>(p.dq);
    const int64 threads = static_cast<int64>(gridDim.x) * THREADS;
    int64 at = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    for (; at < p.batch * p.q_len * p.q_heads * HEAD_DIM; at += threads)
        dq[at] = convert<Element>(p.sums[at]);
}
