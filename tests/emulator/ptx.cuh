// kernels/ptx.cuh for the emulator: the same functions in C++.
#pragma once

inline float float_of_half(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
}
inline unsigned short half_of_float(float x) {
    _Float16 half = x;
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline unsigned short bfloat_of_float(float x) {
    unsigned u = __float_as_uint(x);
    return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline float exp2_approximate(float x) { float y = exp2f(x); return y < 0x1p-126f ? 0 : y; }

inline int uniform(int x) { return x; }

inline unsigned shared_address(const void* pointer) {
    return static_cast<const unsigned char*>(pointer) - emulated_shared;
}

// Copies are made at once, or as late as they may: when somebody waits for them.
namespace emulator {
struct Copy { unsigned to; const void* from; int bytes; };
static Groups<Copy> copies[1024];   // of threads
static unsigned matrix_rows[1024];
struct Operands { unsigned a[4], b[2]; };
static Operands operands[1024];
}  // namespace emulator

inline void emulated_copy(const emulator::Copy& copy) {
    std::memset(emulated_shared + copy.to, 0, 16);
    std::memcpy(emulated_shared + copy.to, copy.from, copy.bytes);
}
inline void copy_async(unsigned to, const void* from, int bytes) {
    if (emulator::copies_first) emulated_copy({to, from, bytes});
    else emulator::copies[threadIdx.x].open.push_back({to, from, bytes});
}
inline void end_copies() { emulator::copies[threadIdx.x].end(); }
template <int PENDING>
void wait_copies() { emulator::copies[threadIdx.x].wait(PENDING, emulated_copy); }

inline void emulated_load(unsigned (&to)[4], unsigned from, bool transposed) {
    unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
    emulator::matrix_rows[threadIdx.x] = from;
    emulator::wait_warp();
    for (int matrix = 0; matrix < 4; ++matrix) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
            unsigned row = transposed ? lane % 4 * 2 + e : lane / 4;
            unsigned column = transposed ? lane / 4 : lane % 4 * 2 + e;
            unsigned at = emulator::matrix_rows[first + matrix * 8 + row] + column * 2;
            std::memcpy(&pair[e], emulated_shared + at, 2);
        }
        std::memcpy(&to[matrix], pair, 4);
    }
    emulator::wait_warp();
}
inline void load_matrices(unsigned (&to)[4], unsigned from) { emulated_load(to, from, false); }
inline void load_matrices_transposed(unsigned (&to)[4], unsigned from) {
    emulated_load(to, from, true);
}

template <typename ToFloat>
void emulated_multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                       ToFloat to_float) {
    unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
    emulator::operands[threadIdx.x] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::wait_warp();
    auto element = [&](unsigned pair, int e) {
        return to_float(static_cast<unsigned short>(pair >> 16 * e));
    };
    for (int i = 0; i < 4; ++i) {
        unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const auto& left = emulator::operands[first + row % 8 * 4 + k % 8 / 2];
            const auto& right = emulator::operands[first + column * 4 + k % 8 / 2];
            d[i] += element(left.a[row / 8 + k / 8 * 2], k % 2) * element(right.b[k / 8], k % 2);
        }
    }
    emulator::wait_warp();
}
inline void multiply_half(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulated_multiply(d, a, b0, b1, float_of_half);
}
inline void multiply_bfloat(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulated_multiply(d, a, b0, b1,
                      [](unsigned short x) { return __uint_as_float(unsigned(x) << 16); });
}
inline unsigned round_tf32(unsigned x) {
    return (x & 0x7fffffff) >= 0x7f800000 ? x : (x + 0x1000) & 0xffffe000;
}
inline void multiply_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
    emulator::operands[threadIdx.x] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::wait_warp();
    for (int i = 0; i < 4; ++i) {
        unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; ++k) {
            const auto& left = emulator::operands[first + row % 8 * 4 + k % 4];
            const auto& right = emulator::operands[first + column * 4 + k % 4];
            d[i] += __uint_as_float(left.a[row / 8 + k / 4 * 2]) * __uint_as_float(right.b[k / 4]);
        }
    }
    emulator::wait_warp();
}
inline unsigned load_shared(unsigned from) {
    unsigned value;
    std::memcpy(&value, emulated_shared + from, 4);
    return value;
}
inline unsigned mask_below(unsigned word, unsigned limits) {
    unsigned low = (word & 0x7fff) < (limits & 0xffff) ? 0xffff : 0;
    return low | ((word >> 16 & 0x7fff) < limits >> 16 ? 0xffff0000u : 0);
}
inline void halves_below(bool& low, bool& high, unsigned word, unsigned limits, unsigned negate) {
    unsigned mask = mask_below(word, limits);
    low = (mask & 1) != negate, high = mask >> 31 != negate;
}

inline unsigned pack_half(float low, float high) {
    return half_of_float(low) | unsigned(half_of_float(high)) << 16;
}
inline unsigned pack_bfloat(float low, float high) {
    return bfloat_of_float(low) | unsigned(bfloat_of_float(high)) << 16;
}

inline void store_shared(unsigned to, unsigned value) {
    std::memcpy(emulated_shared + to, &value, 4);
}
inline int share_index(int lane, int e) { return lane * 4 + e; }
inline void add_share(float* to, const float (&x)[4]) {
    for (int e = 0; e < 4; ++e) to[share_index(threadIdx.x % 32, e)] += x[e];
}
inline void sync_some(int barrier, int threads) {
    emulator::wait(emulator::named[barrier], threads);
}
inline bool any_of_some(int barrier, int threads, bool x) {
    int call = emulator::named[barrier].round / 2 % 2, (&any)[2] = emulator::any_of[barrier];
    any[call] |= x;
    sync_some(barrier, threads);
    bool result = any[call];
    any[!call] = 0;
    sync_some(barrier, threads);
    return result;
}
inline void keep_branch() {}
