// kernels/wgmma.cuh for the emulator.
#pragma once

namespace emulator {
struct GroupOperands { unsigned a[4]; };
static GroupOperands group_operands[1024];

inline float shared_element(float16, unsigned at) {
    unsigned short bits;
    std::memcpy(&bits, emulated_shared + (at ^ (at >> 3 & 0x70)), 2);
    return float_of_half(bits);
}
inline float shared_element(bfloat16, unsigned at) {
    unsigned short bits;
    std::memcpy(&bits, emulated_shared + (at ^ (at >> 3 & 0x70)), 2);
    return __uint_as_float(unsigned(bits) << 16);
}
inline float half_of(float16, unsigned short bits) { return float_of_half(bits); }
inline float half_of(bfloat16, unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

struct Factor {
    unsigned start, panel;
    explicit Factor(unsigned descriptor)
        : start((descriptor & 0x3fff) << 4), panel((descriptor >> 16 & 0x3fff) << 4) {}
    unsigned row(int row, int k) const { return start + row / 8 * 1024 + row % 8 * 128 + k * 2; }
    unsigned column(int column, int k) const {
        return start + column / 64 * panel + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2;
    }
};
}  // namespace emulator

// Each warp makes its rows of a product by itself, and takes all factors, those in registers too, when
// it makes them.
template <typename Type, int N>
struct Wgmma {
    static void rows(float (&d)[N / 2], unsigned a, unsigned b, int add) {
        emulator::start([=, &d] { make_rows(d, a, b, add); });
    }
    static void columns(float (&d)[N / 2], const unsigned (&a)[4], unsigned b) {
        emulator::start([=, &d, &a] { make_columns(d, a, b); });
    }
    static void make_rows(float (&d)[N / 2], unsigned a, unsigned b, int add) {
        const emulator::Factor left(a), right(b);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        float x[2][16];
        for (int r = 0; r < 2; ++r)
            for (int k = 0; k < 16; ++k)
                x[r][k] = emulator::shared_element(Type{}, left.row(warp * 16 + lane / 4 + r * 8, k));
        for (int piece = 0; piece < N / 8; ++piece)
            for (int e = 0; e < 2; ++e) {
                const int column = piece * 8 + lane % 4 * 2 + e;
                float sum[2] = {};
                for (int k = 0; k < 16; ++k) {
                    const float y = emulator::shared_element(Type{}, right.row(column, k));
                    for (int r = 0; r < 2; ++r) sum[r] += x[r][k] * y;
                }
                for (int r = 0; r < 2; ++r) {
                    float& to = d[piece * 4 + r * 2 + e];
                    to = sum[r] + (add ? to : 0);
                }
            }
        emulator::wait_warp();
    }
    static void make_columns(float (&d)[N / 2], const unsigned (&a)[4], unsigned b) {
        const emulator::Factor right(b);
        const int lane = threadIdx.x % 32, first = threadIdx.x - lane;
        emulator::group_operands[threadIdx.x] = {{a[0], a[1], a[2], a[3]}};
        emulator::wait_warp();
        float x[2][16];
        for (int r = 0; r < 2; ++r)
            for (int k = 0; k < 16; ++k) {
                const unsigned pair = emulator::group_operands[first + lane / 4 * 4 + k % 8 / 2].a[r + k / 8 * 2];
                x[r][k] = emulator::half_of(Type{}, static_cast<unsigned short>(pair >> k % 2 * 16));
            }
        for (int piece = 0; piece < N / 8; ++piece)
            for (int e = 0; e < 2; ++e) {
                const int column = piece * 8 + lane % 4 * 2 + e;
                for (int k = 0; k < 16; ++k) {
                    const float y = emulator::shared_element(Type{}, right.column(column, k));
                    for (int r = 0; r < 2; ++r) d[piece * 4 + r * 2 + e] += x[r][k] * y;
                }
            }
        emulator::wait_warp();
    }
};
