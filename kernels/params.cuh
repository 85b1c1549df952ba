// The one argument of every kernel, passed by value. cuflash/_params.py packs it in this order.
// Strides count elements. Those of q, k, v and of what has their shapes are (batch, row, head,
// channel); those of mask and bias are (batch, head, query, key), 0 on broadcast axes.
#pragma once
#include "types.cuh"

struct Strides { int64 batch, row, head, channel; };
struct ScoreStrides { int64 batch, head, query, key; };

// A tile of a block mask, in a list: which one, and the number of its bits in block_words; -1 where
// all of it is visible.
struct alignas(8) Block { int tile, bits; };

// What a block does under a block mask: a tile of queries (keys), and the entries of its list. The
// longest lists are split among several blocks, each of which leaves a partial result, of this number
// among those of a head; -1 where the list is whole. Without a tile (-1) there is nothing to do.
struct alignas(16) Work { int tile, begin, end, split; };

struct Params {
    const Element* q;
    const Element* k;
    const Element* v;
    Element* out;
    const Element* dout;
    Element* dq;
    Element* dk;
    Element* dv;
    const unsigned char* mask;
    const BiasElement* bias;
    // Contiguous from here on.
    Compute* lse;             // (batch, q_heads, q_len); null where nobody asks for it
    Compute* delta;           // like lse: rowsum(dout * out) - dlse
    const Compute* dlse;      // like lse, or null
    BiasElement* dbias;       // of the bias's own shape
    const Compute* alibi_slopes;   // (batch, q_heads)
    const Compute* sinks;     // (q_heads)
    Compute* dsinks;          // (q_heads)
    Compute* sums;            // dq, where shares are added: of its shape, or attention_backward.cu's
    unsigned char* kept;      // (batch, q_heads, q_len, kv_len)
    // A block mask in tiles of the kernel's size: for each tile of queries the tiles of keys in which
    // something is visible; then for each tile of keys the tiles of queries.
    const int* row_offsets;
    const Block* row_blocks;
    const int* column_offsets;
    const Block* column_blocks;
    const uint32* block_words;
    const Work* work;         // of each head of the mask, the longest first
    const Work* cuts;         // of each head of the mask, split lists: from the first to the last split
    float* partials;          // of each head, of each split: its rows
    float* partial_lse;       // in the forward pass
    uint32* mask_words;       // the mask as bits (MaskWords)
    uint32 round_keys[10][2];      // of the seed (rng.cuh)
    int64 works, cut_count, splits;   // of each head under a block mask

    int64 batch, q_len, kv_len, q_heads, kv_heads;
    int64 offset;             // query i is aligned with key i + offset (bands)
    int64 left, right;        // visible: -left <= j - (i + offset) <= right
    int64 alibi_offset;       // |i + alibi_offset - j| is the distance of a pair
    int64 bias_batch, bias_heads, bias_queries, bias_keys;   // the bias's own shape
    int64 section_heads;      // query heads whose tiles are done together (scores.cuh)
    int64 block_batch, block_heads;   // of the block mask: 1 where it is shared
    Compute scale, softcap;
    Compute keep_scale, unused;   // keep_scale = 1 / (1 - dropout)
    uint32 drop_limits;       // a score is dropped if its 15 random bits are below (twice the same)
    uint32 drops_above;       // 1: if they are not (dropout above one half)
    Strides q_strides, k_strides, v_strides, out_strides, dout_strides;
    Strides dq_strides, dk_strides, dv_strides;
    ScoreStrides mask_strides, bias_strides;
};

// Sizes of the mask as bits, a bit for each key: an axis along which it repeats itself has length 1.
// Rows are whole numbers of 16 bytes.
struct MaskWords {
    int64 batch, heads, rows, width;
    __device__ __forceinline__ explicit MaskWords(const Params& p)
        : batch(p.mask_strides.batch ? p.batch : 1), heads(p.mask_strides.head ? p.q_heads : 1),
          rows(p.mask_strides.query ? p.q_len : 1), width((p.kv_len + 127) / 128 * 4) {}
    // Of the words, the number of the first one of a row.
    __device__ __forceinline__ int64 at(int64 b, int64 h, int64 i) const {
        return (((batch > 1 ? b : 0) * heads + (heads > 1 ? h : 0)) * rows + (rows > 1 ? i : 0)) * width;
    }
};
