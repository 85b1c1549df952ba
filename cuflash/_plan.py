"""How a GPU does a problem: kernel, tiles, grid and shared memory, as a pure function of integers.

Everything that is chosen is chosen here, tiles from the tables of ``_tiles``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

from cuflash._device import Device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._problem import Problem
from cuflash._tiles import (
    BACKWARD,
    FORWARD,
    HOPPER_FORWARD,
    TENSOR_BACKWARD,
    TENSOR_FORWARD,
    TENSOR_QUERY,
    AnyTile,
    BackwardTile,
    ForwardTile,
    HopperTile,
    Sized,
    Table,
    Tile,
)
from cuflash._values import HashedOnce

_COMBINES = {
    "attention_forward": "combine_outputs", "attention_forward_sm90": "combine_outputs",
    "attention_backward": "combine_gradients",
    "attention_backward_query": "combine_gradients",
}  # fmt: skip
Constant = tuple[str, int | bool | str]
Constants = tuple[Constant, ...]

MAX_GRID = 2**31 - 1
_PRODUCT_WIDTHS = (64, 80, 96, 112, 128, 160, 176, 192, 256)  # kernels/wgmma.cuh
_MOST = MAX_GRID - 1024  # rows, or tiles: the Hopper kernel counts in 32 bits, and a tile beyond


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
    def has_blocks(self) -> bool:
        """Whether the kernel walks over the lists of a block mask."""
        return ("HAS_BLOCKS", True) in self.constants


def _round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


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
        return _round_up(width, self.group * self.tile.slices) // self.tile.slices

    @property
    def scores(self) -> int:
        return self.tile.block_m * (self.tile.block_n + 2 * self.lanes)

    def score_ring(self, block_d: int) -> int:
        """One buffer of the products over rows that recompute scores."""
        return (self.tile.block_m + self.tile.block_n) * (block_d + self.lanes)


def _block_d(head_dim: int, greatest: int) -> int:
    """Columns of a chunk: a multiple of 8 that wastes least, the greatest of those."""
    sizes = range(greatest, 0, -8)
    return min(sizes, key=lambda size: (_round_up(head_dim, size), -size))


def _features(problem: Problem) -> list[Constant]:
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


def _types(problem: Problem) -> list[Constant]:
    element = ELEMENT_TYPES[problem.dtype]
    return [
        ("Element", element.name),
        ("Compute", element.compute),
        ("BiasElement", problem.bias or element.compute),
    ]


def _tile_constants(problem: Problem, tile: Tile, vector: int) -> list[Constant]:
    return [
        *_types(problem),
        ("HEAD_DIM", problem.head_dim),
        ("VALUE_DIM", problem.value_dim),
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("THREADS_M", tile.threads_m),
        ("THREADS_N", tile.threads_n),
        ("MIN_BLOCKS", tile.min_blocks),
        ("VECTOR", vector),
        *_features(problem),
    ]


def _choices(table: Table[AnyTile], problem: Problem, width: int) -> tuple[AnyTile, ...]:
    """The table's tiles for a problem; none where it is too wide."""
    rich = any(value for name, value in _features(problem)[2:] if name != "HAS_BLOCKS")
    entry = next((entry for entry in table if width <= entry.width), None)
    if entry is None:
        return ()
    tiles = entry.rich if rich else entry.plain
    if problem.blocks is None:
        is_long = problem.kv_len > entry.many[problem.band != (None, None)]
        return (*entry.long, *tiles) if is_long and not rich else tiles
    blocks, tiles = problem.blocks, (*tiles[:rich], *entry.sparse, *tiles[rich:])
    return tuple(sorted(tiles, key=lambda tile: not _within(tile, blocks)))


def _within(tile: Sized, blocks: tuple[int, int, int, int]) -> bool:
    """Whether a tile is no larger than the blocks of a mask; those below 64 count as 64."""
    return tile.block_m <= max(blocks[2], 64) and tile.block_n <= max(blocks[3], 64)


def _tiles(table: dict[str, Table[Tile]], problem: Problem, width: int) -> Iterator[Tile]:
    """The tiles to try, the last one ever smaller."""
    tiles = _choices(table[ELEMENT_TYPES[problem.dtype].compute], problem, width)
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


def grid(blocks: int) -> int:
    """So many blocks, or as many as CUDA takes: kernels loop over the rest."""
    return min(blocks, MAX_GRID)


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


