// kernels/ptx_sm90.cuh for the emulator. Boxes come and leave, and products are made, at once or as late
// as they may: when somebody waits for them (cuda.h, copies_first).
#pragma once
#include <functional>
#include <map>

// What tests/emulated.py puts into the place of a real one.
struct alignas(64) TensorMap {
    unsigned char* data;
    long long lengths[4], strides[3];   // (channel, row, head, batch); bytes of row, head, batch
    int rows, size;                     // of a box, whose rows have 64 channels; of an element
};
static_assert(sizeof(TensorMap) == 128, "as large as a real one");

namespace emulator {
struct Box { unsigned shared; TensorMap map; int at[4]; };
struct Phases { int threads, missing, bytes; unsigned phase; std::vector<Box> boxes; };
static std::map<unsigned, Phases> phases;
static std::map<unsigned, std::vector<Box>> stores;   // of threads, that are under way

inline void end_phase(Phases& of) {
    if (of.missing != 0 || of.bytes != 0) return;
    of.missing = of.threads;
    of.phase ^= 1;
    ++progress;
}
// Calls `use(in_shared, in_tensor)` for each element of a box; those beyond the tensor's ends are null.
template <typename Use>
void for_elements(const Box& box, Use use) {
    const TensorMap& map = box.map;
    for (int row = 0; row < map.rows; ++row)
        for (int channel = 0; channel < 64; ++channel) {
            const long long at[4] = {box.at[0] + channel, box.at[1] + row, box.at[2], box.at[3]};
            bool inside = true;
            for (int axis = 0; axis < 4; ++axis) inside &= at[axis] >= 0 && at[axis] < map.lengths[axis];
            unsigned shared = box.shared + row * 128 + channel * map.size;
            shared ^= shared >> 3 & 0x70;
            unsigned char* there = map.data + at[0] * map.size;
            for (int axis = 1; axis < 4; ++axis) there += at[axis] * map.strides[axis - 1];
            use(emulated_shared + shared, inside ? there : nullptr);
        }
}
inline void bring(Phases& of) {
    for (const Box& box : of.boxes) {
        for_elements(box, [&](unsigned char* to, const unsigned char* from) {
            if (from) std::memcpy(to, from, box.map.size);
            else std::memset(to, 0, box.map.size);
        });
        of.bytes -= box.map.rows * 128;
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
inline void arrive_after_copies(unsigned barrier) {
    end_copies();
    wait_copies<0>();
    arrive(barrier);
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
    auto& of = emulator::phases.at(barrier);
    of.boxes.push_back({to, map, {channel, row, head, batch}});
    if (emulator::copies_first) emulator::bring(of);
}
inline void wait_stores_read() {
    for (const emulator::Box& box : emulator::stores[threadIdx.x])
        emulator::for_elements(box, [&](const unsigned char* from, unsigned char* to) {
            if (to) std::memcpy(to, from, box.map.size);
        });
    emulator::stores[threadIdx.x].clear();
}
inline void store_box(const TensorMap& map, unsigned from, int channel, int row, int head, int batch) {
    emulator::stores[threadIdx.x].push_back({from, map, {channel, row, head, batch}});
    if (emulator::copies_first) wait_stores_read();
}
inline void end_stores() {}
inline void wait_stores() { wait_stores_read(); }
inline void store_matrices(unsigned to, const unsigned (&from)[4]) {
    const int lane = threadIdx.x % 32;
    unsigned rows[4];   // where this lane's row of each matrix lies
    for (int matrix = 0; matrix < 4; ++matrix) rows[matrix] = __shfl_sync(~0u, to, matrix * 8 + lane / 4);
    for (int matrix = 0; matrix < 4; ++matrix)
        std::memcpy(emulated_shared + rows[matrix] + lane % 4 * 4, &from[matrix], 4);
}
inline void prefetch(const TensorMap&) {}
inline void end_own_writes() {}
template <int COUNT> void shrink_registers() {}
template <int COUNT> void grow_registers() {}
inline void arrive_some(int barrier, int threads) { emulator::arrive(emulator::named[barrier], threads); }

namespace emulator {
using Product = std::function<void()>;
static Groups<Product> products[1024];   // of threads
inline void start(const Product& product) {
    if (copies_first) products[threadIdx.x].open.push_back(product);
    else product();
}
}  // namespace emulator

inline void begin_products() {}
inline void end_products() { emulator::products[threadIdx.x].end(); }
template <int PENDING>
void wait_products() {
    emulator::products[threadIdx.x].wait(PENDING, [](const emulator::Product& product) { product(); });
}
inline void pin(float&) {}
