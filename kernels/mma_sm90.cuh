// Matrix products of a warp group (wgmma, sm_90a): 64 rows, 16 elements deep, N columns. The sums are in
// the order of mma.sync's: warp w of the group has rows 16 w to 16 w + 15, and of each 8 columns every
// thread the same four numbers as in mma.cuh. So have left factors in registers.
//
// Factors in shared memory lie in panels of 128 bytes (mma.cuh), which begin at multiples of 1024
// bytes. Rows of the left factor, and of the right one in products over rows, are rows of panels; in
// products over columns the depth runs along the rows of the right factor.
#pragma once
#include "mma.cuh"
#include "ptx_sm90.cuh"
#include "wgmma.cuh"

// The argument of kernels that copy tensors with TMA.
struct MappedParams {
    TensorMap q, k, v, out;
    uint32* taken;   // how many tiles have been taken after the first ones; 0 before the launch and after it
    Params params;
};

// Where a factor lies, the lower half of a descriptor: its first panel and, in products over columns,
// how far the next one is.
__device__ __forceinline__ uint32 descriptor(uint32 address, int panel = 16) {
    return (address & 0x3ffff) >> 4 | static_cast<uint32>(panel >> 4) << 16;
}

template <int PIECES>
__device__ __forceinline__ void pin(Sums<1, PIECES>& sums) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int i = 0; i < 4; ++i) pin(sums[0][piece][i]);
}

// Starts sums = left right^T over WIDTH columns: 64 rows of a tile of HEIGHT rows from `left` on, and
// all BLOCK_N rows of a tile.
template <int WIDTH, int HEIGHT, int PIECES>
__device__ __forceinline__ void start_rows(Sums<1, PIECES>& sums, uint32 left, uint32 right) {
    constexpr int N = PIECES * 8;
    auto& d = reinterpret_cast<float(&)[N / 2]>(sums);
    const uint32 a = descriptor(left), b = descriptor(right);
    pin(sums);
    begin_products();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const int panel = step / 4, within = step % 4 * 32;   // bytes
        Wgmma<Element, N>::rows(d, a + (panel * HEIGHT * 128 + within) / 16,
                                b + (panel * N * 128 + within) / 16, step != 0);
    }
    end_products();
    pin(sums);
}

// Starts sums += left right over HEIGHT rows of `right`: `left` gives each step's factor.
template <int HEIGHT, int PIECES>
__device__ __forceinline__ void start_columns(Sums<1, PIECES>& sums, const uint32 (&left)[HEIGHT / 16][4],
                                              uint32 right) {
    constexpr int N = PIECES * 8;
    auto& d = reinterpret_cast<float(&)[N / 2]>(sums);
    const uint32 b = descriptor(right, HEIGHT * 128);
    pin(sums);
    begin_products();
#pragma unroll
    for (int step = 0; step < HEIGHT / 16; ++step)
        Wgmma<Element, N>::columns(d, left[step], b + step * 16 * 128 / 16);
    end_products();
    pin(sums);
}
