// Tiles of the generic kernels: THREADS_M x THREADS_N threads hold BLOCK_M x BLOCK_N scores.
// Thread (ty, tx) owns rows ty + THREADS_M * r and columns tx + THREADS_N * c, so a row lives in
// THREADS_N lanes of one warp. Operands pass through registers into shared memory as Compute, in
// chunks.
//
// Constants: THREADS_M, THREADS_N, VECTOR (elements per global access).
#pragma once
#include "types.cuh"

constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int LANES = 16 / sizeof(Compute);   // Compute values in 16 bytes
constexpr int PAD = LANES;                    // keeps rows of shared memory in different banks
static_assert(32 % THREADS_N == 0, "a row lives in one warp");
constexpr int COLUMN_GROUP = THREADS_N * LANES;

__device__ __forceinline__ int thread_row() { return threadIdx.x / THREADS_N; }
__device__ __forceinline__ int thread_column() { return threadIdx.x % THREADS_N; }

__device__ constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// A block of ROWS x COLUMNS elements on its way from global to shared memory.
template <int ROWS, int COLUMNS>
struct Chunk {
    static constexpr int PER_ROW = COLUMNS / VECTOR;
    static constexpr int ACCESSES = ROWS * PER_ROW;
    static constexpr int PER_THREAD = (ACCESSES + THREADS - 1) / THREADS;
    static_assert(COLUMNS % VECTOR == 0, "an access must not straddle rows");
    Vector<Element, VECTOR> staged[PER_THREAD];

    // Reads what lies within `rows` x `columns` and takes zero for the rest.
    __device__ __forceinline__ void fetch(const Element* source, int64 row_stride,
                                          int64 column_stride, int64 rows, int columns) {
#pragma unroll
        for (int a = 0; a < PER_THREAD; ++a) {
            int access = threadIdx.x + a * THREADS;
            int row = access / PER_ROW, column = access % PER_ROW * VECTOR;
            staged[a] = {};
            if (access < ACCESSES && row < rows && column < columns) {
                const Element* from = source + row * row_stride + column * column_stride;
                staged[a] = *reinterpret_cast<const Vector<Element, VECTOR>*>(from);
            }
        }
    }

    // Writes rows of `STRIDE` values; returns whether a value is infinite or NaN.
    template <int STRIDE>
    __device__ __forceinline__ bool store(Compute* target) const {
        bool special = false;
#pragma unroll
        for (int a = 0; a < PER_THREAD; ++a) {
            int access = threadIdx.x + a * THREADS;
            int row = access / PER_ROW, column = access % PER_ROW * VECTOR;
            if (ACCESSES % THREADS != 0 && access >= ACCESSES) continue;
            constexpr int WIDTH = VECTOR < LANES ? VECTOR : LANES;
#pragma unroll
            for (int part = 0; part < VECTOR; part += WIDTH) {
                Vector<Compute, WIDTH> values;
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    values.at[e] = to_float(staged[a].at[part + e]);
                    special |= !(values.at[e] - values.at[e] == 0);
                }
                *reinterpret_cast<Vector<Compute, WIDTH>*>(
                    target + row * STRIDE + column + part) = values;
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
