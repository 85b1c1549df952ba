// Tiles on the tensor cores by mma.sync (sm_80 and newer), for float16, bfloat16 and, with factors
// rounded to TF32, float32. A product is made of pieces of 16 x 8 sums, of which lane l holds rows
// l / 4 and l / 4 + 8, columns 2 (l % 4) and the next: a row lives in four lanes. Shared memory holds
// rows in panels of 128 bytes, each 16-byte chunk at its place xor (row % 8), so that ldmatrix reads
// eight rows from all banks.
//
// A step of a product takes DEPTH elements, 32 bytes, of each row of the left factor. The eight of a
// TF32 step are taken in their order by products over columns of both factors; by products over
// rows of the right factor, as they lie in the fragments of sums: slot l % 4 is element 2 (l % 4),
// slot l % 4 + 4 the next.
//
// Constants: BLOCK_M, BLOCK_N, WARPS, WARPS_M (warps that split the queries of a tile of scores; the
// others split its keys).
#pragma once
#include "params.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int M_TILES = BLOCK_M / (16 * WARPS_M), WARPS_N = WARPS / WARPS_M;   // of 16 rows, a warp
constexpr int WARP_COLUMNS = BLOCK_N / WARPS_N;
constexpr int ROWS = 2 * M_TILES, COLUMNS = WARP_COLUMNS / 4;   // scores of one thread
static_assert(BLOCK_M % (16 * WARPS_M) == 0 && BLOCK_N % (16 * WARPS_N) == 0 &&
                  WARPS % WARPS_M == 0, "warps share the tile evenly");
