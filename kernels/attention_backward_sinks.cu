// The gradient of the sinks: dsinks[h] = -sum over batch and queries of exp(sink - lse) * D,
// in a fixed order. One block takes a head at a time. Constant: THREADS.
#include "params.cuh"

__device__ __forceinline__ float exact_exp(float x) { return expf(x); }
__device__ __forceinline__ double exact_exp(double x) { return exp(x); }

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_sinks(const __grid_constant__ Params p) {
    __shared__ Compute shared[THREADS];
    for (int64 h = blockIdx.x; h < p.q_heads; h += gridDim.x) {
        const Compute sink = p.sinks[h];
        Compute sum = 0;
        for (int64 at = threadIdx.x; at < p.batch * p.q_len; at += THREADS) {
            const int64 row = (at / p.q_len * p.q_heads + h) * p.q_len + at % p.q_len;
            const Compute lse = p.lse[row];
            if (lse != -infinity<Compute>()) sum -= exact_exp(sink - lse) * p.delta[row];
        }
        shared[threadIdx.x] = sum;
        for (int half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        }
        if (threadIdx.x == 0) p.dsinks[h] = shared[0];
        __syncthreads();
    }
}
