// What happens to one score: visibility, softcap, bias, ALiBi, dropout (contract: section 1).
//
// Constants: BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT (ends of the band: causal and window),
// HAS_MASK, HAS_BLOCKS (a block mask), HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, HAS_DROPOUT.
#pragma once
#include "params.cuh"
#include "rng.cuh"

// Whether a pair within the sequences can be hidden (an infinite bias hides too).
constexpr bool CAN_HIDE = HAS_LEFT || HAS_RIGHT || HAS_MASK || HAS_BLOCKS || HAS_BIAS;

__device__ __forceinline__ int64 min64(int64 a, int64 b) { return a < b ? a : b; }
__device__ __forceinline__ int64 max64(int64 a, int64 b) { return a > b ? a : b; }

struct Range { int64 begin, end; };

// Keys that any of the queries [m, m + HEIGHT) sees by its band; begin is a multiple of BLOCK_N.
template <int HEIGHT = BLOCK_M>
__device__ __forceinline__ Range visible_keys(const Params& p, int64 m) {
    int64 last = min64(m + HEIGHT, p.q_len) - 1;
    int64 begin = HAS_LEFT ? max64(0, m + p.offset - p.left) : 0;
    int64 end = HAS_RIGHT ? min64(p.kv_len, last + p.offset + p.right + 1) : p.kv_len;
    return {begin / BLOCK_N * BLOCK_N, end};
}

// Queries that see any of the keys [n, n + BLOCK_N) by their bands; begin a multiple of BLOCK_M.
__device__ __forceinline__ Range visible_queries(const Params& p, int64 n) {
    int64 last = min64(n + BLOCK_N, p.kv_len) - 1;
    int64 begin = HAS_RIGHT ? max64(0, n - p.offset - p.right) : 0;
    int64 end = HAS_LEFT ? min64(p.q_len, last - p.offset + p.left + 1) : p.q_len;
    return {begin / BLOCK_M * BLOCK_M, end};
}

// The list of the first tile of queries (or of keys) of a head, among those of all heads; `tiles` is
// how many a head has.
__device__ __forceinline__ int64 first_list(const Params& p, int64 b, int64 h, int64 tiles) {
    return ((p.block_batch > 1 ? b : 0) * p.block_heads + (p.block_heads > 1 ? h : 0)) * tiles;
}

// The order of blocks over tiles: sections of heads whose keys and values, or queries, fit in the L2
// cache together; in a section tile after tile, each of all heads. Without causal or block masks all
// tiles of a head follow each other, in sections of one head.
template <typename Integer = int64>
struct Turn {
    Integer head, tile;

    __device__ __forceinline__ Turn(Integer index, Integer tiles, Integer heads, Integer section) {
        const Integer first = index / (tiles * section) * section, left = heads - first;
        const Integer together = section < left ? section : left, rest = index - first * tiles;
        head = first + rest % together;
        tile = rest / together;
    }
};

// What comes in this place of a head's order.
__device__ __forceinline__ Work work_at(const Params& p, int64 b, int64 h, int64 place) {
    if constexpr (!HAS_BLOCKS) return {static_cast<int>(place), 0, 0, -1};
    const Work work = p.work[first_list(p, b, h, p.works) + place];
    return {uniform(work.tile), uniform(work.begin), uniform(work.end), uniform(work.split)};
}

// Where a head's partial result lies, of so many numbers.
__device__ __forceinline__ float* partial(const Params& p, float* partials, int64 head, int split,
                                          int size) {
    return partials + (head * p.splits + split) * size;
}

// A tile of scores: queries from m, keys from n, of query head h in batch element b.
struct ScoreTile {
    int64 b, h, m, n;
    int rows, columns;   // how many exist
    int lo, hi;          // the band, in the tile's own coordinates: lo <= column - row <= hi
    Compute distance, slope;
    int bits;            // of its Block

