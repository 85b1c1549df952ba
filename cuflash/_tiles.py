"""The tile tables of the kernels: data. benchmarks/NOTES.md tells what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


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


class Sized(Protocol):
    """A tile of any kernel."""

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...


AnyTile = TypeVar("AnyTile", bound=Sized)


@dataclass(frozen=True)
class Entry(Generic[AnyTile]):
    """Tiles for widths up to `width`, in order of preference: the first that fits is taken.

    `plain` serves scores that are only scaled and banded (causal, window); `rich` serves those with
    a mask, bias, ALiBi, softcap or dropout, whose code needs registers. Of block masks, `sparse` is
    preferred to `plain`, and tiles that are no larger than a block to others. Where there are more
    keys than `many`, without and with a band (causal, window), `long` is preferred to `plain`.
    """

    width: int
    plain: tuple[AnyTile, ...]
    rich: tuple[AnyTile, ...]
    sparse: tuple[AnyTile, ...] = ()
    many: tuple[int, int] = (0, 0)
    long: tuple[AnyTile, ...] = ()


Table = tuple[Entry[AnyTile], ...]

# By compute type. The width is value_dim in the forward pass, the larger of head_dim and value_dim
# in the backward pass. The first plain tiles up to width 256 (float64: 128) won on an H200; the
# others are the largest that fit without spilling. The last tiles of a row are for GPUs with less
# shared memory.
_T = Tile
FORWARD: dict[str, Table[Tile]] = {
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
BACKWARD: dict[str, Table[Tile]] = {
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


def spill_allowance(kernel: str) -> int:
    """Bytes per thread that a kernel may spill.

    What the generic kernels keep there are addresses, written once per tile outside of the
    products. The tensor-core kernels' sums take nearly all registers; with bias, dropout and more
    at once they spill, and yet were faster than with smaller tiles that spill nothing. Hopper's
    spills nothing but with such options or a block mask.
    """
    return 96 if kernel.endswith("generic") else 200 if kernel.endswith("sm90") else 512


@dataclass(frozen=True)
class ForwardTile:
    """Sizes of the tensor-core forward kernel's tile; names as the kernel's constants."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    min_blocks: int


@dataclass(frozen=True)
class BackwardTile:
    """Sizes of the tensor-core backward kernel's tile; names as the kernel's constants.

    `warps_m` of the warps split the queries of a tile of scores, `query_warps` those of dq; the
    others split the keys, and the channels of dq.
    """

    block_m: int
    block_n: int
    warps: int
    warps_m: int
    query_warps: int
    stages: int
    min_blocks: int


