"""The tile tables of the generic kernels: data. benchmarks/NOTES.md tells what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Sizes of one generic kernel's tile; names as the kernels' constants.

    A thread owns `rows` x `columns` scores of a tile of threads_m * rows queries and
    threads_n * columns keys.
    """

    threads_m: int
    rows: int
    columns: int
    block_d: int
    chunk: int  # values in a chunk of rows: BLOCK_K follows from its width
    min_blocks: int
    threads_n: int = 8
    slices: int = 1

    @property
    def block_m(self) -> int:
        """Queries in a tile."""
        return self.threads_m * self.rows

    @property
    def block_n(self) -> int:
        """Keys in a tile."""
        return self.threads_n * self.columns


@dataclass(frozen=True)
class Entry:
    """Tiles for widths up to `width`, in order of preference: the first that fits is taken.

    `plain` serves scores that are only scaled and banded (causal, window); `rich` serves those with
    a mask, bias, ALiBi, softcap or dropout, whose code needs registers.
    """

    width: int
    plain: tuple[Tile, ...]
    rich: tuple[Tile, ...]


Table = dict[str, tuple[Entry, ...]]

# By compute type. The width is value_dim in the forward pass, the larger of head_dim and value_dim
# in the backward pass. The first plain tiles up to width 256 (float64: 128) won on an H200; the
# others are the largest that fit without spilling. The last tiles of a row are for GPUs with less
# shared memory.
_T = Tile
FORWARD: Table = {
    "float32": (
        Entry(64, (_T(16, 8, 8, 16, 2048, 2), _T(16, 4, 8, 32, 2048, 2)),
              (_T(16, 4, 4, 32, 2048, 2),)),
        Entry(96, (_T(16, 4, 8, 32, 2048, 2),), (_T(16, 4, 4, 16, 2048, 2),)),
        Entry(128, (_T(8, 8, 8, 16, 2048, 2, 16), _T(16, 4, 8, 32, 2048, 2)),
              (_T(16, 4, 4, 16, 2048, 2),)),
        Entry(256, (_T(16, 4, 8, 32, 4096, 1, 16), _T(16, 2, 8, 32, 2048, 2)),
              (_T(16, 2, 4, 16, 2048, 2),)),
        Entry(512, (_T(16, 2, 4, 32, 2048, 1, 16),), (_T(16, 1, 4, 16, 2048, 2),)),
    ),
    "float64": (
        Entry(64, (_T(16, 4, 4, 16, 1024, 2),), (_T(16, 2, 4, 16, 1024, 2),)),
        Entry(128, (_T(8, 4, 4, 16, 1024, 2, 16), _T(16, 2, 4, 16, 1024, 2)),
              (_T(16, 2, 2, 16, 1024, 2),)),
        Entry(256, (_T(16, 2, 4, 16, 1024, 1, 16),), (_T(16, 1, 4, 16, 1024, 2),)),
        Entry(512, (_T(16, 1, 4, 16, 1024, 1, 16),), (_T(16, 1, 4, 16, 1024, 1, 16),)),
    ),
}  # fmt: skip
BACKWARD: Table = {
    "float32": (
        Entry(64, (_T(16, 4, 8, 32, 2048, 2), _T(16, 4, 8, 16, 2048, 2)),
              (_T(16, 4, 4, 32, 2048, 2),)),
        Entry(96, (_T(16, 4, 4, 32, 2048, 2),), (_T(16, 4, 4, 16, 2048, 2),)),
        Entry(128, (_T(16, 8, 4, 32, 2048, 1, 16), _T(16, 4, 4, 32, 2048, 2)),
              (_T(16, 4, 4, 16, 2048, 2),)),
        Entry(256, (_T(16, 8, 4, 16, 4096, 1, 16), _T(16, 4, 4, 16, 2048, 2)),
              (_T(16, 2, 4, 16, 2048, 2, 8, 2),)),
        Entry(512, (_T(16, 4, 4, 16, 4096, 1, 16, 2), _T(16, 4, 4, 16, 2048, 2, 8, 2)),
              (_T(16, 2, 4, 16, 2048, 2, 8, 4),)),
    ),
    "float64": (
        Entry(64, (_T(16, 4, 4, 16, 1024, 2),), (_T(16, 2, 4, 16, 1024, 2),)),
        *(
            Entry(width, (_T(16, 4, 4, depth, 1024, 1, 16, wide),
                          _T(16, 2, 4, 16, 1024, 2, 8, narrow)),
                  (_T(16, 2, 4, 16, 1024, 2, 8, narrow),))
            for width, depth, wide, narrow in ((128, 16, 1, 2), (256, 8, 2, 4), (512, 8, 4, 8))
        ),
    ),
}  # fmt: skip

# Bytes per thread that a generic kernel may spill: what it keeps there are addresses, written once
# per tile outside of the products.
SPILL_ALLOWANCE = 64