constexpr int DEPTH = 32 / sizeof(Element);
constexpr bool IS_TF32 = sizeof(Element) == 4;

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }
__device__ __forceinline__ int warp_row() { return warp_index() % WARPS_M * 16 * M_TILES; }
__device__ __forceinline__ int warp_column() { return warp_index() / WARPS_M * WARP_COLUMNS; }
__device__ __forceinline__ int score_row(int r) {
    return warp_row() + r / 2 * 16 + r % 2 * 8 + lane_index() / 4;
}
__device__ __forceinline__ int score_column(int c) {
    return warp_column() + c / 2 * 8 + lane_index() % 4 * 2 + c % 2;
}
// Sums of a warp's product of TILES x 16 rows, PIECES x 8 columns; and the thread's sum in row
// r (of two in each tile) and column c (of two in each piece).
template <int TILES, int PIECES>
using Sums = float[TILES][PIECES][4];
using ScoreSums = Sums<M_TILES, WARP_COLUMNS / 8>;
template <int TILES, int PIECES>
__device__ __forceinline__ float& at(Sums<TILES, PIECES>& sums, int r, int c) {
    return sums[r / 2][c / 2][r % 2 * 2 + c % 2];
}
template <typename Combine>
__device__ __forceinline__ float over_row(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(~0u, x, 1));
    return combine(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ void multiply_pieces(float16, float (&d)[4], const uint32 (&a)[4],
                                                uint32 b0, uint32 b1) {
    multiply_half(d, a, b0, b1);
}
__device__ __forceinline__ void multiply_pieces(bfloat16, float (&d)[4], const uint32 (&a)[4],
                                                uint32 b0, uint32 b1) {
    multiply_bfloat(d, a, b0, b1);
}
__device__ __forceinline__ void multiply_pieces(float32, float (&d)[4], const uint32 (&a)[4],
                                                uint32 b0, uint32 b1) {
    multiply_tf32(d, a, b0, b1);
}
__device__ __forceinline__ void round_factors(uint32 (&x)[4]) {
    if constexpr (IS_TF32)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = round_tf32(x[i]);
}

// Two floats as elements side by side.
__device__ __forceinline__ uint32 pack(float16, float low, float high) {
    return pack_half(low, high);
}
__device__ __forceinline__ uint32 pack(bfloat16, float low, float high) {
    return pack_bfloat(low, high);
}
template <typename Half>
__device__ __forceinline__ void store_pair(Half* to, float low, float high) {
    *reinterpret_cast<uint32*>(to) = pack(Half{}, low, high);
}
__device__ __forceinline__ void store_pair(float* to, float low, float high) {
    *reinterpret_cast<Vector<float, 2>*>(to) = {low, high};
}
template <typename Half>
__device__ __forceinline__ void store_shared_pair(Half, uint32 to, float low, float high) {
    store_shared(to, pack(Half{}, low, high));
}
__device__ __forceinline__ void store_shared_pair(float32, uint32 to, float low, float high) {
    store_shared(to, __float_as_uint(low));
    store_shared(to + 4, __float_as_uint(high));
}

// Whether the thread's row r holds an infinity or NaN.
template <int TILES, int PIECES>
__device__ __forceinline__ bool row_is_special(const Sums<TILES, PIECES>& sums, int r) {
    float zero = 0;
#pragma unroll
    for (int c = 0; c < PIECES * 2; ++c) zero += 0 * sums[r / 2][c / 2][r % 2 * 2 + c % 2];
    return zero != 0;
}

// HEIGHT rows of WIDTH values in shared memory, in panels of 128 bytes.
template <int HEIGHT, int WIDTH, typename Type = Element>
struct Panels {
    static constexpr int CHUNK = 16 / sizeof(Type), COLUMNS = 8 * CHUNK;   // of a chunk, of a panel
    static constexpr int PANEL = HEIGHT * 128, BYTES = (WIDTH + COLUMNS - 1) / COLUMNS * PANEL;
    uint32 base;

    __device__ __forceinline__ uint32 at(int row, int chunk) const {
        return base + chunk / 8 * PANEL + row * 128 + ((chunk ^ row) & 7) * 16;
    }
    // Address of a lane's row for ldmatrix: `row` and one of two chunks, at step 0. The chunks of
    // step s lie at `step_of(first, s)`: two chunks on, and so on through the panels.
    __device__ __forceinline__ uint32 lane_at(int row, int chunk) const {
        return base + row * 128 + ((chunk ^ row) & 7) * 16;
    }
    static __device__ __forceinline__ uint32 step_of(uint32 first, int step) {
        return (first ^ step % 4 * 32) + step / 4 * PANEL;
    }
    // Starts copying `rows` rows of `columns` values, a multiple of CHUNK unless rows are aligned
    // beyond their ends; what is missing becomes 0. COUNT threads take part.
    template <int COUNT = THREADS>
    __device__ __forceinline__ void fetch(const Type* source, int64 row_stride, int64 rows, int columns,
                                          int thread = threadIdx.x) const {
        static_assert(COUNT % 64 == 0, "rows of a thread have the same place in their group of 8");
        constexpr int STEP = COUNT / 8;
        const int height = rows < HEIGHT ? static_cast<int>(rows) : HEIGHT;
        const int row = thread / 8, chunk = thread % 8;
        const uint32 to = at(row, chunk);
        const Type* from = source + row * row_stride + chunk * CHUNK;
#pragma unroll
        for (int y = 0; y < HEIGHT; y += STEP) {
            if (HEIGHT % STEP != 0 && row + y >= HEIGHT) break;
#pragma unroll
            for (int x = 0; x < WIDTH; x += COLUMNS) {
                const int left = row + y < height ? columns - x - chunk * CHUNK : 0;
                const int bytes = left >= CHUNK ? 16 : left > 0 ? left * sizeof(Type) : 0;
                copy_async(to + x / COLUMNS * PANEL + y * 128, bytes ? from + x : source, bytes);
            }
            from += STEP * row_stride;
        }
    }
};

// Rows [row + 16 tile, + 16) x columns [DEPTH step, + DEPTH) as the left factor, columns in order.
template <typename Tile>
__device__ __forceinline__ void load_left(uint32 (&to)[4], const Tile& from, int row, int tile,
                                          int step) {
    const uint32 first = from.lane_at(row + lane_index() % 16, lane_index() / 16);
    load_matrices(to, Tile::step_of(first, step) + tile * 16 * 128);
    round_factors(to);
}
// The same for products over rows of the right factor.
template <typename Tile>
__device__ __forceinline__ void load_left_for_rows(uint32 (&to)[4], const Tile& from, int row,
                                                   int tile, int step) {
    if constexpr (!IS_TF32) {
        load_left(to, from, row, tile, step);
    } else {
        const int lane = lane_index();
        const uint32 first = from.lane_at(row + lane / 4, lane % 4 / 2) + lane % 2 * 8;
        const uint32 at = Tile::step_of(first, step) + tile * 16 * 128;
        to[0] = load_shared(at);
        to[1] = load_shared(at + 8 * 128);
        to[2] = load_shared(at + 4);
        to[3] = load_shared(at + 8 * 128 + 4);
        round_factors(to);
    }
}
// Columns [column, + 16) x rows [DEPTH step, + DEPTH) of a tile, transposed, for such products.
template <typename Tile>
__device__ __forceinline__ void load_left_transposed(uint32 (&to)[4], const Tile& tile, int column,
                                                     int step) {
    const int lane = lane_index();
    if constexpr (!IS_TF32) {
        const uint32 first = tile.at(lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2);
        load_matrices_transposed(to, first + step * 16 * 128);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane % 4 * 2 + i / 2, chunk = column / 4 + i % 2 * 2 + lane / 16;
            to[i] = load_shared(tile.at(row, chunk) + lane / 4 % 4 * 4 + step * 8 * 128);
        }
        round_factors(to);
    }
}
// Sums of a step's columns as the left factor of such products.
template <typename Type = Element, int TILES, int PIECES>
__device__ __forceinline__ void sums_as_left(uint32 (&to)[4], const Sums<TILES, PIECES>& sums, int tile,
                                             int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if constexpr (IS_TF32) {   // rows r, r + 8; then the next column
            to[i] = __float_as_uint(sums[tile][step][i % 2 * 2 + i / 2]);
        } else {                   // rows r, r + 8; then 8 columns on
            const float* pair = &sums[tile][step * 2 + i / 2][i % 2 * 2];
            to[i] = pack(Type{}, pair[0], pair[1]);
        }
    round_factors(to);
}

