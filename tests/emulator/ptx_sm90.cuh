// kernels/ptx_sm90.cuh for the emulator. Boxes arrive as late as they may: when somebody waits for
// their barrier.
#pragma once
#include <map>

// What tests/emulated.py puts into the place of a real one.
struct alignas(64) TensorMap {
    const unsigned char* data;
    long long lengths[4], strides[3];   // (channel, row, head, batch); bytes of row, head, batch
    int rows, size;                     // of a box, whose rows have 64 channels; of an element
};
static_assert(sizeof(TensorMap) == 128, "as large as a real one");

namespace emulator {
struct Box { unsigned to; TensorMap map; int at[4]; };
struct Phases { int threads, missing, bytes; unsigned phase; std::vector<Box> boxes; };
static std::map<unsigned, Phases> phases;

inline void end_phase(Phases& of) {
    if (of.missing != 0 || of.bytes != 0) return;
    of.missing = of.threads;
    of.phase ^= 1;
    ++progress;
}
inline void bring(Phases& of) {
    for (const Box& box : of.boxes) {
        const TensorMap& map = box.map;
        for (int row = 0; row < map.rows; ++row)
            for (int channel = 0; channel < 64; ++channel) {
                const long long at[4] = {box.at[0] + channel, box.at[1] + row, box.at[2], box.at[3]};
                bool inside = true;
                for (int axis = 0; axis < 4; ++axis) inside &= at[axis] >= 0 && at[axis] < map.lengths[axis];
                unsigned to = box.to + row * 128 + channel * map.size;
                to ^= to >> 3 & 0x70;
                std::memset(emulated_shared + to, 0, map.size);
                if (!inside) continue;
                const unsigned char* from = map.data + at[0] * map.size;
                for (int axis = 1; axis < 4; ++axis) from += at[axis] * map.strides[axis - 1];
                std::memcpy(emulated_shared + to, from, map.size);
            }
        of.bytes -= map.rows * 128;
    }
    of.boxes.clear();
    end_phase(of);
}
}  // namespace emulator

inline void init_barrier(unsigned barrier, int threads) {
    emulator::phases[barrier] = {threads, threads, 0, 0, {}};
}
inline void end_init_barriers() {}
inline void arrive(unsigned barrier) {
    auto& of = emulator::phases.at(barrier);
    --of.missing;
    emulator::end_phase(of);
}
inline void arrive_with_bytes(unsigned barrier, int bytes) {
    emulator::phases.at(barrier).bytes += bytes;
    arrive(barrier);
}
inline void wait_phase(unsigned barrier, unsigned phase) {
    auto& of = emulator::phases.at(barrier);
    while (of.phase == phase) {   // the phase of this parity has not ended
        if (!of.boxes.empty()) emulator::bring(of);
        else emulator::pause();
    }
}
inline void copy_box(unsigned to, const TensorMap& map, unsigned barrier, int channel, int row, int head,
                     int batch) {
    emulator::phases.at(barrier).boxes.push_back({to, map, {channel, row, head, batch}});
}
inline void end_own_writes() {}
template <int COUNT> void shrink_registers() {}
template <int COUNT> void grow_registers() {}
inline void arrive_some(int barrier, int threads) { emulator::arrive(emulator::named[barrier], threads); }
inline void begin_products() {}
inline void end_products() {}
template <int PENDING> void wait_products() {}
inline void pin(float&) {}
