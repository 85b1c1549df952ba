"""Where the blocks of a block mask lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuflash._bits import KEYS
from cuflash._errors import integer, reject
from cuflash._interop import module_of

SMALLEST, LARGEST = 16, 256  # rows or columns of a block


@dataclass(frozen=True)
class Grid:
    """Pairs of queries and keys, cut into blocks; those at the ends may reach beyond the lengths.

    Attributes
    ----------
    shape : (batch, heads, q_len, kv_len)
        batch and heads of 1 stand for all.
    block_size : (rows, columns)
    """

    shape: tuple[int, int, int, int]
    block_size: tuple[int, int]

    @staticmethod
    def of(q_len: Any, kv_len: Any, block_size: Any, batch: Any = 1, heads: Any = 1) -> Grid:
        """Checks sizes and makes a grid of them; a kv_len of None is that of the queries."""
        q_len = integer("q_len", q_len)
        kv_len = q_len if kv_len is None else integer("kv_len", kv_len)
        batch, heads = integer("batch", batch, 1), integer("heads", heads, 1)
        return Grid((batch, heads, q_len, kv_len), checked_size(block_size))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Batch, heads, rows of blocks, columns of blocks."""
        batch, heads, q_len, kv_len = self.shape
        rows, columns = self.block_size
        return batch, heads, -(-q_len // rows), -(-kv_len // columns)

    def places(self, blocks: Any) -> tuple[Any, Any, Any]:
        """Plane (batch * heads + head), block row and block column of flat indices of blocks."""
        _, _, rows, columns = self.counts
        return blocks // (rows * columns), blocks // columns % rows, blocks % columns

    def inside_blocks(self, blocks: Any) -> tuple[Any, Any, Any]:
        """Planes (n, 1, 1), queries (n, rows, 1) and sixteens of keys (n, 1, columns / 16)."""
        xp, (rows, columns) = module_of(blocks), self.block_size
        plane, row, column = (place[:, None, None] for place in self.places(blocks))
        i = row * rows + xp.arange(rows)[:, None]
        return plane, i, column * (columns // KEYS) + xp.arange(columns // KEYS)

    def bits(self, i: Any, u: Any) -> Any:
        """Bits (uint16) of the pairs within the lengths, of queries i and sixteens of keys u."""
        xp, (_, _, q_len, kv_len) = module_of(i), self.shape
        ends = (1 << xp.clip(kv_len - u * KEYS, 0, KEYS)) - 1
        return (i < q_len) * ends.astype(xp.uint16)


def checked_size(block_size: Any) -> tuple[int, int]:
    """Rows and columns of a block, from one number or a pair."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        rule = "block_size must be a number or a pair (rows, columns)"
        raise reject(ValueError, rule, block_size)
    rows, columns = (integer("block_size", size, 0) for size in pair)
    for size in (rows, columns):
        if not SMALLEST <= size <= LARGEST or size % SMALLEST:
            rule = f"block_size must be multiples of {SMALLEST} up to {LARGEST}"
            raise reject(ValueError, rule, block_size)
    return rows, columns
