"""The keep mask of dropout, written a second time and independently of cuflash."""

import numpy as np

MASK = np.uint64(0xFFFFFFFF)


def philox4x32_10(counter, key):
    """Return the four output words (uint64 arrays below 2^32) of Philox4x32-10 by Random123."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        left = np.uint64(0xD2511F53) * c0
        right = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (right >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            right & MASK,
            (left >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            left & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(batch, q_heads, q_len, kv_len, seed):
    """Return (batch, q_heads, q_len, kv_len) random 15-bit numbers, as uint64."""
    b, h, i, j = np.ogrid[:batch, :q_heads, :q_len, :kv_len]
    counter = (j >> 4) * 4 + ((j & 7) >> 1), (i >> 4) * 8 + (i & 7), h, b
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    words = np.stack(np.broadcast_arrays(*words))
    number = np.broadcast_to(((i >> 3) & 1) * 2 + ((j >> 3) & 1), words.shape[1:])
    word = np.take_along_axis(words, number[None], axis=0)[0]
    return (word >> (16 * (j & 1)).astype(np.uint64)) & np.uint64(0x7FFF)


def keep_mask(batch, q_heads, q_len, kv_len, dropout, seed):
    """Return (batch, q_heads, q_len, kv_len) booleans: True where an element is kept."""
    bits = random_bits(batch, q_heads, q_len, kv_len, seed)
    dropped = round(dropout * 2**15)
    return bits >= dropped if dropped <= 2**14 else bits < 2**15 - dropped