# By the larger of head_dim and value_dim: tiles in order of preference; the first is taken of which
# a multiprocessor holds `min_blocks`. The first ones won on an H200 (benchmarks/NOTES.md), the
# others are for GPUs with less shared memory. `rich` is as in the tables above.
_F, _B = ForwardTile, BackwardTile
TENSOR_FORWARD: dict[str, Table[ForwardTile]] = {
    "half": (
        Entry(64, (_F(128, 128, 4, 2, 2), _F(128, 64, 4, 2, 2)),
              (_F(128, 64, 4, 2, 2), _F(128, 64, 4, 1, 2), _F(64, 32, 4, 1, 2),
               _F(64, 32, 4, 1, 1)),
              (_F(128, 128, 4, 2, 2), _F(64, 64, 2, 2, 4), _F(64, 64, 2, 2, 2))),
        Entry(128, (_F(128, 64, 4, 2, 2), _F(128, 64, 4, 1, 2), _F(64, 64, 4, 1, 2)),
              (_F(128, 64, 4, 2, 2), _F(128, 64, 4, 1, 2), _F(64, 32, 4, 1, 2),
               _F(64, 32, 4, 1, 1)),
              (_F(128, 64, 4, 2, 2), _F(64, 64, 2, 1, 4), _F(64, 64, 2, 1, 2))),
        Entry(256, (_F(64, 64, 4, 1, 2), _F(64, 32, 4, 1, 2), _F(64, 32, 4, 1, 1)),
              (_F(64, 64, 4, 1, 2), _F(64, 64, 4, 1, 1), _F(64, 32, 4, 1, 1))),
    ),
    "tf32": (
        Entry(64, (_F(128, 64, 4, 1, 2), _F(64, 64, 4, 1, 2)),
              (_F(64, 64, 4, 1, 2), _F(64, 32, 4, 1, 1))),
        Entry(128, (_F(128, 32, 4, 1, 2), _F(64, 32, 4, 1, 2), _F(64, 32, 4, 1, 1)),
              (_F(64, 64, 4, 1, 1), _F(64, 32, 4, 1, 1))),
        Entry(256, (_F(128, 32, 8, 1, 1), _F(64, 32, 4, 1, 1), _F(64, 16, 4, 1, 1)),
              (_F(64, 32, 4, 1, 1), _F(64, 16, 4, 1, 1))),
    ),
}  # fmt: skip
TENSOR_BACKWARD: dict[str, Table[BackwardTile]] = {
    "half": (
        Entry(64, (_B(32, 128, 4, 1, 2, 2, 2), _B(64, 64, 4, 2, 2, 1, 2)),
              (_B(64, 64, 4, 2, 2, 2, 2), _B(64, 64, 4, 2, 2, 1, 2), _B(32, 32, 4, 2, 2, 1, 2),
               _B(32, 32, 4, 2, 2, 1, 1)),
              (_B(32, 64, 2, 1, 1, 2, 4), _B(32, 64, 2, 1, 1, 2, 2))),
        Entry(128, (_B(64, 128, 8, 2, 2, 2, 1), _B(64, 128, 8, 2, 2, 1, 1),
                    _B(64, 64, 4, 2, 2, 1, 1)),
              (_B(64, 128, 8, 2, 2, 2, 1), _B(64, 128, 8, 2, 2, 1, 1), _B(64, 64, 4, 2, 2, 1, 1),
               _B(32, 32, 4, 2, 2, 1, 1)),
              (_B(64, 128, 8, 2, 2, 2, 1), _B(64, 64, 4, 2, 2, 1, 2), _B(64, 64, 4, 2, 2, 1, 1))),
        Entry(256, (_B(64, 64, 8, 4, 4, 2, 1), _B(64, 64, 8, 4, 4, 1, 1),
                    _B(32, 32, 4, 2, 2, 1, 1)),
              (_B(64, 64, 8, 4, 4, 2, 1), _B(64, 64, 8, 4, 4, 1, 1), _B(32, 32, 4, 2, 2, 1, 1))),
    ),
    "tf32": (
        Entry(64, (_B(64, 64, 4, 2, 2, 1, 2), _B(64, 64, 4, 2, 2, 1, 1)),
              (_B(64, 64, 4, 2, 2, 1, 1), _B(32, 32, 4, 2, 2, 1, 1))),
        Entry(128, (_B(64, 64, 8, 2, 2, 1, 1), _B(32, 32, 4, 2, 2, 1, 1)),
              (_B(64, 64, 8, 2, 2, 1, 1), _B(32, 32, 4, 2, 2, 1, 1))),
        Entry(256, (_B(32, 32, 4, 2, 2, 1, 1),), (_B(32, 32, 4, 2, 2, 1, 1),)),
    ),
}  # fmt: skip
# By attention_backward_query, which is built like the forward kernel.
TENSOR_QUERY: dict[str, Table[ForwardTile]] = {
    "half": (
        Entry(64, (_F(128, 64, 4, 2, 2), _F(64, 64, 4, 1, 2)),
              (_F(64, 64, 4, 1, 2), _F(64, 32, 4, 1, 1)),
              (_F(128, 64, 4, 2, 2), _F(64, 64, 4, 1, 2))),
        Entry(128, (_F(64, 64, 4, 2, 2), _F(64, 64, 4, 1, 2), _F(64, 64, 4, 1, 1)),
              (_F(64, 64, 4, 1, 2), _F(64, 64, 4, 1, 1), _F(64, 32, 4, 1, 1))),
        Entry(256, (_F(64, 32, 4, 1, 2), _F(64, 32, 4, 1, 1), _F(64, 16, 4, 1, 1)),
              (_F(64, 32, 4, 1, 1), _F(64, 16, 4, 1, 1))),
    ),
    "tf32": (
        Entry(64, (_F(64, 64, 4, 1, 2), _F(64, 64, 4, 1, 1)),
              (_F(64, 32, 4, 1, 2), _F(64, 32, 4, 1, 1))),
        Entry(128, (_F(64, 32, 4, 1, 2), _F(64, 32, 4, 1, 1)),
              (_F(64, 32, 4, 1, 1), _F(64, 16, 4, 1, 1))),
        Entry(256, (_F(64, 32, 4, 1, 1), _F(64, 16, 4, 1, 1)), (_F(64, 16, 4, 1, 1),)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class HopperTile:
    """Sizes of the Hopper forward kernel's tile; names as the kernel's constants.

    A warp group has 64 of the `block_m` queries.
    """

    block_m: int
    block_n: int
    stages: int
    query_buffers: int
    ping_pong: bool
    producer_registers: int
    consumer_registers: int


# By the larger of head_dim and value_dim; those that won on an H200 (benchmarks/NOTES.md). A tile
# of 256 or 192 queries reads each key less often; smaller ones waste less at diagonals and ends.
# The warp groups of a block share the registers that it starts with: 504 for 128 threads with two
# consumers and the producer, 512 with three, 480 with four.
_H = HopperTile
HOPPER_FORWARD: Table[HopperTile] = (
    Entry(64, (_H(256, 64, 4, 2, True, 32, 112),),
          (_H(128, 128, 2, 2, True, 56, 224), _H(128, 64, 2, 2, True, 56, 224)),
          (_H(128, 128, 2, 2, True, 40, 232),), (1024, 2048), (_H(192, 128, 2, 2, True, 32, 160),)),
    Entry(96, (_H(128, 128, 2, 2, True, 40, 232),),
          (_H(128, 128, 2, 2, True, 56, 224), _H(128, 64, 2, 2, True, 56, 224)), (),
          (1024, 1024), (_H(192, 112, 2, 2, True, 32, 160),)),
    Entry(128, (_H(128, 128, 2, 2, True, 40, 232),),
          (_H(128, 128, 2, 2, True, 56, 224), _H(128, 64, 2, 2, True, 56, 224)), (),
          (4096, 4096), (_H(192, 80, 2, 2, True, 56, 152),)),
    Entry(192, (_H(128, 80, 2, 2, True, 40, 232),),
          (_H(128, 64, 2, 2, True, 56, 224), _H(128, 64, 2, 1, True, 56, 224)),
          (_H(128, 64, 2, 2, True, 40, 232),), (2048, 2**62), (_H(128, 112, 2, 1, True, 40, 232),)),
    Entry(256, (_H(128, 64, 2, 1, True, 40, 232),), (_H(128, 64, 2, 1, True, 56, 224),), (),
          (1024, 4096), (_H(128, 80, 2, 1, True, 40, 232),)),
)  # fmt: skip
