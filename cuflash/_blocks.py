"""The content of a block mask, and the one way in which all content is made.

A block is absent, full, or partial, and a partial one keeps its bits. Whatever makes blocks (a
function, a pattern, a combination, another block size) gives two things: a guess, which says of
each block that it is surely absent, surely full, or has to be looked at, and the bits of those that
have to be looked at. :func:`resolve` looks at them, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from cuflash._bits import KEYS, pack, unpack, words
from cuflash._errors import reject
from cuflash._grid import Grid
from cuflash._interop import module_of, wait_for

ABSENT, PARTIAL, FULL = 0, 1, 2  # states
WHOLE, NOTHING = -1, -2  # in the place of a partial block's number
_AT_A_TIME, _AT_A_TIME_ON_GPU = 2**21, 2**24  # pairs of a query and a key

BitsOf = Callable[[Any, Any, Any], Any]
"""Bits (uint16) of planes, queries and sixteens of keys, index arrays that broadcast."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a grid.

    Attributes
    ----------
    grid : Grid
    states : (batch, heads, block rows, block columns) uint8 array
        0: absent, 1: partial, 2: full. A block at the end is full if all within the lengths is
        visible.
    bits : (partial blocks, rows, columns / 32 rounded up) uint32 array
        In the order of `states`. Bit k of word w is key 32 w + k of the block, 0 beyond the ends.
    """

    grid: Grid
    states: Any
    bits: Any

    @cached_property
    def index(self) -> Any:
        """Each block's number among the partial ones; -1: full, -2: absent. Shape of `states`."""
        found = numbered(self.states)
        wait_for(found)  # any stream of any thread may read it from now on
        return found

    def halves(self, plane: Any, i: Any, u: Any) -> Any:
        """Bits (uint16) of planes, queries and sixteens of keys, index arrays that broadcast.

        Beyond the lengths they may be anything.
        """
        xp, (rows, columns) = module_of(self.states), self.grid.block_size
        _, _, block_rows, block_columns = self.grid.counts
        across = columns // KEYS
        row = plane * block_rows + xp.minimum(i // rows, block_rows - 1)
        block = row * block_columns + xp.minimum(u // across, block_columns - 1)
        index = xp.take(self.index.ravel(), block).astype(xp.int64)
        stored = self.bits.ravel().view(xp.uint16)
        width = 2 * self.bits.shape[2]
        if not stored.size:  # what is taken of it is not used
            stored = xp.zeros(rows * width, xp.uint16)
        line = xp.maximum(index, 0) * rows + i % rows
        found = xp.take(stored, line * width + u % across)
        plain = (index == WHOLE) * xp.uint16(0xFFFF)
        return xp.where(index < 0, plain, found)

    def visible(self, plane: Any, i: Any, keys: range) -> Any:
        """Booleans of planes, queries and a range of keys, which is the last axis."""
        first, stop = keys.start // KEYS, -(-keys.stop // KEYS)
        seen = unpack(self.halves(plane, i, module_of(self.states).arange(first, stop)))
        return seen[..., keys.start - first * KEYS : keys.stop - first * KEYS]

    def tile(self, b: slice, h: slice, rows: range, keys: range) -> Any | None:
        """What is visible of some queries and keys, (batch, heads, rows, keys); None if all is.

        Of batch and heads, one stands for all if the mask has no more.
        """
        if (self._met(b, h, rows, keys) == FULL).all():
            return None
        xp, (batch, heads, *_) = module_of(self.states), self.grid.shape
        plane = xp.arange(batch * heads).reshape(batch, heads, 1, 1)[self._planes(b, h)]
        return self.visible(plane, xp.arange(rows.start, rows.stop)[:, None], keys)

    def stretches(self, b: slice, h: slice, rows: range) -> list[range]:
        """The keys of blocks that some queries see, in stretches of full and of other blocks."""
        xp, columns, kv_len = module_of(self.states), self.grid.block_size[1], self.grid.shape[3]
        met = self._met(b, h, rows, range(kv_len))
        states = _joined(met.min(axis=(0, 1, 2)), met.max(axis=(0, 1, 2)))
        edges = (xp.flatnonzero(states[1:] != states[:-1]) + 1).tolist()
        return [
            range(start * columns, min(stop * columns, kv_len))
            for start, stop in zip([0, *edges], [*edges, len(states)])
            if start < stop and states[start] != ABSENT
        ]

    def _met(self, b: slice, h: slice, rows: range, keys: range) -> Any:
        """States of the blocks in which some queries and keys lie."""
        places = (
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip((rows, keys), self.grid.block_size)
        )
        return self.states[self._planes(b, h) + tuple(places)]

    def _planes(self, b: slice, h: slice) -> tuple[slice, ...]:
        whole = slice(None)
        return tuple(part if n > 1 else whole for part, n in zip((b, h), self.grid.shape))

    def retiled(self, block_size: tuple[int, int]) -> Blocks:
        """The same mask in blocks of another size."""
        (rows, columns), (new_rows, new_columns) = self.grid.block_size, block_size
        if block_size == self.grid.block_size:
            return self
        _, _, q_len, kv_len = self.grid.shape
        low = high = self.states
        for axis, old, new, length in ((2, rows, new_rows, q_len),
                                       (3, columns, new_columns, kv_len)):  # fmt: skip
            low, high = _least_and_most(low, high, axis, old, new, length)
        grid = Grid(self.grid.shape, block_size)
        return Blocks(grid, *resolve(grid, _joined(low, high), self.halves))


def _least_and_most(
    low: Any, high: Any, axis: int, old: int, new: int, length: int
) -> tuple[Any, Any]:
    """Least and greatest state of the blocks that each new block meets, along one axis."""
    if old == new:
        return low, high
    xp = module_of(low)
    start = xp.arange(-(-length // new)) * new
    first, last = start // old, (xp.minimum(start + new, length) - 1) // old
    least = most = None
    for step in range(-(-(old - gcd(old, new) + new) // old)):
        met = xp.minimum(first + step, last)
        lows, highs = xp.take(low, met, axis=axis), xp.take(high, met, axis=axis)
        least = lows if least is None else xp.minimum(least, lows)
        most = highs if most is None else xp.maximum(most, highs)
    return least, most


def _joined(low: Any, high: Any) -> Any:
    """State of blocks taken together, of which these are the least and the greatest ones."""
    return (high != ABSENT).astype(module_of(high).uint8) + (low == FULL)


def numbered(states: Any, before: int = 0) -> Any:
    """Numbers of the partial blocks, from `before` on; -1 where a block is full, -2 if absent."""
    xp = module_of(states)
    partial = states == PARTIAL
    number = xp.cumsum(partial, dtype=xp.int32).reshape(states.shape) + (before - 1)
    return xp.where(partial, number, (states == FULL) + xp.int32(NOTHING))


def resolve(grid: Grid, guess: Any, bits_of: BitsOf) -> tuple[Any, Any]:
    """States and bits of the blocks of a grid.

    Those whose guess is PARTIAL are looked at; what is said of the others is taken as it is.
    """
    xp, (rows, columns) = module_of(guess), grid.block_size
    states, kept = guess.flatten(), [no_bits(xp, grid)]
    count = (_AT_A_TIME if xp is np else _AT_A_TIME_ON_GPU) // (rows * columns)
    for blocks in portions(xp.flatnonzero(states == PARTIAL), count):
        plane, i, u = grid.inside_blocks(blocks)
        inside = grid.bits(i, u)
        halves = bits_of(plane, i, u) & inside
        some = (halves != 0).any(axis=(1, 2)).astype(xp.uint8)
        states[blocks] = found = some + (halves == inside).all(axis=(1, 2))
        kept.append(words(halves[found == PARTIAL]))
    return states.reshape(grid.counts), xp.concatenate(kept)


def no_bits(xp: Any, grid: Grid) -> Any:
    """The bits of a grid without partial blocks."""
    rows, columns = grid.block_size
    return xp.zeros((0, rows, -(-columns // 32)), xp.uint32)


def bits_of_function(grid: Grid, visible: Callable[[Any, Any, Any, Any], Any]) -> BitsOf:
    """The bits of a function of (b, h, i, j) in array code, never called beyond the lengths."""
    _, heads, q_len, kv_len = grid.shape

    def bits_of(plane: Any, i: Any, u: Any) -> Any:
        xp, shape = module_of(i), (len(i), *grid.block_size)
        j = (u[..., None] * KEYS + xp.arange(KEYS)).reshape(len(u), 1, shape[2])
        i, j = xp.minimum(i, q_len - 1), xp.minimum(j, kv_len - 1)
        seen = xp.asarray(visible(plane // heads, plane % heads, i, j))
        if seen.dtype != xp.bool_:
            raise reject(TypeError, "visible must return booleans", seen.dtype.name)
        try:
            seen = xp.broadcast_to(seen, shape)
        except ValueError as error:
            rule = f"visible must return an array that broadcasts to {shape} for these indices"
            raise reject(ValueError, rule, seen.shape) from error
        return pack(seen)

    return bits_of


def portions(array: Any, size: int) -> Iterator[Any]:
    """Parts of an array, in order, of this length at most."""
    for start in range(0, len(array), size):
        yield array[start : start + size]
