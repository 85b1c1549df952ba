"""Plans are integers: which kernels take a problem, and whether their tiles fit."""

import numpy as np
import pytest
from arrays import DTYPES

from cuflash import _plan, _tiles
from cuflash._device import Device
from cuflash._problem import describe

WITH_TENSOR_CORES = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
WIDTHS = range(8, 257, 8)
ON_TENSOR_CORES = {"attention_forward", "attention_backward_prepare", "attention_backward",
                   "attention_backward_query", "convert_dq_fragments"}  # fmt: skip
EXTRAS = {
    "plain": {},
    "mask": {"mask": "bool"},
    "bias": {"bias": "float16"},
    "float32 bias": {"bias": "float32"},
    "float64 bias": {"bias": "float64"},
    "mask and float32 bias": {"mask": "bool", "bias": "float32"},
}


def plans(arch, head_dim, value_dim, extras=EXTRAS["plain"], dtype="float16", vector=8, **options):
    """Return the plans of the forward pass, and of the backward pass with both ways to make dq.

    `block_size` is that of a block mask. The strides are such as the Hopper kernel does not take.
    """
    if "block_size" in options:
        options["blocks"] = ((2, 1, 300, 300), options.pop("block_size"))
    q, v = (((2, 300, 4, width), DTYPES[dtype]) for width in (head_dim, value_dim))
    arrays = {name: ((300, 300), np.dtype(kind)) for name, kind in extras.items()}
    problem, device = describe(q, q, v, **arrays, **options), Device.of_arch(arch)
    found = [_plan.forward(problem, device, vector, mapped=False)]
    for deterministic in (False, True):
        found += _plan.backward(problem, device, vector, deterministic, None)
    assert all(plan.shared_bytes <= device.shared_bytes for plan in found)
    return found


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("arch", WITH_TENSOR_CORES)
def test_every_half_problem_of_whole_chunks_goes_to_tensor_cores(arch, extras):
    for width in WIDTHS:
        for value_dim in {8, width, 256}:
            found = plans(arch, width, value_dim, EXTRAS[extras])
            assert {plan.kernel for plan in found} == ON_TENSOR_CORES, (width, value_dim)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("arch", WITH_TENSOR_CORES)
def test_tf32_goes_to_tensor_cores(arch, extras):
    """Widths beyond 128 only where shared memory is large."""
    widths = WIDTHS if Device.of_arch(arch).shared_bytes > 200_000 else range(8, 129, 8)
    for width in widths:
        for value_dim in {8, width, widths[-1]}:
            found = plans(arch, width, value_dim, EXTRAS[extras], "float32", 4, precision="tf32")
            assert {plan.kernel for plan in found} == ON_TENSOR_CORES, (width, value_dim)


@pytest.mark.parametrize("more", [
    {"arch": 75}, {"vector": 4}, {"head_dim": 60, "vector": 4}, {"head_dim": 264},
    {"value_dim": 512}, {"dtype": "float32", "vector": 4},
    {"dtype": "float32", "vector": 2, "precision": "tf32"},
    {"dtype": "float32", "vector": 4, "precision": "tf32", "head_dim": 36},
    {"dtype": "float64", "vector": 2, "precision": "tf32"},
], ids=str)  # fmt: skip
def test_what_goes_to_generic_kernels(more):
    found = plans(**{"arch": 90, "head_dim": 64, "value_dim": 64} | more)
    assert {plan.kernel for plan in found} & ON_TENSOR_CORES == {"attention_backward_prepare"}