// sum += left tile^T: columns of sum are rows of `tile`, from `row` on. Over WIDTH columns of both.
template <int WIDTH, int TILES, int PIECES, typename Tile, typename Left>
__device__ __forceinline__ void multiply_rows(Sums<TILES, PIECES>& sum, Left left,
                                              const Tile& tile, int row) {
    const int lane = lane_index();
    const uint32 first = tile.lane_at(row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < WIDTH / DEPTH; ++step) {
        uint32 a[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) left(a[t], t, step);
        const uint32 from = tile.step_of(first, step);
#pragma unroll
        for (int n = 0; n < PIECES / 2; ++n) {
            uint32 b[4];
            load_matrices(b, from + n * 16 * 128);
            round_factors(b);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                multiply_pieces(Element{}, sum[t][2 * n], a[t], b[0], b[1]);
                multiply_pieces(Element{}, sum[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// sum += left tile, over HEIGHT rows of `tile` and its columns from 16 * pair on.
template <int HEIGHT, int TILES, int PIECES, typename Tile, typename Left>
__device__ __forceinline__ void multiply_columns(Sums<TILES, PIECES>& sum, Left left,
                                                 const Tile& tile, int pair) {
    const int lane = lane_index();
    const uint32 first = tile.lane_at(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < HEIGHT / DEPTH; ++step) {
        uint32 a[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) left(a[t], t, step);
#pragma unroll
        for (int n = 0; n < PIECES / 2; ++n) {
            uint32 b[4];
            if constexpr (!IS_TF32) {
                load_matrices_transposed(b, tile.step_of(first, pair + n) + step * 16 * 128);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {   // rows 2 (l % 4), and the next; then 8 columns on
                    const int row = lane % 4 * 2 + i % 2;
                    const int chunk = (pair + n) * 4 + i / 2 * 2 + lane / 16;
                    b[i] = load_shared(tile.at(row, chunk) + lane / 4 % 4 * 4 + step * 8 * 128);
                }
                round_factors(b);
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                multiply_pieces(Element{}, sum[t][2 * n], a[t], b[0], b[1]);
                multiply_pieces(Element{}, sum[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// A warp's sums times `factor(r)` to shared memory as elements: rows from `row` on, columns from
// 16 * pair on.
template <typename Tile, int TILES, int PIECES, typename Factor>
__device__ __forceinline__ void store_sums(const Tile& tile, int row, int pair,
                                           Sums<TILES, PIECES>& sums, Factor factor) {
#pragma unroll
    for (int r = 0; r < 2 * TILES; ++r)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int column = pair * 16 + piece * 8 + lane_index() % 4 * 2;
            const uint32 to = tile.at(row + r / 2 * 16 + r % 2 * 8 + lane_index() / 4,
                                      column / Tile::CHUNK) +
                              column % Tile::CHUNK * sizeof(Element);
            store_shared_pair(Element{}, to, at(sums, r, piece * 2) * factor(r),
                              at(sums, r, piece * 2 + 1) * factor(r));
        }
}

// The same to rows of LENGTH floats in global memory.
template <int LENGTH, int TILES, int PIECES, typename Factor>
__device__ __forceinline__ void store_floats(float* to, int row, int pair, Sums<TILES, PIECES>& sums,
                                             Factor factor) {
#pragma unroll
    for (int r = 0; r < 2 * TILES; ++r)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int column = pair * 16 + piece * 8 + lane_index() % 4 * 2;
            const int at_row = row + r / 2 * 16 + r % 2 * 8 + lane_index() / 4;
            if (column < LENGTH)
                store_pair(to + at_row * LENGTH + column, at(sums, r, piece * 2) * factor(r),
                           at(sums, r, piece * 2 + 1) * factor(r));
        }
}

// Rows [first, last) of a tile in shared memory, which begins at `memory`, to global memory, by so
// many threads; LENGTH elements of each.
template <int LENGTH, typename Tile>
__device__ __forceinline__ void copy_rows(const Tile& tile, const unsigned char* memory,
                                          Element* target, int64 row_stride, int first, int last,
                                          int thread, int threads) {
    constexpr int CHUNKS = LENGTH / Tile::CHUNK;
#pragma unroll 4
    for (int at = thread; at < (last - first) * CHUNKS; at += threads) {
        const int row = first + at / CHUNKS, chunk = at % CHUNKS;
        using Chunk = Vector<uint32, 4>;
        *reinterpret_cast<Chunk*>(target + row * row_stride + chunk * Tile::CHUNK) =
            *reinterpret_cast<const Chunk*>(memory + (tile.at(row, chunk) - tile.base));
    }
}
