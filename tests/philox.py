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
    """Return (batch, q_heads, q_len, kv_len) random 32-bit numbers, as uint64."""
    b, h, i, j = np.ogrid[:batch, :q_heads, :q_len, :kv_len]
    group = (j >> 4) * 4 + ((j & 7) >> 1)
    key = (seed & 0xFFFFFFFF, seed >> 32)

    def word(number, *counter):
        words = np.stack(np.broadcast_arrays(*philox4x32_10(counter, key)))
        number = np.broadcast_to(number, words.shape[1:])
        return np.take_along_axis(words, number[None], axis=0)[0]

    high = word(((i >> 3) & 1) * 2 + ((j >> 3) & 1), group, (i >> 4) * 8 + (i & 7), h, b)
    high = (high >> (16 * (j & 1)).astype(np.uint64)) & np.uint64(0xFFFF)
    low = word((j & 1) | ((j >> 2) & 2), group, i, h, b | 2**31) >> np.uint64(16)
    return high << np.uint64(16) | low


def keep_mask(batch, q_heads, q_len, kv_len, dropout, seed):
    """Return (batch, q_heads, q_len, kv_len) booleans: True where an element is kept."""
    bits = random_bits(batch, q_heads, q_len, kv_len, seed)
    return bits >= np.uint64(round(dropout * 2**32))
