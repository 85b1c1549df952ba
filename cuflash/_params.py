"""The one argument of every kernel, packed as ``struct Params`` of ``kernels/params.cuh``."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash._dtypes import ELEMENT_TYPES
from cuflash._problem import Problem

_POINTERS = (
    "q", "k", "v", "out", "lse", "dout", "delta", "dlse", "dq", "dk", "dv",
    "mask", "bias", "dbias", "alibi_slopes", "sinks", "dsinks",
)  # fmt: skip
_STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "mask", "bias")
_HEAD = struct.Struct(f"<{len(_POINTERS) + 1}Q")
_FAR = 2**62  # an open end of a band

Shape = tuple[int, ...]


def pack(problem: Problem, arrays: Mapping[str, Any], seed: int = 0) -> np.ndarray:
    """The parameters by value: an array of one element, as CuPy passes structs.

    Parameters
    ----------
    problem : Problem
    arrays : mapping of str to CuPy array or None
        By their names in ``struct Params``; those of q, k, v, mask and bias with four axes.
    seed : int
        Of the dropout.
    """
    get = arrays.get
    pointers = [0 if (array := get(name)) is None else array.data.ptr for name in _POINTERS]
    shapes = tuple(
        None if (array := get(name)) is None else (array.shape, array.strides, array.itemsize)
        for name in _STRIDED
    )
    data = _HEAD.pack(*pointers, seed) + _layout(problem, shapes)
    return np.frombuffer(data, f"V{len(data)}")


@lru_cache(maxsize=4096)
def _layout(problem: Problem, shapes: tuple[tuple[Shape, Shape, int] | None, ...]) -> bytes:
    bias = shapes[_STRIDED.index("bias")]
    left, right = problem.band
    numbers = struct.pack(
        "<13q",
        problem.batch, problem.q_len, problem.kv_len, problem.q_heads, problem.kv_heads,
        problem.offset, _FAR if left is None else min(left, _FAR),
        _FAR if right is None else min(right, _FAR), problem.kv_len - problem.q_len,
        *((0, 0, 0, 0) if bias is None else bias[0]),
    )  # fmt: skip
    kind = "f" if ELEMENT_TYPES[problem.dtype].compute == "float32" else "d"
    reals = struct.pack(
        f"<4{kind}", problem.scale, problem.softcap or 0.0,
        1 / (1 - problem.dropout), 0.0,
    )  # fmt: skip
    strides = [stride for each in shapes for stride in _element_strides(each)]
    return numbers + reals + struct.pack(f"<Q{len(strides)}q", problem.drop_below, *strides)


def _element_strides(described: tuple[Shape, Shape, int] | None) -> Shape:
    """Strides in elements, 0 along axes of length 1: those of masks and biases broadcast."""
    if described is None:
        return (0, 0, 0, 0)
    shape, strides, size = described
    return tuple(stride // size if n > 1 else 0 for n, stride in zip(shape, strides))
