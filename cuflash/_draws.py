"""Random choices that are the same everywhere: made with Philox, like dropout's."""

from __future__ import annotations

import numpy as np

from cuflash._dropout import philox4x32, seed_key


def distinct(seed: int, batch: int, heads: int, available: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` different numbers below ``available[row]`` for each row, all where fewer.

    Source: Floyd's algorithm (Bentley, "Programming pearls", CACM 30(9), 1987).

    Parameters
    ----------
    seed : int
    batch, heads : int
    available : (rows,) int array
    count : int

    Returns
    -------
    (count, batch, heads, rows) int array
        -1 in the places of those that are too many.
    """
    b, h, row = np.ogrid[:batch, :heads, : len(available)]
    drawn = np.full((count, batch, heads, len(available)), -1)
    wanted = np.minimum(available, count)
    for n in range(count):
        greatest = available - wanted + n
        word = philox4x32((np.uint32(n), row, h, b), seed_key(seed))[0].astype(np.int64)
        number = word * (greatest + 1) >> 32
        number = np.where((drawn[:n] == number).any(axis=0), greatest, number)
        drawn[n] = np.where(n < wanted, number, -1)
    return drawn
