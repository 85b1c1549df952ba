"""What every plan is made of: a launch, the constants of a problem, the choice among tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash._dtypes import ELEMENT_TYPES
from cuflash._problem import Problem
from cuflash._tiles import AnyTile, Sized, Table
from cuflash._values import HashedOnce

Constant = tuple[str, int | bool | str]
Constants = tuple[Constant, ...]
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Plan(HashedOnce):
    """One kernel launch.

    Attributes
    ----------
    kernel : str
        Name of the kernel and of its file in ``kernels/``.
    constants : tuple of (str, value)
        Leading ``constexpr`` lines of the source.
    grid, threads : int
        Blocks, and threads of each. No blocks: there is nothing to launch.
    shared_bytes : int
        Dynamic shared memory of each block.
    most_blocks : int
        No grid of the kernel has more: what CUDA takes or, where blocks stay until all is done, as
        many as the GPU holds.
    """

    kernel: str
    constants: Constants
    grid: int
    threads: int
    shared_bytes: int = 0
    most_blocks: int = MAX_GRID

    __hash__ = HashedOnce.__hash__

    def constant(self, name: str) -> int | bool | str:
        """The value of one constant."""
        return dict(self.constants)[name]

    def over(self, blocks: int) -> Plan:
        """The same for so many blocks, or as many as there may be: kernels loop over the rest."""
        return replace(self, grid=min(blocks, self.most_blocks))

    @property
    def for_hopper(self) -> bool:
        """Whether it is for sm_90a alone and takes tensors by maps (kernels/mma_sm90.cuh)."""
        return self.kernel.endswith("_sm90")

    @property
    def has_blocks(self) -> bool:
        """Whether the kernel walks over the lists of a block mask."""
        return ("HAS_BLOCKS", True) in self.constants


def round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def features(problem: Problem) -> list[Constant]:
    left, right = problem.band
    return [
        ("HAS_LEFT", left is not None),
        ("HAS_RIGHT", right is not None),
        ("HAS_MASK", problem.mask),
        ("HAS_BLOCKS", problem.blocks is not None),
        ("HAS_BIAS", problem.bias is not None),
        ("HAS_ALIBI", problem.alibi),
        ("HAS_SOFTCAP", problem.softcap is not None),
        ("HAS_DROPOUT", problem.dropout > 0),
    ]


def types(problem: Problem) -> list[Constant]:
    element = ELEMENT_TYPES[problem.dtype]
    return [
        ("Element", element.name),
        ("Compute", element.compute),
        ("BiasElement", problem.bias or element.compute),
    ]


def choices(table: Table[AnyTile], problem: Problem, width: int) -> tuple[AnyTile, ...]:
    """The table's tiles for a problem; none where it is too wide."""
    rich = any(value for name, value in features(problem)[2:] if name != "HAS_BLOCKS")
    entry = next((entry for entry in table if width <= entry.width), None)
    if entry is None:
        return ()
    tiles = entry.rich if rich else entry.plain
    if problem.blocks is None:
        is_long = problem.kv_len > entry.many[problem.band != (None, None)]
        return (*entry.long, *tiles) if is_long and not rich else tiles
    blocks, tiles = problem.blocks, (*tiles[:rich], *entry.sparse, *tiles[rich:])
    return tuple(sorted(tiles, key=lambda tile: not within(tile, blocks)))


def within(tile: Sized, blocks: tuple[int, int, int, int]) -> bool:
    """Whether a tile is no larger than the blocks of a mask; those below 64 count as 64."""
    return tile.block_m <= max(blocks[2], 64) and tile.block_n <= max(blocks[3], 64)


def grid(blocks: int) -> int:
    """So many blocks, or as many as CUDA takes: kernels loop over the rest."""
    return min(blocks, MAX_GRID)
