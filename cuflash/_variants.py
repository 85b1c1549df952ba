"""Kernel variants that stand for all: each tile, element type and feature at least once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cuflash import _plan
from cuflash._device import Device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._problem import Problem, describe
from cuflash._tiles import HOPPER_FORWARD

# Widths at the upper ends of the tile tables' entries.
_WIDTHS = {
    "float16": (64, 128, 256, 512),
    "bfloat16": (128,),
    "float32": (64, 96, 128, 256, 512),
    "float64": (64, 128, 256, 512),
}
# Block sizes of block masks by width: some tiles are for small blocks.
_BLOCKS = {
    ("float16", 64): (128, 64),
    ("float16", 128): (128, 64),
    ("float16", 256): (128,),
    ("float32", 64): (128,),
    ("float64", 64): (128,),
}


def _problem(
    dtype: str, width: int, *, causal: bool, rich: bool, precision: str = "ieee",
    block: int | None = None,
) -> Problem:  # fmt: skip
    element = ELEMENT_TYPES[dtype].numpy
    rows = ((2, 300, 2, width), element)
    scores = (2, 2, 300, 300)
    options: dict[str, Any] = {"causal": causal, "precision": precision}
    if block is not None:
        options["blocks"] = ((1, 1, 300, 300), (block, block))
    elif rich:
        options["mask"] = (scores, np.dtype(bool))
    if rich:
        options.update(
            window=(100, None), bias=(scores, element),
            alibi_slopes=((2,), element), softcap=30.0, sinks=((2,), element), dropout=0.1,
        )  # fmt: skip
    return describe(rows, rows, rows, **options)


def _hopper_problems() -> Iterator[Problem]:
    """Problems for all tiles of the Hopper kernel."""
    half = ELEMENT_TYPES["float16"].numpy
    heads: Any = ((2,), half)
    features: dict[str, Any] = {
        "window": (100, None), "alibi_slopes": heads, "softcap": 30.0, "sinks": heads,
        "dropout": 0.1,
    }  # fmt: skip
    blocks: Any = ((1, 1, 300, 300), (128, 128))
    for entry in HOPPER_FORWARD:
        for length in (1000, 10_000):
            rows = ((2, length, 2, entry.width), half)
            for causal in (False, True):
                yield describe(rows, rows, rows, causal=causal)
        rows = ((2, 300, 2, entry.width), half)
        yield describe(rows, rows, rows, causal=True, **features)
        scores = (2, 2, 300, 300)
        # At the least width it takes the wider bias to need a smaller tile.
        for bias in ("float16", "float32") if entry is HOPPER_FORWARD[0] else ("float16",):
            yield describe(
                rows, rows, rows, causal=True, mask=(scores, np.dtype(bool)),
                bias=(scores, np.dtype(bias)), **features,
            )  # fmt: skip
        yield describe(rows, rows, rows, blocks=blocks)
        yield describe(rows, rows, rows, causal=True, blocks=blocks, **features)


def _plans(problem: Problem, device: Device, vector: int) -> Iterator[_plan.Plan]:
    bias_shape = (2, 2, 300, 300) if problem.bias else None
    plans = [
        *(_plan.forward(problem, device, vector, mapped) for mapped in (False, True)),
        *_plan.backward(problem, device, vector, False, bias_shape),
        *_plan.backward(problem, device, vector, True, None),
    ]
    yield from plans
    for plan in plans:
        combine = _plan.combine(plan, 1) if plan.has_blocks else None
        if combine is not None:
            yield combine


def variants(arch: int) -> list[_plan.Plan]:
    """Plans to compile for an architecture, each kernel text once."""
    device = Device.of_arch(arch)
    found: dict[tuple[str, _plan.Constants], _plan.Plan] = {}
    for dtype, widths in _WIDTHS.items():
        for width in widths:
            vector = 16 // ELEMENT_TYPES[dtype].size
            plain = partial(_problem, dtype, width, causal=True, rich=False)
            rich = partial(_problem, dtype, width, causal=True, rich=True)
            cases = [(plain(), vector), (rich(), vector)]
            if width == 128 and dtype in ("float32", "float64"):  # no band; unaligned rows
                cases.append((plain(causal=False), vector))
                cases.append((_problem(dtype, width - 1, causal=True, rich=True), 1))
            if dtype == "float32" and width in (64, 128, 256):
                cases += [(kind(precision="tf32"), vector) for kind in (plain, rich)]
            cases += [(plain(block=block), vector) for block in _BLOCKS.get((dtype, width), ())]
            if width == 64 and dtype == "float16":
                cases.append((rich(block=128), vector))
            if width == 64 and dtype == "float32":
                cases.append((plain(block=128, precision="tf32"), vector))
            for problem, access in cases:
                for plan in _plans(problem, device, access):
                    found.setdefault((plan.kernel, plan.constants), plan)
        smallest = _problem(dtype, 1, causal=False, rich=False)
        for plan in (_plan.dropout_mask(smallest), _plan.pack_mask(smallest, 1)):
            found.setdefault((plan.kernel, plan.constants), plan)
    for problem in _hopper_problems() if arch == 90 else ():
        plan = _plan.forward(problem, device, 8)
        found.setdefault((plan.kernel, plan.constants), plan)
    return list(found.values())
