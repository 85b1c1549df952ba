"""Plans of the tensor-core kernels, Hopper's among them, where one takes the problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from cuflash._device import Device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._plan_parts import (
    MAX_GRID,
    Constant,
    Plan,
    choices,
    features,
    grid,
    round_up,
    types,
    within,
)  # fmt: skip
from cuflash._problem import Problem
from cuflash._tiles import (
    HOPPER_FORWARD,
    TENSOR_BACKWARD,
    TENSOR_FORWARD,
    TENSOR_QUERY,
    AnyTile,
    BackwardTile,
    ForwardTile,
    HopperTile,
    Table,
)  # fmt: skip

PRODUCT_WIDTHS = (64, 80, 96, 112, 128, 160, 176, 192, 256)  # kernels/wgmma.cuh
_MOST = MAX_GRID - 1024  # rows, or tiles: the Hopper kernel counts in 32 bits, and a tile beyond


def hopper(problem: Problem, device: Device, vector: int) -> Plan | None:
    """The plan of the Hopper kernel, where it takes the problem."""
    is_half = ELEMENT_TYPES[problem.dtype].size == 2
    if device.arch != 90 or not is_half or not _in_chunks(problem, vector):
        return None
    tiles = choices(HOPPER_FORWARD, problem, max(problem.head_dim, problem.value_dim))
    if problem.blocks:
        tiles = tuple(tile for tile in tiles if within(tile, problem.blocks))
    plans = (_hopper_plan(problem, tile, device) for tile in tiles)
    return next((plan for plan in plans if plan), None)


def forward(problem: Problem, device: Device, vector: int) -> Plan | None:
    """The forward pass by mma.sync."""
    return _first_that_fits(TENSOR_FORWARD, problem, device, vector, _forward)


def backward(problem: Problem, device: Device, vector: int, add_dq: bool) -> Plan | None:
    """Dk and dv, and shares of dq if they are to be added."""
    return _first_that_fits(TENSOR_BACKWARD, problem, device, vector, partial(_backward, add_dq))


def backward_query(problem: Problem, device: Device, vector: int) -> Plan | None:
    """Dq in a fixed order."""
    return _first_that_fits(TENSOR_QUERY, problem, device, vector, _query)


def _first_that_fits(
    tables: dict[str, Table[AnyTile]], problem: Problem, device: Device, vector: int,
    plan_of: Callable[[Problem, AnyTile], Plan],
) -> Plan | None:  # fmt: skip
    """A tensor-core kernel's plan, where one takes the problem."""
    kind = "half" if ELEMENT_TYPES[problem.dtype].size == 2 else problem.precision
    if kind not in tables or device.arch < 80 or not _in_chunks(problem, vector):
        return None
    tiles = choices(tables[kind], problem, max(problem.head_dim, problem.value_dim))
    plans = (plan_of(problem, tile) for tile in tiles)
    return next((plan for plan in plans if _blocks_fit(plan, device)), None)


def _in_chunks(problem: Problem, vector: int) -> bool:
    """Whether rows are made of eight elements each, and memory accesses may take 16 bytes."""
    whole = problem.head_dim % 8 == 0 and problem.value_dim % 8 == 0
    return whole and vector * ELEMENT_TYPES[problem.dtype].size >= 16


def _blocks_fit(plan: Plan, device: Device) -> bool:
    """Whether shared memory holds MIN_BLOCKS blocks; CUDA takes 1 KiB of each."""
    blocks = int(plan.constant("MIN_BLOCKS"))
    return blocks * (plan.shared_bytes + 1024) <= device.shared_bytes + 1024


def _panels(rows: int, width: int, size: int) -> int:
    """Bytes of rows of `size`-byte values in panels of 128 bytes (kernels/mma.cuh)."""
    return round_up(width * size, 128) * rows


