// Tiles of the generic kernels: THREADS_M x THREADS_N threads hold BLOCK_M x BLOCK_N scores.
// Thread (ty, tx) owns rows ty + THREADS_M * r and columns tx + THREADS_N * c, so a row lives in
// THREADS_N lanes of one warp. Operands pass through registers into shared memory as Compute, in
// chunks.
//
// Constants: BLOCK_M, BLOCK_N, THREADS_M, THREADS_N, VECTOR (elements per global access).
#pragma once
#include "types.cuh"

constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int LANES = 16 / sizeof(Compute);   // Compute values in 16 bytes
constexpr int PAD = LANES;                    // keeps rows of shared memory in different banks
static_assert(32 % THREADS_N == 0, "a row lives in one warp");
constexpr int COLUMN_GROUP = THREADS_N * LANES;

// A quarter warp, whose 16-byte loads go out together, spans rows as well as columns: the loads of
// both operands then repeat addresses, and take half the passes through shared memory.
constexpr int WARP_ROWS = 32 / THREADS_N;
__device__ __forceinline__ int thread_row() {
    return threadIdx.x / 32 * WARP_ROWS + threadIdx.x / 2 % WARP_ROWS;
}
__device__ __forceinline__ int thread_column() {
    return threadIdx.x % 2 + threadIdx.x % 32 / (2 * WARP_ROWS) * 2;
}
// The thread's scores: rows r and columns c of a tile.
constexpr int ROWS = BLOCK_M / THREADS_M, COLUMNS = BLOCK_N / THREADS_N;
constexpr int SCORE_STRIDE = BLOCK_N + 2 * PAD;            // of tiles of scores in shared memory
__device__ __forceinline__ int score_row(int r) { return thread_row() + r * THREADS_M; }
__device__ __forceinline__ int score_column(int c) { return thread_column() + c * THREADS_N; }

// Over the threads of a row: lanes that differ in bit 0 and in those above the row's bits.
template <typename Combine>
__device__ __forceinline__ Compute over_row(Compute x, Combine combine) {
    x = combine(x, __shfl_xor_sync(~0u, x, 1));
#pragma unroll
    for (int lane = 2 * WARP_ROWS; lane < 32; lane *= 2)
        x = combine(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

__device__ constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// Offset of a channel: those of arrays that allow wide accesses lie side by side.
__device__ __forceinline__ int64 channel_offset(int channel, int64 stride) {
    return VECTOR > 1 ? channel : channel * stride;
}

// A block of ROWS x COLUMNS elements on its way from global to shared memory.
template <int ROWS, int COLUMNS>
struct Chunk {
    static constexpr int PER_ROW = COLUMNS / VECTOR;
    static constexpr int ACCESSES = ROWS * PER_ROW;
    static constexpr int PER_THREAD = (ACCESSES + THREADS - 1) / THREADS;
    static_assert(COLUMNS % VECTOR == 0, "an access must not straddle rows");
    Vector<Element, VECTOR> staged[PER_THREAD];

    // Access a of a thread: rows THREADS / PER_ROW apart in one column where that divides evenly,
    // so that addresses follow from the first by constant steps.
    static constexpr bool EVEN = THREADS % PER_ROW == 0;
    static __device__ __forceinline__ int row_of(int a) {
        return EVEN ? threadIdx.x / PER_ROW + a * (THREADS / PER_ROW)
                    : (threadIdx.x + a * THREADS) / PER_ROW;
    }
    static __device__ __forceinline__ int column_of(int a) {
        return (threadIdx.x + (EVEN ? 0 : a * THREADS)) % PER_ROW * VECTOR;
    }

    // Reads what lies within `rows` x `columns` and takes zero for the rest.
    __device__ __forceinline__ void fetch(const Element* source, int64 row_stride,
                                          int64 column_stride, int64 rows, int columns) {
        const int height = rows < ROWS ? static_cast<int>(rows) : ROWS;
        const Element* first =
            source + row_of(0) * row_stride + channel_offset(column_of(0), column_stride);
#pragma unroll
        for (int a = 0; a < PER_THREAD; ++a) {
            const int row = row_of(a), column = column_of(a);
            const Element* from =
                EVEN ? first : source + row * row_stride + channel_offset(column, column_stride);
            staged[a] = {};
            if (row < height && column < columns)
                staged[a] = *reinterpret_cast<const Vector<Element, VECTOR>*>(from);
            first += THREADS / PER_ROW * row_stride;
        }
    }

    // Writes rows of `STRIDE` values; returns whether a value is infinite or NaN.
    template <int STRIDE>
    __device__ __forceinline__ bool store(Compute* target) const {
        bool special = false;
#pragma unroll
        for (int a = 0; a < PER_THREAD; ++a) {
            if (ACCESSES % THREADS != 0 && row_of(a) >= ROWS) continue;
            Compute* to = target + row_of(a) * STRIDE + column_of(a);
            constexpr int WIDTH = VECTOR < LANES ? VECTOR : LANES;
#pragma unroll
            for (int part = 0; part < VECTOR; part += WIDTH) {
                Vector<Compute, WIDTH> values;
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    values.at[e] = to_compute(staged[a].at[part + e]);
                    special |= !(values.at[e] - values.at[e] == 0);
                }
                *reinterpret_cast<Vector<Compute, WIDTH>*>(to + part) = values;
            }
        }
        return special;
    }
};

// Two buffers of SIZE values, used in turn: one barrier between writing and reading is enough.
template <int SIZE>
struct Ring {
    Compute* data;
    int stage;
    __device__ __forceinline__ Compute* next() { return data + (stage ^= 1) * SIZE; }
};

using Lanes = Vector<Compute, LANES>;
__device__ __forceinline__ Lanes load_lanes(const Compute* from) {
    return *reinterpret_cast<const Lanes*>(from);
}

// sum[r][c] += <row r of a, row c of b> over DEPTH columns.
template <int DEPTH, int A_STRIDE, int B_STRIDE, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_transposed(Compute (&sum)[ROWS][COLUMNS],
                                                    const Compute* a, const Compute* b) {
    static_assert(DEPTH % LANES == 0, "depth is walked in steps of 16 bytes");
    a += thread_row() * A_STRIDE;
    b += thread_column() * B_STRIDE;
#pragma unroll 1
    for (int d = 0; d < DEPTH; d += LANES) {
        Lanes right[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) right[c] = load_lanes(b + c * THREADS_N * B_STRIDE + d);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Lanes left = load_lanes(a + r * THREADS_M * A_STRIDE + d);
#pragma unroll
            for (int e = 0; e < LANES; ++e)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sum[r][c] += left.at[e] * right[c].at[e];
        }
    }
}

