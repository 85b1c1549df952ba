"""Philox4x32-10 (Salmon et al., SC 2011) in array code, and the keep mask of dropout made with it.

The decision for a score depends on (seed, b, h, i, j) alone: 15 random bits of its own are compared
with a limit (`Problem.drop_limit`). ``kernels/rng.cuh`` is the same function in CUDA.
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
    for k0, k1 in round_keys(key):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> _HALF) ^ c1 ^ np.uint64(k0)
        c1 = product1 & _LOW
        c2 = (product0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c3 = product0 & _LOW
    narrow = np.uint32
    return c0.astype(narrow), c1.astype(narrow), c2.astype(narrow), c3.astype(narrow)


def round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """The keys of Philox4x32's ten rounds."""
    steps = (0x9E3779B9, 0xBB67AE85)
    return [
        ((key[0] + n * steps[0]) % 2**32, (key[1] + n * steps[1]) % 2**32) for n in range(10)
    ]


def seed_key(seed: int) -> tuple[int, int]:
    """The two halves of a seed, the key of its random numbers."""
    return seed & 0xFFFFFFFF, seed >> 32


def kept(
    seed: int, limit: tuple[int, bool], b: int, h: int, rows: range, columns: range
) -> np.ndarray:
    """Which scores of a tile dropout keeps.

    Parameters
    ----------
    seed : int
    limit : tuple of int and bool
        A score is dropped if its 15 random bits are below the number or, if True, if they are not.
    b, h : int
        Batch element and query head.
    rows, columns : range
        Queries and keys of the tile.

    Returns
    -------
    (len(rows), len(columns)) bool array
    """
    # Eight scores of a block of 16 x 16 share one call: queries i and i + 8, keys j, j + 1, j + 8
    # and j + 9, for i below 8 and even j below 8.
    i_first, j_first = rows.start // 16 * 16, columns.start // 16 * 16
    i_blocks, j_blocks = (-(-(r.stop - s) // 16) for r, s in ((rows, i_first), (columns, j_first)))
    i = np.arange(i_first // 2, i_first // 2 + i_blocks * 8, dtype=np.uint32)[:, None]
    groups = np.arange(j_first // 4, j_first // 4 + j_blocks * 4, dtype=np.uint32)
    words = np.stack(philox4x32((groups, i, np.uint32(h), np.uint32(b)), seed_key(seed)), axis=-1)
    # (block, i % 8, block, j % 8 // 2, i % 16 // 8, j % 16 // 8, j % 2) to (i, j)
    halves = words.astype("<u4").view("<u2").reshape(i_blocks, 8, j_blocks, 4, 2, 2, 2)
    halves = halves.transpose(0, 4, 1, 2, 5, 3, 6).reshape(i_blocks * 16, j_blocks * 16)
    halves = halves[rows.start - i_first : rows.stop - i_first,
                    columns.start - j_first : columns.stop - j_first]  # fmt: skip
    number, above = limit
    return ((halves & 0x7FFF) < number) == above