def _score_bytes(
    problem: Problem, tile: ForwardTile | BackwardTile | HopperTile
) -> tuple[int, int]:
    """Bytes of a tile of biases, and of the bits of its mask (kernels/mma_scores.cuh)."""
    size = ELEMENT_TYPES[problem.bias].size if problem.bias else 0
    mask = tile.block_m * -(-tile.block_n // 32) * 4 if problem.mask else 0
    return _panels(tile.block_m, tile.block_n, size), mask


def _plan_of(
    kernel: str, problem: Problem, tile: ForwardTile | BackwardTile | HopperTile, blocks: int,
    warps: int, shared: int, *constants: Constant,
) -> Plan:  # fmt: skip
    return Plan(
        kernel,
        (
            *types(problem),
            ("HEAD_DIM", problem.head_dim), ("VALUE_DIM", problem.value_dim),
            *((name.upper(), value) for name, value in asdict(tile).items()),
            *features(problem),
            # Below, the product of the scale and -inf could be NaN.
            ("POSITIVE_SCALE", problem.scale > 1e-30),
            *constants, ("SHARED_BYTES", shared),
        ),
        grid(blocks), warps * 32, shared,
    )  # fmt: skip


def _forward(problem: Problem, tile: ForwardTile) -> Plan:
    rows = (problem.head_dim,)
    return _over_rows("attention_forward", problem, tile, rows, ("HAS_SINKS", problem.sinks))


def _hopper_plan(problem: Problem, tile: HopperTile, device: Device) -> Plan | None:
    warps = tile.block_m // 16
    width = next(n for n in PRODUCT_WIDTHS if n >= problem.value_dim)
    stage = _panels(tile.block_n, problem.head_dim, 2) + _panels(tile.block_n, width, 2)
    queries = _panels(tile.block_m, problem.head_dim, 2)
    if tile.query_buffers > 1:  # outputs leave where queries came in
        queries = max(queries, _panels(tile.block_m, width, 2))
    bias, mask = _score_bytes(problem, tile)
    barriers = 2 * tile.query_buffers * tile.block_m // 64 + 4 * tile.stages + 4
    shared = tile.query_buffers * queries + tile.stages * stage + 8 * barriers + 2 * 24 + 1024
    sheets, sheet = 0, bias + mask
    if sheet:
        sheet += 16 + 2 * 8  # a block, and two barriers
        sheets = min(4, max(2, (device.shared_bytes - shared) // sheet))
        shared += sheets * sheet
    blocks = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    if max(blocks, problem.q_len, problem.kv_len) > _MOST or shared > device.shared_bytes:
        return None
    plan = _plan_of(
        "attention_forward_sm90", problem, tile, blocks, warps + 4, shared,
        ("WARPS", warps), ("WARPS_M", warps), ("PRODUCT_WIDTH", width),
        ("SHEETS", sheets), ("HAS_SINKS", problem.sinks),
    )  # fmt: skip
    return replace(plan, most_blocks=device.multiprocessors).over(blocks)


def _query(problem: Problem, tile: ForwardTile) -> Plan:
    rows = (problem.head_dim, problem.value_dim)
    return _over_rows("attention_backward_query", problem, tile, rows)


def _over_rows(
    kernel: str, problem: Problem, tile: ForwardTile, rows: tuple[int, ...], *constants: Constant
) -> Plan:
    """A kernel whose blocks keep rows of these widths and walk over keys and values."""
    size = ELEMENT_TYPES[problem.dtype].size
    bias, mask = _score_bytes(problem, tile)
    kept = sum(_panels(tile.block_m, width, size) for width in rows)
    widths = (problem.head_dim, problem.value_dim)
    stage = sum(_panels(tile.block_n, width, size) for width in widths) + bias
    blocks = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    shared = kept + tile.stages * stage + 2 * mask
    return _plan_of(
        kernel, problem, tile, blocks, tile.warps, shared, ("WARPS_M", tile.warps), *constants
    )


def _backward(add_dq: bool, problem: Problem, tile: BackwardTile) -> Plan:
    size = ELEMENT_TYPES[problem.dtype].size

    def both(rows: int) -> int:
        return _panels(rows, problem.head_dim, size) + _panels(rows, problem.value_dim, size)

    bias, mask = _score_bytes(problem, tile)
    scores = _panels(tile.block_m, tile.block_n, size)
    stage = both(tile.block_m) + scores + bias
    blocks = problem.batch * problem.kv_heads * -(-problem.kv_len // tile.block_n)
    return _plan_of(
        "attention_backward", problem, tile, blocks, tile.warps,
        both(tile.block_n) + scores + tile.stages * stage + 2 * mask, ("ADD_DQ", add_dq),
    )  # fmt: skip
