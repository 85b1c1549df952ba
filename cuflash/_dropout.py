"""Philox4x32-10 (Salmon et al., SC 2011) in array code, and the keep mask of dropout made with it.

The decision for a score depends on (seed, b, h, i, j) alone. ``kernels/rng.cuh`` is the same
function in CUDA.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

Words = tuple[Any, Any, Any, Any]  # uint32 arrays or numbers

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def new_seed() -> int:
    """Draws a seed for dropout from the operating system's randomness.

    Returns
    -------
    int
        An integer in [0, 2^64). Give it to the forward and to the backward call.
    """
    return secrets.randbits(64)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32 on broadcastable uint32 arrays.

    Parameters
    ----------
    counter : tuple of four uint32 arrays
    key : tuple of two int
        Each below 2^32.

    Returns
    -------
    tuple of four uint32 arrays
    """
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> _HALF) ^ c1 ^ np.uint64(k0)
        c1 = product1 & _LOW
        c2 = (product0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c3 = product0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    narrow = np.uint32
    return c0.astype(narrow), c1.astype(narrow), c2.astype(narrow), c3.astype(narrow)


def kept(seed: int, drop_below: int, b: int, h: int, rows: range, columns: range) -> np.ndarray:
    """Which scores of a tile dropout keeps.

    Parameters
    ----------
    seed : int
    drop_below : int
        A score is dropped if its random 32-bit word is below this.
    b, h : int
        Batch element and query head.
    rows, columns : range
        Queries and keys of the tile.

    Returns
    -------
    (len(rows), len(columns)) bool array
    """
    # Four keys share one call: within 16 keys, j, j + 1, j + 8 and j + 9 for even j below 8.
    first = columns.start // 16 * 16
    blocks = -(-(columns.stop - first) // 16)
    groups = np.arange(first // 4, first // 4 + blocks * 4, dtype=np.uint32)
    i = np.arange(rows.start, rows.stop, dtype=np.uint32)[:, None]
    counter = (groups, i, np.uint32(h), np.uint32(b))
    words = np.stack(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=-1)
    # (row, block, j % 8 // 2, word) with word = j % 2 + 2 * (j % 16 // 8), to (row, j)
    words = words.reshape(len(rows), blocks, 4, 2, 2).transpose(0, 1, 3, 2, 4)
    words = words.reshape(len(rows), blocks * 16)
    return words[:, columns.start - first : columns.stop - first] >= np.uint32(drop_below)
