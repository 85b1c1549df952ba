"""What kernels walk: for each row of tiles the tiles in which something is visible."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash._blocks import ABSENT, NOTHING, PARTIAL, Blocks, numbered, portions
from cuflash._interop import module_of, to_host

_AT_A_TIME = 2**22  # tiles
_SHORT, _TIMES = 16, 4  # lists with more entries, and so many times the average, are split


class Lists(NamedTuple):
    """The tiles of each row; int32 but for `words`, on the device of the mask.

    Row ``(b * heads + h) * row_tiles + r`` is the tile of queries r of one batch element and head
    of the mask, which has 1 of either where they are shared. Transposed, rows are tiles of keys and
    their entries tiles of queries.

    Attributes
    ----------
    offsets : (rows + 1,) array
        Entries of row r: from ``offsets[r]`` on, up to ``offsets[r + 1]``.
    blocks : (entries, 2) array
        Which tile, in ascending order in each row, and its index into `words`; -1 there if all of
        the tile within the lengths is visible.
    words : (partial tiles, tile_m, tile_n / 32 rounded up) uint32 array
        Bit k of word w of a query: key 32 w + k of the tile. Transposed lists have the same.
    work : (batch * heads, works, 4) array
        What blocks of threads do, the longest first: (tile, first entry, behind the last one,
        number of the split). Lists that are much longer than the others are split, so that no
        block is busy with one for long; -1 where a list is whole. Rows of -1 fill the array.
    cuts : (batch * heads, split rows, 4) array
        The rows whose lists are split: (tile, first split, behind the last one, -1).
    splits : int
        The most splits that a batch element and head of the mask has.
    """

    offsets: Any
    blocks: Any
    words: Any
    work: Any
    cuts: Any
    splits: int


def lists(blocks: Blocks, transposed: bool, split: bool = True) -> Lists:
    """Lists of blocks that are tiles; `split` says whether long ones may be."""
    xp, (batch, heads, rows, columns) = module_of(blocks.states), blocks.grid.counts
    states = blocks.states.reshape(batch * heads, rows, columns)
    axis = 1 if transposed else 2
    counts = to_host((states != ABSENT).sum(axis=axis))
    partial = to_host((states == PARTIAL).sum(axis=(1, 2))).tolist()
    seen = counts.sum(axis=1).tolist()
    offsets = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    found = xp.empty((sum(seen), 2), xp.int32)
    across, step = states.shape[axis], max(1, _AT_A_TIME // max(1, rows * columns))
    entry = word = 0
    for first, planes in zip(range(0, len(states), step), portions(states, step)):
        number = numbered(planes, word)
        number = (number.swapaxes(1, 2) if transposed else number).ravel()
        places = xp.flatnonzero(number != NOTHING)
        stop = entry + len(places)
        found[entry:stop, 0] = places % across
        found[entry:stop, 1] = number[places]
        entry, word = stop, word + sum(partial[first : first + step])
    most = max(_SHORT, _TIMES * sum(seen) // max(1, counts.size)) if split else max(1, across)
    work, cuts, splits = _shared_out(counts, offsets, most)
    return Lists(
        xp.asarray(offsets), found, blocks.bits, xp.asarray(work), xp.asarray(cuts), splits
    )


def _shared_out(
    counts: np.ndarray, offsets: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Work, cuts and splits of rows with these counts of entries, at most `most` in a piece."""
    planes, rows = counts.shape
    pieces = np.maximum(1, -(-counts // most))
    works, cuts, splits = [], [], 0
    for plane in range(planes):
        n, count, last = pieces[plane], counts[plane], offsets[1:].reshape(planes, rows)[plane]
        row = np.repeat(np.arange(rows), n)
        piece = np.arange(len(row)) - np.repeat(np.cumsum(n) - n, n)
        size = -(-count // n)
        first = (last - count)[row] + piece * size[row]
        stop = np.minimum(first + size[row], last[row])
        split = np.where(n[row] > 1, np.cumsum(n[row] > 1) - 1, -1)
        work = np.stack([row, first, stop, split], axis=1)
        works.append(work[np.argsort(first - stop, kind="stable")])
        cut = np.flatnonzero(n > 1)
        after = np.cumsum(n[cut])
        cuts.append(np.stack([cut, after - n[cut], after, np.full_like(cut, -1)], axis=1))
        splits = max(splits, int(n[cut].sum()))
    return _padded(works), _padded(cuts), splits


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays of four columns as one, with rows of -1 where one is shorter than others."""
    padded = np.full((len(arrays), max(map(len, arrays), default=0), 4), -1, np.int32)
    for plane, array in zip(padded, arrays):
        plane[: len(array)] = array
    return padded
