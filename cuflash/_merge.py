"""Combining attention over disjoint sets of keys, in array code for NumPy and CuPy alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash import _interop
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._errors import reject
from cuflash._launch import on_device


def merge_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """See :func:`cuflash.merge_states`."""
    if len(outs) == 0 or len(outs) != len(lses):
        rule = "outs and lses must hold the same number of arrays, at least one"
        raise reject(ValueError, rule, f"{len(outs)} and {len(lses)}")
    like = outs[0]
    outs = [_interop.native("outs", out) for out in outs]
    lses = [_interop.native("lses", lse) for lse in lses]
    _check(outs, lses)
    index = _interop.device_index(outs[0])
    with on_device(index), np.errstate(invalid="ignore", divide="ignore"):
        xp = np
        if index >= 0:
            xp = _interop.cupy_module()
            outs = [_interop.aligned(out) for out in outs]
            lses = [_interop.aligned(lse) for lse in lses]
        top = lses[0]
        for lse in lses[1:]:
            top = xp.maximum(top, lse)
        safe = xp.where(xp.isneginf(top), 0, top)  # no keys at all: weights 0, not NaN
        weights = [xp.exp(lse - safe) for lse in lses]
        total = sum(weights[1:], weights[0])
        lse = safe + xp.log(total)
        share = 1 / xp.where(total == 0, 1, total)
        out = xp.zeros(outs[0].shape, lse.dtype)
        for weight, part in zip(weights, outs):
            rows = _rows(weight * share)
            out += xp.where(rows == 0, 0, rows * part)  # an empty part may hold anything
        out = out.astype(outs[0].dtype)
    return _interop.answer(out, like), _interop.answer(lse, like)


def _rows(weights: Any) -> Any:
    """(..., heads, rows) to (..., rows, heads, 1), the axes of an output."""
    return weights.swapaxes(-1, -2)[..., None]


def _check(outs: list[Any], lses: list[Any]) -> None:
    shape, dtype = outs[0].shape, outs[0].dtype
    if dtype.name not in ELEMENT_TYPES:
        raise reject(TypeError, "outs must be float16, bfloat16, float32 or float64", dtype.name)
    if len(shape) not in (3, 4):
        raise reject(ValueError, "outs must have axes (batch, seq, heads, head_dim)", shape)
    rows = (*shape[:-3], shape[-2], shape[-3])
    compute = np.dtype(ELEMENT_TYPES[dtype.name].compute)
    for name, arrays in (("outs", outs), ("lses", lses)):
        for array in arrays:
            _interop.same_place(name, array, outs[0], "outs[0]")
    for out in outs:
        if out.shape != shape:
            raise reject(ValueError, f"outs must all have shape {shape}", out.shape)
        if out.dtype != dtype:
            raise reject(TypeError, f"outs must all have dtype {dtype.name}", out.dtype.name)
    for lse in lses:
        if lse.shape != rows:
            raise reject(ValueError, f"lses must have shape {rows}", lse.shape)
        if lse.dtype != compute:
            raise reject(TypeError, f"lses must have dtype {compute.name}", lse.dtype.name)
