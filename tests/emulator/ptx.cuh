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