def sizes_of_tiles(head_dim, block_size, arch=90, **more):
    """Return the sides of the tiles of the kernels that make the output, dk and dv, and dq."""
    found = plans(arch, head_dim, head_dim, block_size=block_size, **more)
    large = [plan for plan in found if "BLOCK_M" in dict(plan.constants)]
    kernels = ("attention_forward", "attention_backward", "attention_backward_query")
    return [
        next((plan.constant("BLOCK_M"), plan.constant("BLOCK_N")) for plan in large
             if plan.kernel.removesuffix("_generic") == kernel)
        for kernel in kernels
    ]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "block_size", "right"), [
    (64, (128, 128), [(128, 128), (32, 64), (128, 64)]),
    (64, (256, 128), [(128, 128), (32, 64), (128, 64)]),
    (64, (64, 64), [(64, 64), (32, 64), (64, 64)]),
    (64, (16, 16), [(64, 64), (32, 64), (64, 64)]),
    (64, (64, 128), [(64, 64), (32, 64), (64, 64)]),
    (64, (128, 64), [(64, 64), (32, 64), (128, 64)]),
    (64, (112, 128), [(64, 64), (32, 64), (64, 64)]),
    (128, (128, 128), [(128, 64), (64, 128), (64, 64)]),
    (128, (16, 64), [(64, 64), (64, 64), (64, 64)]),
    (256, (16, 16), [(64, 64), (64, 64), (64, 32)]),  # has no small tiles
])  # fmt: skip
def test_small_blocks_take_small_tiles(head_dim, block_size, right):
    assert sizes_of_tiles(head_dim, block_size) == right


def test_large_blocks_change_nothing_else():
    """A block mask is no reason for the tiles of rich scores."""
    for arch in (90, 100):  # with room for the first tiles
        for width in (64, 128, 256):
            plain = plans(arch, width, width)[0]
            masked = plans(arch, width, width, block_size=(256, 256))[0]
            changed = set(plain.constants) ^ set(masked.constants)
            assert {name for name, _ in changed} == {"HAS_BLOCKS"} and masked.has_blocks
            assert plain.shared_bytes == masked.shared_bytes


@pytest.mark.parametrize("block_size", [(16, 16), (48, 80), (64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("arch", [75, *WITH_TENSOR_CORES])
def test_lists_can_be_made_for_all_tiles(arch, block_size):
    """Whatever is the width, the type and the option: BlockMask.lists takes their sides."""
    for width in (*range(8, 257, 24), 512):
        for more in ({}, {"dtype": "float32", "vector": 4},
                     {"dtype": "float32", "vector": 4, "precision": "tf32"},
                     {"dtype": "float64", "vector": 2}):  # fmt: skip
            for extras in ("plain", "float32 bias"):
                found = plans(arch, width, width, EXTRAS[extras], block_size=block_size, **more)
                for plan in found:
                    if plan.has_blocks:
                        assert plan.constant("BLOCK_M") in (8, 16, 32, 64, 128, 256), plan
                        assert plan.constant("BLOCK_N") in (16, 32, 64, 128, 256), plan


def tiles():
    """Return the tensor-core tiles, as (kind of element, tile)."""
    tables = _tiles.TENSOR_FORWARD, _tiles.TENSOR_BACKWARD, _tiles.TENSOR_QUERY
    return sorted({
        (kind, tile) for table in tables for kind, entries in table.items()
        for entry in entries for tile in entry.plain + entry.rich + entry.sparse
    }, key=str)  # fmt: skip


@pytest.mark.parametrize(("kind", "tile"), tiles(), ids=str)
def test_warps_share_a_tile_evenly(kind, tile):
    """What the kernels assert when they are compiled, for all head sizes."""
    along = getattr(tile, "warps_m", tile.warps)
    across = tile.warps // along
    assert tile.warps == along * across and tile.warps % 2 == 0
    assert tile.block_m % (16 * along) == tile.block_n % (16 * across) == 0
    assert tile.block_m // along * (tile.block_n // across) <= 32 * 256  # calls of Philox
    if isinstance(tile, _tiles.BackwardTile):
        pieces = tile.block_n // across // 8
        assert pieces & (pieces - 1) == 0
        assert tile.block_m % (16 * tile.query_warps) == tile.warps % tile.query_warps == 0
        # Columns are shared in steps of 16, and stay within panels of 128 bytes.
        assert {"half": 4, "tf32": 2}[kind] % along == 0
        assert 4 % (tile.warps // tile.query_warps) == 0
