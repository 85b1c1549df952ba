// What happens to a tile of scores in the fragments of mma.cuh: mask and bias, which pass through
// shared memory, and dropout.
//
// Constants beside those of mma.cuh and scores.cuh: POSITIVE_SCALE (p.scale > 0, and not tiny).
#pragma once
#include "mma.cuh"
#include "scores.cuh"

// Exponentials are 2^(factor * score - reference). Where a score is only scaled, it remains the
// product <q, k> and the scale is part of the factor; else it is the logit.
constexpr bool FOLDS_SCALE = POSITIVE_SCALE && !HAS_SOFTCAP && !HAS_BIAS && !HAS_ALIBI;
__device__ __forceinline__ float factor_of(const Params& p) {
    return FOLDS_SCALE ? p.scale * LOG2_E : LOG2_E;
}

// Visible pairs of a tile as bits, where there is a mask, those of the band included: for each row its
// keys' bits, side by side.
struct MaskBits {
    static constexpr int WORDS = ScoreTile::BLOCK_WORDS;   // of a row
    static constexpr int BYTES = HAS_MASK ? BLOCK_M * WORDS * 4 : 0;
    uint32* words;

    // Writes the bits of a tile by COUNT threads; returns whether a pair that the thread looked at is
    // visible.
    template <int COUNT = THREADS>
    __device__ __forceinline__ bool fill(const Params& p, const ScoreTile& t,
                                         int thread = threadIdx.x) const {
        static_assert(!HAS_MASK || BLOCK_N % 32 == 0 || 32 % BLOCK_N == 0, "no word is of two tiles");
        const MaskWords mask(p);
        const uint32* from = p.mask_words + mask.at(t.b, t.h, t.m) + t.n / 32;
        const int64 stride = mask.rows > 1 ? mask.width : 0;
        bool any = false;
#pragma unroll
        for (int at = thread; at < BLOCK_M * WORDS; at += COUNT) {
            const int row = at / WORDS, first = at % WORDS * 32;
            int low = 0, high = min(t.columns - 1 - first, 31);
            if (HAS_LEFT) low = max(low, t.lo + row - first);
            if (HAS_RIGHT) high = min(high, t.hi + row - first);
            uint32 bits = 0;
            if (row < t.rows && low <= high)
                bits = from[row * stride + at % WORDS] >> t.n % 32 & ~0u << low & ~0u >> (31 - high);
            words[at] = bits;
            any |= bits != 0;
        }
        return any;
    }
};

template <bool WIDE> struct WordOf { using Type = uint32; };
template <> struct WordOf<false> { using Type = unsigned short; };

// Which of the thread's scores are visible: by bits, those of a mask or of a block mask; and by the
// first and the last column in the band of each row, counted from the thread's first. The bits of a
// mask hold the band as well.
struct Visible {
    using Word = WordOf<(WARP_COLUMNS >= 32)>::Type;
    static constexpr bool HAS_BITS = HAS_MASK || HAS_BLOCKS;
    static constexpr int WORDS = HAS_BITS ? WARP_COLUMNS / 8 / sizeof(Word) : 1;
    Vector<Word, WORDS> bits[ROWS];   // of the warp's keys, from the thread's first on
    int low[ROWS], high[ROWS];

    __device__ __forceinline__ Visible(const Params& p, const ScoreTile& t, const MaskBits& mask) {
        const uint32* words = HAS_BLOCKS ? t.words(p) : mask.words;
        const int first = warp_column() + lane_index() % 4 * 2;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = score_row(r);
            if constexpr (HAS_BITS) {
                const auto* from = reinterpret_cast<const unsigned char*>(words) +
                                   row * MaskBits::WORDS * 4 + warp_column() / 8;
                if (!HAS_BLOCKS || t.bits >= 0)
                    bits[r] = *reinterpret_cast<const Vector<Word, WORDS>*>(from);
#pragma unroll
                for (int word = 0; word < WORDS; ++word)
                    bits[r].at[word] = HAS_BLOCKS && t.bits < 0
                                            ? static_cast<Word>(~0u)
                                            : bits[r].at[word] >> lane_index() % 4 * 2;
            }
            if constexpr (!HAS_MASK) {
                low[r] = t.lo + row - first;
                high[r] = min(t.columns - 1, HAS_RIGHT ? t.hi + row : BLOCK_N) - first;
                if (row >= t.rows) high[r] = -1;
            }
        }
    }
    __device__ __forceinline__ bool at(int r, int c) const {
        const int column = c / 2 * 8 + c % 2;
        constexpr int WIDTH = sizeof(Word) * 8;
        if constexpr (HAS_BITS)
            if (!(bits[r].at[column / WIDTH] >> column % WIDTH & 1)) return false;
        if constexpr (HAS_MASK) return true;
        return (!HAS_LEFT || column >= low[r]) && column <= high[r];
    }
};

