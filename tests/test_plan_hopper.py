"""Which problems the Hopper kernel takes, and with which tiles."""

import dataclasses
import re

import numpy as np
import pytest
from arrays import DTYPES
from forwards import HOPPER, PORTABLE

from cuflash import _plan, _plan_tensor, _source
from cuflash._device import Device
from cuflash._problem import describe
from cuflash._tiles import HOPPER_FORWARD

TILES = sorted(
    {tile for entry in HOPPER_FORWARD
     for tile in entry.plain + entry.long + entry.rich + entry.sparse},
    key=dataclasses.astuple,
)  # fmt: skip
FEW, MANY = 300, 50_000


def plan(
    head_dim=64, value_dim=None, kv_len=FEW, arch=90, dtype="float16", vector=8, mapped=True,
    heads=4, **options,
):  # fmt: skip
    """Return the plan of the forward pass."""
    value_dim = value_dim or head_dim
    rows = (((2, length, heads, width), DTYPES[dtype]) for length, width in (
        (300, head_dim), (kv_len, head_dim), (kv_len, value_dim),
    ))  # fmt: skip
    device = Device.of_arch(arch)
    found = _plan.forward(describe(*rows, **options), device, vector, mapped)
    assert found.shared_bytes <= device.shared_bytes
    return found


@pytest.mark.parametrize("kv_len", [FEW, MANY])
@pytest.mark.parametrize("block_size", [None, (128, 128), (256, 512)])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (9, 9)}, {"softcap": 9.0}, {"dropout": 0.1},
    {"bias": ((300, 1), np.dtype("float16"))},
], ids=str)  # fmt: skip
def test_every_half_problem_of_whole_chunks(options, block_size, kv_len):
    """Tiles under block masks have sides that lists can have."""
    if block_size is not None:
        options = options | {"blocks": ((1, 1, 300, kv_len), block_size)}
    for width in range(8, 257, 8):
        for value_dim in {8, width, 256}:
            for dtype in ("float16", "bfloat16"):
                found = plan(width, value_dim, kv_len, dtype=dtype, **options)
                assert found.kernel == HOPPER
                if block_size is not None:
                    assert {found.constant("BLOCK_M"), found.constant("BLOCK_N")} <= {64, 128, 256}


@pytest.mark.parametrize("more", [
    {"arch": 80}, {"arch": 89}, {"arch": 100}, {"arch": 120}, {"mapped": False},
    {"head_dim": 256, "bias": ((300, FEW), np.dtype("float32"))},  # shared memory is full
    {"dtype": "float32", "precision": "tf32", "vector": 4},
    {"blocks": ((1, 1, 300, FEW), (64, 64))}, {"blocks": ((1, 1, 300, FEW), (128, 48))},
    {"kv_len": 2**31, "head_dim": 8}, {"kv_len": 2**33}, {"heads": 2**30},
], ids=str)  # fmt: skip
def test_what_the_portable_kernel_takes(more):
    assert plan(**more).kernel == PORTABLE


@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}], ids=str)
@pytest.mark.parametrize("block_size", [
    (64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256), (256, 256),
])  # fmt: skip
def test_blocks_no_smaller_than_a_tile(block_size, options):
    """They go to the Hopper kernel if it has a tile that fits in them and that lists can have."""
    for entry in HOPPER_FORWARD:
        sides = {
            (tile.block_m, tile.block_n)
            for tile in entry.sparse + (entry.rich if options else entry.plain)
        }
        fitting = {side for side in sides if {*side} <= {64, 128, 256} and
                   side[0] <= block_size[0] and side[1] <= block_size[1]}  # fmt: skip
        found = plan(entry.width, blocks=((1, 1, 300, FEW), block_size), **options)
        side = found.constant("BLOCK_M"), found.constant("BLOCK_N")
        assert side in fitting if found.kernel == HOPPER else not fitting


@pytest.mark.parametrize("more", [
    {"vector": 4}, {"head_dim": 60}, {"value_dim": 60}, {"head_dim": 264}, {"dtype": "float32"},
], ids=str)  # fmt: skip
def test_what_goes_to_the_generic_kernel(more):
    assert plan(**more).kernel == "attention_forward_generic"


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_registers_of_all_warp_groups(tile):
    """A block starts with as many for each thread, a multiple of 8; groups then share them anew."""
    groups = tile.block_m // 64
    start = 65536 // (128 * (groups + 1)) // 8 * 8
    wanted = tile.producer_registers + groups * tile.consumer_registers
    assert tile.block_m % 64 == 0 and wanted <= start * (groups + 1)
    for registers in (tile.producer_registers, tile.consumer_registers):
        assert registers % 8 == 0 and 24 <= registers <= 240
    assert tile.producer_registers < start < tile.consumer_registers or groups == 1


def test_products_of_all_widths():
    """Tiles of keys, and all widths of values, are among those of kernels/wgmma.cuh."""
    text = (_source.folder() / "wgmma.cuh").read_text()
    found = set(re.findall(r"^WGMMA\((\w+), \"\w+\", (\d+),", text, re.MULTILINE))
    widths = set(_plan_tensor.PRODUCT_WIDTHS)
    assert found == {(kind, str(n)) for kind in ("float16", "bfloat16") for n in widths}
    assert {tile.block_n for tile in TILES} <= widths and HOPPER_FORWARD[-1].width <= max(widths)


@pytest.mark.parametrize("entry", HOPPER_FORWARD, ids=lambda entry: entry.width)
def test_tiles_for_many_keys(entry):
    for options, many in zip(({}, {"causal": True}), entry.many):
        for kv_len in {1, many, many + 1}:
            if kv_len > 2**30:
                continue
            tile = (entry.long if kv_len > many else entry.plain)[0]
            found = plan(entry.width, kv_len=kv_len, **options)
            names = {name.upper(): value for name, value in dataclasses.asdict(tile).items()}
            assert names.items() <= dict(found.constants).items()


def test_no_more_blocks_than_multiprocessors():
    few, many = plan(heads=1), plan(heads=1000)
    most = Device.of_arch(90).multiprocessors
    assert few.grid == 2 * -(-300 // few.constant("BLOCK_M")) and many.grid == most
    assert few.over(10**9).grid == most and few.over(3).grid == 3
