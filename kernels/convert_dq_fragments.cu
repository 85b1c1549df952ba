// dq from the sums that attention_backward.cu adds up: scaled, in the element type. Rows that are
// not finite are made again (pairs.cuh).
// Grid: one-dimensional, each warp takes 16 rows of a head: warp, + warps in the grid, ...
// Constants beside those of pairs.cuh: THREADS.
#include "pairs.cuh"

constexpr int PIECES = HEAD_DIM / 8;

struct Chunk { uint32 words[4]; };

// Transposes 4 x 4 pairs: four lanes that follow each other, four pairs of each.
__device__ __forceinline__ void transpose(Vector<Element, 2> (&x)[4]) {
    constexpr int WORDS = sizeof(Element) / 2;
    auto* words = reinterpret_cast<uint32(*)[WORDS]>(x);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                if (n & step) continue;
                uint32 &low = words[n][w], &high = words[n + step][w];
                const uint32 received = __shfl_xor_sync(~0u, upper ? low : high, step);
                (upper ? low : high) = received;
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
convert_dq_fragments(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % 32;
    const int64 warps = static_cast<int64>(gridDim.x) * (THREADS / 32);
    const int64 row_blocks = (p.q_len + 15) / 16;
    int64 block = static_cast<int64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    for (; block < p.batch * p.q_heads * row_blocks; block += warps) {
        const int64 head = block / row_blocks, i = block % row_blocks * 16 + lane / 4;
        const int64 b = head / p.q_heads, h = head % p.q_heads;
        Element* dq = p.dq + b * p.dq_strides.batch + h * p.dq_strides.head + i * p.dq_strides.row;
        const float* sums = p.sums + block * (HEAD_DIM / 8) * 128;
        bool special[2] = {};
#pragma unroll 2
        for (int first = 0; first < PIECES; first += 4) {
            Vector<Element, 2> pairs[2][4] = {};   // of rows i and i + 8, in four pieces of 8 columns
#pragma unroll
            for (int piece = 0; piece < 4; ++piece)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (PIECES % 4 == 0 || first + piece < PIECES)
                        for (int e = 0; e < 2; ++e) {
                            const float sum = sums[(first + piece) * 128 +
                                                   share_index(lane, half * 2 + e)];
                            special[half] |= !(sum - sum == 0);
                            pairs[half][piece].at[e] = convert<Element>(sum * p.scale);
                        }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                transpose(pairs[half]);   // now all columns of the lane's own piece
                if (i + half * 8 < p.q_len && (PIECES % 4 == 0 || first + lane % 4 < PIECES)) {
                    Element* to = dq + half * 8 * p.dq_strides.row + (first + lane % 4) * 8;
                    for (int e = 0; e < sizeof(Element) / 2; ++e)
                        reinterpret_cast<Chunk*>(to)[e] =
                            reinterpret_cast<const Chunk*>(pairs[half])[e];
                }
            }
        }
        if constexpr (CAN_HIDE)
            for (int half = 0; half < 2; ++half) {
                const int64 row = i + half * 8;
                uint32 lanes = rows_that(special[half] && row < p.q_len);
                for (; lanes != 0; lanes &= lanes - 1)
                    make_dq(p, b, h, __shfl_sync(~0u, row, __ffs(lanes) - 1));
            }
    }
}
