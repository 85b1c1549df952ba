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


def keep_mask(batch, q_heads, q_len, kv_len, dropout, seed):
    """Return (batch, q_heads, q_len, kv_len) booleans: True where an element is kept."""
    b, h, i, j = np.ogrid[:batch, :q_heads, :q_len, :kv_len]
    group, word = (j >> 4) * 4 + ((j & 7) >> 1), (j & 1) | ((j >> 2) & 2)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = np.stack(np.broadcast_arrays(*philox4x32_10((group, i, h, b), key)))
    chosen = np.take_along_axis(words, np.broadcast_to(word, words.shape[1:])[None], axis=0)[0]
    return chosen >= np.uint64(round(dropout * 2**32))
