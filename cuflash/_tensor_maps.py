"""Tensors as Hopper's copy engine (TMA) knows them: made by the driver, without a toolkit."""

from __future__ import annotations

import ctypes
import struct
from functools import cache, lru_cache
from typing import Any

import numpy as np

from cuflash._params import Arrays
from cuflash._plan import Plan

_TYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_SWIZZLE_128B, _PROMOTE_128B = 3, 2
_CHANNELS = 64  # of a box: 128 bytes


def with_maps(plan: Plan, arrays: Arrays, taken: Any, parameters: np.ndarray) -> np.ndarray:
    """The parameters of a kernel that copies q, k, v and out by maps (kernels/mma_sm90.cuh).

    `taken` is a counter (:mod:`cuflash._counters`).
    """
    kind, block_n = _boxes(plan)
    boxes = ((arrays.q, 64), (arrays.k, block_n), (arrays.v, block_n), (arrays.out, 16))
    maps = (encoded(x.data.ptr, x.shape, x.strides, kind, rows) for x, rows in boxes)
    data = b"".join(maps) + struct.pack("<Q", taken.data.ptr) + parameters.tobytes()
    data += bytes(-len(data) % 64)
    return np.frombuffer(data, f"V{len(data)}")


@lru_cache(maxsize=4096)
def _boxes(plan: Plan) -> tuple[str, int]:
    """The type of the elements of boxes, and the rows of those of keys and values."""
    return str(plan.constant("Element")), int(plan.constant("BLOCK_N"))


@lru_cache(maxsize=4096)
def encoded(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, rows: int
) -> bytes:
    """The map of a (batch, row, head, channel) array, for boxes of so many rows.

    What lies beyond the lengths is read as 0.
    """
    batch, length, heads, channels = shape
    # Along an axis of length 1 no stride is used, and yet each must be a multiple of 16.
    steps = [
        stride if count > 1 else 16
        for count, stride in ((length, strides[1]), (heads, strides[2]), (batch, strides[0]))
    ]
    place = np.zeros(256, np.uint8)
    place = place[-place.ctypes.data % 64 :][:128]
    failure = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place.ctypes.data), _TYPES[kind], 4, ctypes.c_void_p(pointer),
        _numbers(ctypes.c_uint64, channels, length, heads, batch),
        _numbers(ctypes.c_uint64, *steps),
        _numbers(ctypes.c_uint32, _CHANNELS, rows, 1, 1), _numbers(ctypes.c_uint32, 1, 1, 1, 1),
        0, _SWIZZLE_128B, _PROMOTE_128B, 0,
    )  # fmt: skip
    if failure:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {failure} for {shape}, {strides}")
    return place.tobytes()


def _numbers(kind: Any, *values: int) -> Any:
    return (kind * len(values))(*values)


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