    __device__ __forceinline__ ScoreTile(const Params& p, int64 b, int64 h, int64 m, int64 n,
                                         int bits = -1)
        : b(b), h(h), m(m), n(n), bits(bits) {
        rows = static_cast<int>(min64(BLOCK_M, p.q_len - m));
        columns = static_cast<int>(min64(BLOCK_N, p.kv_len - n));
        int64 shift = m + p.offset - n;
        const int64 far = 1 << 30;
        lo = static_cast<int>(max64(-far, min64(far, shift - p.left)));
        hi = static_cast<int>(max64(-far, min64(far, shift + p.right)));
        if constexpr (HAS_ALIBI) {
            distance = static_cast<Compute>(m + p.alibi_offset - n);
            slope = p.alibi_slopes[b * p.q_heads + h];
        }
    }
    // Nothing is hidden or missing.
    __device__ __forceinline__ bool whole() const {
        return rows == BLOCK_M && columns == BLOCK_N && (!HAS_LEFT || lo <= 1 - BLOCK_M) &&
               (!HAS_RIGHT || hi >= BLOCK_N - 1) && !HAS_MASK && !(HAS_BLOCKS && bits >= 0);
    }
    __device__ __forceinline__ bool in_band(int row, int column) const {
        return column < columns && (!HAS_LEFT || column - row >= lo) &&
               (!HAS_RIGHT || column - row <= hi);
    }
    // Bits of the visible pairs of a tile that has them: BLOCK_WORDS for each row.
    static constexpr int BLOCK_WORDS = (BLOCK_N + 31) / 32;
    __device__ __forceinline__ const uint32* words(const Params& p) const {
        return p.block_words + static_cast<int64>(bits) * BLOCK_M * BLOCK_WORDS;
    }
    __device__ __forceinline__ bool in_block(const Params& p, int row, int column) const {
        return !HAS_BLOCKS || bits < 0 ||
               (words(p)[row * BLOCK_WORDS + column / 32] >> column % 32 & 1);
    }
};

// A walk over the tiles of keys of a tile of queries or, BY_KEYS, over the tiles of queries of a tile
// of keys: those in the band, and of these the ones in the list of a block mask.
template <bool BY_KEYS>
struct Walk {
    static constexpr int OWN = BY_KEYS ? BLOCK_N : BLOCK_M, SIZE = BY_KEYS ? BLOCK_M : BLOCK_N;
    int64 b, own;      // own: first query (key) of the tile that others are walked over for
    int h;
    int place, end;    // of the tile at hand; in the list or, without one, among all tiles
    Block now;         // the tile at hand of a list

