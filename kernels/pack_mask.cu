// A boolean mask as bits, which the kernels on tensor cores read: p.mask_words[b][h][i][word], bit j of a
// word for key 32 word + j; as many b, h and i as the mask has of its own (MaskWords).
// Grid: one-dimensional, each thread takes words thread, + threads in the grid, ...
// Constant: THREADS.
#include "params.cuh"

// One bit for each of four bytes: whether it is not 0.
__device__ __forceinline__ uint32 bits_of(uint32 bytes) {
    const uint32 ones = ((((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u) >> 7;
    return ones * 0x01020408u >> 24 & 15;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pack_mask(const __grid_constant__ Params p) {
    const ScoreStrides& stride = p.mask_strides;
    const MaskWords words(p);
    const int64 threads = static_cast<int64>(gridDim.x) * THREADS;
    int64 at = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    for (; at < words.batch * words.heads * words.rows * words.width; at += threads) {
        const int64 first = at % words.width * 32, row = at / words.width;
        const int64 i = row % words.rows, head = row / words.rows;
        const int64 b = head / words.heads, h = head % words.heads;
        const unsigned char* source =
            p.mask + b * stride.batch + h * stride.head + i * stride.query + first * stride.key;
        uint32 bits = 0;
        if (stride.key == 1 && reinterpret_cast<uint64>(source) % 16 == 0 && first + 32 <= p.kv_len) {
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                const auto bytes = reinterpret_cast<const Vector<uint32, 4>*>(source)[chunk];
#pragma unroll
                for (int word = 0; word < 4; ++word)
                    bits |= bits_of(bytes.at[word]) << (chunk * 16 + word * 4);
            }
        } else {
            for (int key = 0; key < 32 && first + key < p.kv_len; ++key)
                bits |= static_cast<uint32>(source[key * stride.key] != 0) << key;
        }
        p.mask_words[at] = bits;
    }
}