@lru_cache(maxsize=4096)
def forward(problem: Problem, device: Device, vector: int, mapped: bool = True) -> Plan:
    """The forward pass.

    Parameters
    ----------
    problem : Problem
    device : Device
    vector : int
        Elements that one memory access may take, as far as the arrays' alignment goes.
    mapped : bool
        Whether the copy engine takes the arrays' strides; see :class:`cuflash._params.Packed`.
    """
    if mapped:
        hopper = _hopper(problem, device, vector)
        if hopper is not None:
            return hopper
    tensor = _tensor(TENSOR_FORWARD, problem, device, vector, _forward_tensor)
    if tensor is not None:
        return tensor
    tiles = _tiles(FORWARD, problem, problem.value_dim)
    return _fitting((_forward_generic(problem, tile, vector) for tile in tiles), device)


def _forward_generic(problem: Problem, tile: Tile, vector: int) -> Plan:
    memory = _SharedMemory(problem, tile)
    block_d = _block_d(problem.head_dim, tile.block_d)
    value_width = _round_up(problem.value_dim, memory.group)
    block_k = memory.rows_of(value_width)
    query = tile.block_m * (_round_up(problem.head_dim, block_d) + memory.lanes)
    ring = max(tile.block_n * (block_d + memory.lanes), block_k * value_width)
    blocks = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    return _tiled(
        "attention_forward_generic", problem, tile, vector, blocks,
        query + memory.scores + 2 * ring,
        ("BLOCK_D", block_d), ("BLOCK_K", block_k), ("HAS_SINKS", problem.sinks),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def backward(
    problem: Problem, device: Device, vector: int, deterministic: bool,
    bias_shape: tuple[int, ...] | None,
) -> tuple[Plan, ...]:  # fmt: skip
    """The launches of the backward pass, in order.

    Parameters
    ----------
    problem : Problem
    device : Device
    vector : int
        As in :func:`forward`.
    deterministic : bool
        Whether dq has a kernel of its own, with a fixed order of summation.
    bias_shape : tuple of four int, optional
        Shape of the bias, where its gradient is asked for.
    """
    def tiled(plan_of: Callable[[Tile], Plan]) -> Plan:
        tiles = _tiles(BACKWARD, problem, max(problem.head_dim, problem.value_dim))
        return _fitting(map(plan_of, tiles), device)

    keys = _tensor(
        TENSOR_BACKWARD, problem, device, vector, partial(_backward_tensor, not deterministic)
    )
    if keys is None:
        keys = tiled(lambda tile: _backward_keys(problem, tile, vector, not deterministic))
    plans = [_prepare(problem, vector), keys]
    if deterministic:
        query = _tensor(TENSOR_QUERY, problem, device, vector, _query_tensor)
        plans.append(query or tiled(lambda tile: _backward_query(problem, tile, vector)))
    elif keys.kernel == "attention_backward":
        plans.append(_convert_fragments(problem, keys))
    elif not problem.sums_are_dq:
        plans.append(_convert(problem))
    if bias_shape is not None:
        plans.append(tiled(lambda tile: _backward_bias(problem, tile, vector, bias_shape)))
    if problem.sinks:
        plans.append(_flat("attention_backward_sinks", problem, problem.q_heads * 256, ()))
    return tuple(plans)


def _flat(kernel: str, problem: Problem, threads: int, constants: Constants) -> Plan:
    """A kernel of 256 threads a block without tiles, for so many threads."""
    named = (*_types(problem), *constants, ("THREADS", 256))
    return Plan(kernel, named, grid(-(-threads // 256)), 256)


def _prepare(problem: Problem, vector: int) -> Plan:
    chunks = problem.value_dim // vector
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= min(chunks, 32))
    constants = (("VALUE_DIM", problem.value_dim), ("VECTOR", vector), ("LANES", lanes))
    threads = math.prod(problem.lse_shape) * lanes
    return _flat("attention_backward_prepare", problem, threads, constants)


def _convert(problem: Problem) -> Plan:
    values = problem.batch * problem.q_len * problem.q_heads * problem.head_dim
    return _flat("convert_dq", problem, values, (("HEAD_DIM", problem.head_dim),))


def _convert_fragments(problem: Problem, keys: Plan) -> Plan:
    warps = problem.batch * problem.q_heads * -(-problem.q_len // 16)
    tile = [(name, keys.constant(name)) for name in ("BLOCK_M", "BLOCK_N")]  # of block lists
    constants = (
        ("HEAD_DIM", problem.head_dim), ("VALUE_DIM", problem.value_dim), *tile, *_features(problem)
    )
    return _flat("convert_dq_fragments", problem, warps * 32, constants)


def combine(plan: Plan, rows: int) -> Plan | None:
    """The kernel that puts partial results of so many split rows of tiles together."""
    kernel = _COMBINES.get(plan.kernel)
    if kernel is None:
        return None
    by_keys = plan.kernel == "attention_backward"
    warps = rows * int(plan.constant("BLOCK_N" if by_keys else "BLOCK_M"))
    constants = (*plan.constants, ("OF_KEYS", by_keys))
    threads = 32 * int(plan.constant("WARPS"))
    return Plan(kernel, constants, grid(-(-warps * 32 // threads)), threads)


def partial_sizes(plan: Plan) -> tuple[int, int]:
    """Numbers in a partial result of a tensor-core kernel: values, and lse."""
    block_m, block_n, head_dim, value_dim = (
        int(plan.constant(name)) for name in ("BLOCK_M", "BLOCK_N", "HEAD_DIM", "VALUE_DIM")
    )
    if plan.kernel.startswith("attention_forward"):
        return block_m * value_dim, block_m
    if plan.kernel == "attention_backward":
        return block_n * (head_dim + value_dim), 0
    return block_m * head_dim, 0


def dropout_mask(problem: Problem) -> Plan:
    """The kernel that writes the keep mask."""
    return _flat("dropout_mask", problem, math.prod(problem.score_shape), ())


def _backward_keys(problem: Problem, tile: Tile, vector: int, add_dq: bool) -> Plan:
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


def _backward_query(problem: Problem, tile: Tile, vector: int) -> Plan:
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


def _backward_bias(problem: Problem, tile: Tile, vector: int, shape: tuple[int, ...]) -> Plan:
    memory = _SharedMemory(problem, tile)
    block_d = _block_d(max(problem.head_dim, problem.value_dim), tile.block_d)
    batch, heads, queries, keys = shape
    tiles = batch * heads * -(-queries // tile.block_m) * -(-keys // tile.block_n)
    return _tiled(
        "attention_backward_bias_generic", problem, tile, vector, tiles,
        memory.scores + 2 * memory.score_ring(block_d),
        ("BLOCK_D", block_d), ("BLOCK_K", memory.lanes),
    )  # fmt: skip


def _tensor(
    tables: dict[str, Table[AnyTile]], problem: Problem, device: Device, vector: int,
    plan_of: Callable[[Problem, AnyTile], Plan],
) -> Plan | None:  # fmt: skip
    """A tensor-core kernel's plan, where one takes the problem."""
    element = ELEMENT_TYPES[problem.dtype]
    kind = "half" if element.size == 2 else problem.precision
    whole = problem.head_dim % 8 == 0 and problem.value_dim % 8 == 0
    if kind not in tables or device.arch < 80 or not whole or vector * element.size < 16:
        return None
    tiles = _choices(tables[kind], problem, max(problem.head_dim, problem.value_dim))
    plans = (plan_of(problem, tile) for tile in tiles)
    return next((plan for plan in plans if _blocks_fit(plan, device)), None)


def _blocks_fit(plan: Plan, device: Device) -> bool:
    """Whether shared memory holds MIN_BLOCKS blocks; CUDA takes 1 KiB of each."""
    blocks = int(plan.constant("MIN_BLOCKS"))
    return blocks * (plan.shared_bytes + 1024) <= device.shared_bytes + 1024


def _panels(rows: int, width: int, size: int) -> int:
    """Bytes of rows of `size`-byte values in panels of 128 bytes (kernels/mma.cuh)."""
    return _round_up(width * size, 128) * rows


def _score_bytes(problem: Problem, tile: ForwardTile | BackwardTile) -> tuple[int, int]:
    """Bytes of a tile of biases, and of the bits of two masks (kernels/mma_scores.cuh)."""
    size = ELEMENT_TYPES[problem.bias].size if problem.bias else 0
    mask = 2 * tile.block_m * -(-tile.block_n // 32) * 4 if problem.mask else 0
    return _panels(tile.block_m, tile.block_n, size), mask


def _tensor_plan(
    kernel: str, problem: Problem, tile: ForwardTile | BackwardTile | HopperTile, blocks: int,
    warps: int, shared: int, *constants: Constant,
) -> Plan:  # fmt: skip
    return Plan(
        kernel,
        (
            *_types(problem),
            ("HEAD_DIM", problem.head_dim), ("VALUE_DIM", problem.value_dim),
            *((name.upper(), value) for name, value in asdict(tile).items()),
            *_features(problem),
            # Below, the product of the scale and -inf could be NaN.
            ("POSITIVE_SCALE", problem.scale > 1e-30),
            *constants, ("SHARED_BYTES", shared),
        ),
        grid(blocks), warps * 32, shared,
    )  # fmt: skip


def _forward_tensor(problem: Problem, tile: ForwardTile) -> Plan:
    rows = (problem.head_dim,)
    return _tensor_rows("attention_forward", problem, tile, rows, ("HAS_SINKS", problem.sinks))


def _hopper(problem: Problem, device: Device, vector: int) -> Plan | None:
    """The plan of the Hopper kernel, where it takes the problem."""
    element = ELEMENT_TYPES[problem.dtype]
    whole = problem.head_dim % 8 == 0 and problem.value_dim % 8 == 0
    if device.arch != 90 or element.size != 2 or not whole or vector < 8:
        return None
    if problem.mask or problem.bias:
        return None
    tiles = _choices(HOPPER_FORWARD, problem, max(problem.head_dim, problem.value_dim))
    if not tiles or (problem.blocks and not _within(tiles[0], problem.blocks)):
        return None
    return _forward_hopper(problem, tiles[0], device)


def _forward_hopper(problem: Problem, tile: HopperTile, device: Device) -> Plan | None:
    warps = tile.block_m // 16
    width = next(n for n in _PRODUCT_WIDTHS if n >= problem.value_dim)
    stage = _panels(tile.block_n, problem.head_dim, 2) + _panels(tile.block_n, width, 2)
    queries = _panels(tile.block_m, problem.head_dim, 2)
    if tile.query_buffers > 1:  # outputs leave where queries came in
        queries = max(queries, _panels(tile.block_m, width, 2))
    barriers = 2 * tile.query_buffers * tile.block_m // 64 + 4 * tile.stages + 4
    shared = tile.query_buffers * queries + tile.stages * stage + 8 * barriers + 2 * 24 + 1024
    blocks = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    if max(blocks, problem.q_len, problem.kv_len) > _MOST:
        return None
    plan = _tensor_plan(
        "attention_forward_sm90", problem, tile, blocks, warps + 4, shared,
        ("WARPS", warps), ("WARPS_M", warps), ("PRODUCT_WIDTH", width),
        ("HAS_SINKS", problem.sinks),
    )  # fmt: skip
    return replace(plan, most_blocks=device.multiprocessors).over(blocks)


def _query_tensor(problem: Problem, tile: ForwardTile) -> Plan:
    rows = (problem.head_dim, problem.value_dim)
    return _tensor_rows("attention_backward_query", problem, tile, rows)


def _tensor_rows(
    kernel: str, problem: Problem, tile: ForwardTile, rows: tuple[int, ...], *constants: Constant
) -> Plan:
    """A kernel whose blocks keep rows of these widths and walk over keys and values."""
    size = ELEMENT_TYPES[problem.dtype].size
    bias, mask = _score_bytes(problem, tile)
    kept = sum(_panels(tile.block_m, width, size) for width in rows)
    widths = (problem.head_dim, problem.value_dim)
    stage = sum(_panels(tile.block_n, width, size) for width in widths) + bias
    blocks = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    shared = kept + tile.stages * stage + mask
    return _tensor_plan(
        kernel, problem, tile, blocks, tile.warps, shared, ("WARPS_M", tile.warps), *constants
    )


def _backward_tensor(add_dq: bool, problem: Problem, tile: BackwardTile) -> Plan:
    size = ELEMENT_TYPES[problem.dtype].size

    def both(rows: int) -> int:
        return _panels(rows, problem.head_dim, size) + _panels(rows, problem.value_dim, size)

    bias, mask = _score_bytes(problem, tile)
    scores = _panels(tile.block_m, tile.block_n, size)
    stage = both(tile.block_m) + scores + bias
    blocks = problem.batch * problem.kv_heads * -(-problem.kv_len // tile.block_n)
    return _tensor_plan(
        "attention_backward", problem, tile, blocks, tile.warps,
        both(tile.block_n) + scores + tile.stages * stage + mask, ("ADD_DQ", add_dq),
    )  # fmt: skip
