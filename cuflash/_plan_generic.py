"""Plans of the generic kernels: every problem on every GPU, without tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cuflash._device import Device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._plan_parts import Constant, Plan, choices, features, grid, round_up, types
from cuflash._problem import Problem
from cuflash._tiles import BACKWARD, FORWARD, Table, Tile


def forward(problem: Problem, device: Device, vector: int) -> Plan:
    """The forward pass."""
    tiles = _tiles(FORWARD, problem, problem.value_dim)
    return _fitting((_forward(problem, tile, vector) for tile in tiles), device)


def backward(problem: Problem, device: Device, vector: int, add_dq: bool) -> Plan:
    """Dk and dv, and shares of dq if they are to be added."""
    return _backward(problem, device, lambda tile: _keys(problem, tile, vector, add_dq))


def backward_query(problem: Problem, device: Device, vector: int) -> Plan:
    """Dq in a fixed order."""
    return _backward(problem, device, lambda tile: _query(problem, tile, vector))


def backward_bias(
    problem: Problem, device: Device, vector: int, shape: tuple[int, ...]
) -> Plan:
    """The gradient of a bias of this shape."""
    return _backward(problem, device, lambda tile: _bias(problem, tile, vector, shape))


class _SharedMemory:
    """Sizes of a tile in shared memory, in values; the kernels assert the same."""

    def __init__(self, problem: Problem, tile: Tile) -> None:
        self.lanes = 16 // ELEMENT_TYPES[problem.dtype].compute_size
        self.group = tile.threads_n * self.lanes
        self.tile = tile

    def rows_of(self, width: int) -> int:
        """Rows of a chunk of this width: a power of two that divides the tile."""
        rows = self.lanes
        while rows * 2 * width <= self.tile.chunk and rows * 2 <= min(16, self.tile.block_n):
            rows *= 2
        return rows

    def slice_of(self, width: int) -> int:
        return round_up(width, self.group * self.tile.slices) // self.tile.slices

    @property
    def scores(self) -> int:
        return self.tile.block_m * (self.tile.block_n + 2 * self.lanes)

    def score_ring(self, block_d: int) -> int:
        """One buffer of the products over rows that recompute scores."""
        return (self.tile.block_m + self.tile.block_n) * (block_d + self.lanes)


def _block_d(head_dim: int, greatest: int) -> int:
    """Columns of a chunk: a multiple of 8 that wastes least, the greatest of those."""
    sizes = range(greatest, 0, -8)
    return min(sizes, key=lambda size: (round_up(head_dim, size), -size))


def _tile_constants(problem: Problem, tile: Tile, vector: int) -> list[Constant]:
    return [
        *types(problem),
        ("HEAD_DIM", problem.head_dim),
        ("VALUE_DIM", problem.value_dim),
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("THREADS_M", tile.threads_m),
        ("THREADS_N", tile.threads_n),
        ("MIN_BLOCKS", tile.min_blocks),
        ("VECTOR", vector),
        *features(problem),
    ]


def _tiles(table: dict[str, Table[Tile]], problem: Problem, width: int) -> Iterator[Tile]:
    """The tiles to try, the last one ever smaller."""
    tiles = choices(table[ELEMENT_TYPES[problem.dtype].compute], problem, width)
    yield from tiles
    tile = tiles[-1]
    while tile.rows > 1:
        yield (tile := replace(tile, rows=tile.rows // 2))
    yield replace(tile, threads_m=tile.threads_m // 2)


def _fitting(plans: Iterator[Plan], device: Device) -> Plan:
    for plan in plans:
        if plan.shared_bytes <= device.shared_bytes:
            return plan
    raise RuntimeError(
        f"{device.name} has too little shared memory, {device.shared_bytes} bytes, for {plan}."
    )


def _tiled(
    kernel: str, problem: Problem, tile: Tile, vector: int, blocks: int, values: int,
    *constants: Constant,
) -> Plan:  # fmt: skip
    shared = values * ELEMENT_TYPES[problem.dtype].compute_size
    return Plan(
        kernel,
        (*_tile_constants(problem, tile, vector), *constants, ("SHARED_BYTES", shared)),
        grid(blocks), tile.threads_m * tile.threads_n, shared,
    )  # fmt: skip


def _forward(problem: Problem, tile: Tile, vector: int) -> Plan:
    memory = _SharedMemory(problem, tile)
    block_d = _block_d(problem.head_dim, tile.block_d)
    value_width = round_up(problem.value_dim, memory.group)
    block_k = memory.rows_of(value_width)
    query = tile.block_m * (round_up(problem.head_dim, block_d) + memory.lanes)
    ring = max(tile.block_n * (block_d + memory.lanes), block_k * value_width)
    blocks = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    return _tiled(
        "attention_forward_generic", problem, tile, vector, blocks,
        query + memory.scores + 2 * ring,
        ("BLOCK_D", block_d), ("BLOCK_K", block_k), ("HAS_SINKS", problem.sinks),
    )  # fmt: skip


def _keys(problem: Problem, tile: Tile, vector: int, add_dq: bool) -> Plan:
    memory = _SharedMemory(problem, tile)
    block_d = _block_d(max(problem.head_dim, problem.value_dim), tile.block_d)
    head_slice = memory.slice_of(problem.head_dim)
    widest = max(head_slice, memory.slice_of(problem.value_dim))
    dq_columns = next(
        width for width in range(min(64, head_slice), 0, -memory.group) if head_slice % width == 0
    )
    block_k = memory.rows_of(widest)
    tiles = -(-problem.kv_len // tile.block_n) * problem.batch * problem.kv_heads
    return _tiled(
        "attention_backward_generic", problem, tile, vector, tiles * tile.slices,
        2 * memory.scores + 2 * max(memory.score_ring(block_d), block_k * widest),
        ("BLOCK_D", block_d), ("BLOCK_K", block_k), ("SLICES", tile.slices),
        ("DQ_COLUMNS", dq_columns), ("ADD_DQ", add_dq),
    )  # fmt: skip


def _query(problem: Problem, tile: Tile, vector: int) -> Plan:
    memory = _SharedMemory(problem, tile)
    block_d = _block_d(max(problem.head_dim, problem.value_dim), tile.block_d)
    width = memory.slice_of(problem.head_dim)
    block_k = memory.rows_of(width)
    tiles = -(-problem.q_len // tile.block_m) * problem.batch * problem.q_heads
    return _tiled(
        "attention_backward_query_generic", problem, tile, vector, tiles * tile.slices,
        memory.scores + 2 * max(memory.score_ring(block_d), block_k * width),
        ("BLOCK_D", block_d), ("BLOCK_K", block_k), ("SLICES", tile.slices),
    )  # fmt: skip


def _bias(problem: Problem, tile: Tile, vector: int, shape: tuple[int, ...]) -> Plan:
    memory = _SharedMemory(problem, tile)
    block_d = _block_d(max(problem.head_dim, problem.value_dim), tile.block_d)
    batch, heads, queries, keys = shape
    tiles = batch * heads * -(-queries // tile.block_m) * -(-keys // tile.block_n)
    return _tiled(
        "attention_backward_bias_generic", problem, tile, vector, tiles,
        memory.scores + 2 * memory.score_ring(block_d),
        ("BLOCK_D", block_d), ("BLOCK_K", memory.lanes),
    )  # fmt: skip


def _backward(problem: Problem, device: Device, plan_of: Callable[[Tile], Plan]) -> Plan:
    tiles = _tiles(BACKWARD, problem, max(problem.head_dim, problem.value_dim))
    return _fitting(map(plan_of, tiles), device)
