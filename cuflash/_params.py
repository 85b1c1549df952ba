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
_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_SCORES = ("mask", "bias")
_STRIDED = _TENSORS + _SCORES
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
    bias = get("bias")
    tail = _layout(
        problem,
        tuple(None if (array := get(name)) is None else array.strides for name in _STRIDED),
        None if bias is None else bias.shape,
    )
    data = _HEAD.pack(*pointers, seed) + tail
    return np.frombuffer(data, f"V{len(data)}")


@lru_cache(maxsize=4096)
def _layout(problem: Problem, strides: tuple[Shape | None, ...], bias_shape: Shape | None) -> bytes:
    element = ELEMENT_TYPES[problem.dtype]
    sizes = dict.fromkeys(_TENSORS, element.size)
    sizes["mask"] = 1
    if problem.bias is not None:
        sizes["bias"] = ELEMENT_TYPES[problem.bias].size
    left, right = problem.band
    numbers = struct.pack(
        "<13q",
        problem.batch, problem.q_len, problem.kv_len, problem.q_heads, problem.kv_heads,
        problem.offset, _FAR if left is None else min(left, _FAR),
        _FAR if right is None else min(right, _FAR), problem.kv_len - problem.q_len,
        *(bias_shape or (0, 0, 0, 0)),
    )  # fmt: skip
    kind = "f" if element.compute == "float32" else "d"
    reals = struct.pack(
        f"<4{kind}", problem.scale, problem.softcap or 0.0, 1 / (1 - problem.dropout), 0.0
    )
    counts = [
        stride // sizes[name]
        for name, each in zip(_STRIDED, strides)
        for stride in (each or (0, 0, 0, 0))
    ]
    return numbers + reals + struct.pack(f"<Q{len(counts)}q", problem.drop_below, *counts)