// A tile of biases in shared memory; 0 beyond the ends.
struct BiasTile : Panels<BLOCK_M, BLOCK_N, BiasElement> {
    using Base = Panels<BLOCK_M, BLOCK_N, BiasElement>;
    static constexpr int BYTES = HAS_BIAS ? Base::BYTES : 0;
    unsigned char* memory;   // what `base` is the address of

    template <int COUNT = THREADS>
    __device__ __forceinline__ void fetch(const Params& p, const ScoreTile& t,
                                          int thread = threadIdx.x) const {
        const ScoreStrides& stride = p.bias_strides;
        const BiasElement* bias = p.bias + t.b * stride.batch + t.h * stride.head;
        const BiasElement* first = bias + t.m * stride.query + t.n * stride.key;
        const uint64 bits = reinterpret_cast<uint64>(bias) | stride.query * sizeof(BiasElement);
        if (stride.key == 1 && bits % 16 == 0) {
            Base::template fetch<COUNT>(first, stride.query, t.rows, t.columns, thread);
            return;
        }
#pragma unroll 1
        for (int at = thread; at < BLOCK_M * BLOCK_N; at += COUNT) {
            const int row = at / BLOCK_N, column = at % BLOCK_N;
            *place(row, column) = row < t.rows && column < t.columns
                                      ? first[row * stride.query + column * stride.key]
                                      : BiasElement{};
        }
    }
    __device__ __forceinline__ BiasElement* place(int row, int column) const {
        const uint32 to = at(row, column / CHUNK) - base;
        return reinterpret_cast<BiasElement*>(memory + to) + column % CHUNK;
    }
    // The bias of the thread's scores (r, c) and (r, c + 1), c even.
    __device__ __forceinline__ void load(float (&pair)[2], int r, int c) const {
        if constexpr (HAS_BIAS) {
            const auto values = *reinterpret_cast<const Vector<BiasElement, 2>*>(
                place(score_row(r), score_column(c)));
            for (int e = 0; e < 2; ++e) pair[e] = static_cast<float>(to_compute(values.at[e]));
        }
    }
};

// Products to logits, in place; `use(r, c, slope)` is told of each one's derivative by the product.
template <typename Use>
__device__ __forceinline__ void to_logits(const Params& p, const ScoreTile& t, const BiasTile& biases,
                                          ScoreSums& s, Use use) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            float bias[2] = {};
            biases.load(bias, r, c);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float slope, &score = at(s, r, c + e);
                score = logit(p, t, score_row(r), score_column(c + e), score, bias[e], slope);
                use(r, c + e, slope);
            }
        }
}

// The random bits of the thread's scores (r, c) to (r + 1, c + 3), of a block of 16 x 16.
__device__ __forceinline__ Words score_words(const Params& p, const ScoreTile& t, int r, int c) {
    static_assert(BLOCK_M % 16 == 0 && BLOCK_N % 16 == 0, "blocks of 16 x 16 have the same words");
    const uint32 group = key_group(t.n + warp_column()) + lane_index() % 4 + c;
    return random_words(p, group, t.b, t.h, t.m + score_row(r));
}

// Calls `use(r, c, dropped)` for each of the thread's scores: whether dropout drops it.
template <typename Use>
__device__ __forceinline__ void for_scores(const Params& p, const ScoreTile& t, Use use) {
#pragma unroll
    for (int r = 0; r < ROWS; r += 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4) {
            bool dropped[8] = {};
            if constexpr (HAS_DROPOUT) {
                const Words words = score_words(p, t, r, c);
#pragma unroll
                for (int e = 0; e < 8; e += 2)
                    halves_below(dropped[e], dropped[e + 1], words.at[e / 2], p.drop_limits,
                                 p.drops_above);
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) use(r + e / 4, c + e % 4, dropped[e]);
        }
}