// The sign of an exact -0 marks a pair (query, key) that must not have any influence: where the
// other operand is infinite or NaN, GUARDED leaves the pair out instead of making 0 * inf = NaN.
__device__ __forceinline__ Compute hidden_zero() { return static_cast<Compute>(-0.0); }
__device__ __forceinline__ bool is_hidden(Compute x) { return x == 0 && signbit(x); }

template <bool GUARDED>
__device__ __forceinline__ void accumulate(Compute& sum, Compute weight, Compute value) {
    if (!GUARDED || !is_hidden(weight)) sum += weight * value;
}

// sum[r][...] += a[r][k] * b[k][...] over DEPTH rows k of b; the thread's columns are groups of
// LANES, COLUMN_GROUP apart. Rows as above, or with BY_COLUMN row r of the product is column
// thread_row() * ROWS + r of a.
template <bool BY_COLUMN, bool GUARDED, int DEPTH, int A_STRIDE, int B_STRIDE, int ROWS,
          int COLUMNS>
__device__ __forceinline__ void multiply(Compute (&sum)[ROWS][COLUMNS],
                                         const Compute* a, const Compute* b) {
    static_assert(DEPTH % LANES == 0 && COLUMNS % LANES == 0, "walked in steps of 16 bytes");
    a += BY_COLUMN ? thread_row() * ROWS : thread_row() * A_STRIDE;
    b += thread_column() * LANES;
#pragma unroll 1
    for (int k = 0; k < DEPTH; k += LANES) {
        Compute left[LANES][ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if constexpr (!BY_COLUMN) {
                Lanes lanes = load_lanes(a + r * THREADS_M * A_STRIDE + k);
#pragma unroll
                for (int e = 0; e < LANES; ++e) left[e][r] = lanes.at[e];
            } else if (ROWS % LANES == 0) {
                if (r % LANES == 0) {
#pragma unroll
                    for (int e = 0; e < LANES; ++e) {
                        Lanes lanes = load_lanes(a + (k + e) * A_STRIDE + r);
#pragma unroll
                        for (int i = 0; i < LANES; ++i)
                            if (r + i < ROWS) left[e][r + i] = lanes.at[i];
                    }
                }
            } else {
#pragma unroll
                for (int e = 0; e < LANES; ++e) left[e][r] = a[(k + e) * A_STRIDE + r];
            }
        }
#pragma unroll
        for (int e = 0; e < LANES; ++e)
#pragma unroll
            for (int c = 0; c < COLUMNS; c += LANES) {
                Lanes right = load_lanes(b + (k + e) * B_STRIDE + c * THREADS_N);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int i = 0; i < LANES; ++i)
                        accumulate<GUARDED>(sum[r][c + i], left[e][r], right.at[i]);
            }
    }
}

// Column of the product that a thread's value `c` belongs to, in `multiply`.
__device__ __forceinline__ int product_column(int c) {
    return c / LANES * COLUMN_GROUP + thread_column() * LANES + c % LANES;
}