    // Over tiles from that of key (query) `first` on.
    __device__ __forceinline__ Walk(const Params& p, int64 b, int64 head, int64 own, int64 first = 0)
        : Walk(p, b, head, own, list_of(p, b, head, own), first) {}
    // Over the part of the list that a block works on.
    __device__ __forceinline__ Walk(const Params& p, int64 b, int64 head, int64 own, const Work& work,
                                    int64 first = 0)
        : b(b), own(own), h(static_cast<int>(head)), now{0, -1} {
        const Range range = BY_KEYS ? visible_queries(p, own) : visible_keys(p, own);
        place = static_cast<int>(max64(first, range.begin) / SIZE);
        end = static_cast<int>((range.end + SIZE - 1) / SIZE);
        if constexpr (HAS_BLOCKS) {
            const int begin = same(work.begin), behind = same(work.end);
            const bool part = HAS_LEFT || HAS_RIGHT || place > 0;
            end = part ? lower_bound(p, begin, behind, end) : behind;
            place = part ? lower_bound(p, begin, behind, place) : begin;
            read(p);
        }
    }
    // From one place to another, as a walk before has found them.
    __device__ __forceinline__ Walk(const Params& p, int64 b, int head, int64 own, int place, int end)
        : b(b), own(own), h(head), place(place), end(end), now{0, -1} {
        if constexpr (HAS_BLOCKS) read(p);
    }
    static __device__ __forceinline__ Work list_of(const Params& p, int64 b, int64 h, int64 own) {
        if constexpr (!HAS_BLOCKS) return {};
        const int64 length = BY_KEYS ? p.kv_len : p.q_len;
        const int64 list = first_list(p, b, h, (length + OWN - 1) / OWN) + own / OWN;
        const int* offsets = BY_KEYS ? p.column_offsets : p.row_offsets;
        return {0, offsets[list], offsets[list + 1], -1};
    }
    static __device__ __forceinline__ const Block* blocks(const Params& p) {
        return BY_KEYS ? p.column_blocks : p.row_blocks;
    }
    // What a list says, which all threads read; attention_backward.cu is slower with `uniform`.
    static __device__ __forceinline__ int same(int x) { return BY_KEYS ? x : uniform(x); }
    // The first place from `low` to `high` that holds a tile not before this one; lists ascend.
    static __device__ __forceinline__ int lower_bound(const Params& p, int low, int high, int tile) {
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (blocks(p)[middle].tile < tile) low = middle + 1;
            else high = middle;
        }
        return low;
    }
    __device__ __forceinline__ bool more() const { return place < end; }
    __device__ __forceinline__ bool is_last() const { return place + 1 == end; }
    __device__ __forceinline__ void next(const Params& p) {
        ++place;
        if constexpr (HAS_BLOCKS) read(p);
    }
    __device__ __forceinline__ void read(const Params& p) {
        if (!more()) return;
        const Block block = blocks(p)[place];
        now = {same(block.tile), same(block.bits)};
    }
    // First key (query) of the tile at hand.
    __device__ __forceinline__ int64 at() const {
        return static_cast<int64>(HAS_BLOCKS ? now.tile : place) * SIZE;
    }
    __device__ __forceinline__ ScoreTile tile(const Params& p) const {
        return BY_KEYS ? ScoreTile(p, b, h, at(), own, now.bits) : ScoreTile(p, b, h, own, at(), now.bits);
    }
};
using KeyWalk = Walk<false>;
using QueryWalk = Walk<true>;

// Whether a pair of the tile is visible.
__device__ __forceinline__ bool is_visible(const Params& p, const ScoreTile& t, int row,
                                           int column) {
    if (row >= t.rows || !t.in_band(row, column) || !t.in_block(p, row, column)) return false;
    if constexpr (!HAS_MASK) return true;
    const ScoreStrides& stride = p.mask_strides;
    return p.mask[t.b * stride.batch + t.h * stride.head + (t.m + row) * stride.query +
                  (t.n + column) * stride.key];
}

__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
constexpr float LOG2_E = 1.44269504088896341f;
__device__ __forceinline__ float exp_of(float x) {
    return exp2_approximate(x * LOG2_E);
}

// The bias of a pair of the tile.
__device__ __forceinline__ Compute bias_of(const Params& p, const ScoreTile& t, int row, int column) {
    if constexpr (!HAS_BIAS) return 0;
    if (row >= t.rows || column >= t.columns) return 0;
    const ScoreStrides& stride = p.bias_strides;
    return static_cast<Compute>(to_compute(
        p.bias[t.b * stride.batch + t.h * stride.head + (t.m + row) * stride.query +
               (t.n + column) * stride.key]));
}

// The logit of a pair of the tile, from <q, k>. `slope` becomes its derivative by the scaled
// product.
__device__ __forceinline__ Compute logit(const Params& p, const ScoreTile& t, int row, int column,
                                         Compute product, Compute bias, Compute& slope) {
    slope = 1;
    Compute s = product * p.scale;
    if constexpr (HAS_SOFTCAP) {
        Compute bent = tanh_of(s / p.softcap);
        slope = 1 - bent * bent;
        s = p.softcap * bent;
    }
    if constexpr (HAS_BIAS) s += bias;
    if constexpr (HAS_ALIBI) {
        Compute away = t.distance + static_cast<Compute>(row - column);
        s -= t.slope * (away < 0 ? -away : away);
    }
    return s;
}
