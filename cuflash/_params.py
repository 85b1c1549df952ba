"""The one argument of every kernel, packed as ``struct Params`` of ``kernels/params.cuh``."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from cuflash._dropout import round_keys, seed_key
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._problem import Problem

_SECTION_BYTES = 8 << 20  # of keys and values at a time, a part of the L2 cache
_FAR = 2**62  # an open end of a band
_WIDEST = 16  # bytes of the widest memory access

Described = tuple[tuple[int, ...], tuple[int, ...], int] | None
"""Shape, strides in bytes and element size of an array."""


class Arrays(NamedTuple):
    """The arrays of a launch, in the order of the struct's pointers; None where there is none.

    Those of q, k, v, mask and bias have four axes; those from `lse` on are contiguous.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None
    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    mask: Any = None
    bias: Any = None
    lse: Any = None
    delta: Any = None
    dlse: Any = None
    dbias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dsinks: Any = None
    sums: Any = None
    kept: Any = None
    row_offsets: Any = None
    row_blocks: Any = None
    column_offsets: Any = None
    column_blocks: Any = None
    block_words: Any = None
    work: Any = None
    cuts: Any = None
    partials: Any = None
    partial_lse: Any = None
    mask_words: Any = None


_STRIDED = Arrays._fields.index("lse")
_ROWS = Arrays._fields.index("mask")
_HEAD = struct.Struct(f"<{len(Arrays._fields)}Q20I3q")  # pointers, keys of Philox, `shared_out`
_NO_KEYS = (0,) * 20


@dataclass(frozen=True)
class Layout:
    """What a launch's arrays look like, wherever they are.

    Attributes
    ----------
    data : bytes
        The struct behind its pointers and keys.
    alignment : int
        Greatest power of two, up to 16, that divides all distances between elements of different
        rows, in bytes; and those within rows, if they do not lie side by side.
    dense : bool
        The elements of all rows lie side by side.
    mapped : bool
        And along no axis longer than 1 is the stride less than a row, or negative: the copy engine
        takes them.
    """

    data: bytes
    alignment: int
    dense: bool
    mapped: bool


class Packed(NamedTuple):
    """The parameters of a launch, and what the arrays allow.

    Attributes
    ----------
    parameters : array of one element
        Passed by value.
    vector : int
        Elements that one memory access may take; 0 where not even one may be accessed, since it
        lies across its natural boundary.
    mapped : bool
        Whether the copy engine takes the arrays' strides.
    """

    parameters: np.ndarray
    vector: int
    mapped: bool


def pack(
    problem: Problem, arrays: Arrays, seed: int = 0, shared_out: tuple[int, int, int] = (0, 0, 0)
) -> Packed:
    """The parameters by value, as CuPy passes structs.

    `seed` is the dropout's; `shared_out` are the works, cuts and splits of a head under a block
    mask.
    """
    pointers = [0 if array is None else array.data.ptr for array in arrays]
    described: list[Described] = [
        None if array is None else (array.shape, array.strides, array.itemsize)
        for array in arrays[:_STRIDED]
    ]
    layout = _layout(problem, *described)
    bits = layout.alignment
    for pointer in pointers[:_ROWS]:
        bits |= pointer
    vector = (bits & -bits) // ELEMENT_TYPES[problem.dtype].size
    if not layout.dense:
        vector = min(vector, 1)
    keys = chain(*round_keys(seed_key(seed))) if problem.dropout else _NO_KEYS
    data = _HEAD.pack(*pointers, *keys, *shared_out) + layout.data
    return Packed(np.frombuffer(data, f"V{len(data)}"), vector, layout.mapped)


@lru_cache(maxsize=4096)
def _layout(problem: Problem, *described: Described) -> Layout:
    bias = described[Arrays._fields.index("bias")]
    left, right = problem.band
    numbers = struct.pack(
        "<16q",
        problem.batch, problem.q_len, problem.kv_len, problem.q_heads, problem.kv_heads,
        problem.offset, _FAR if left is None else left, _FAR if right is None else right,
        problem.kv_len - problem.q_len,
        *((0, 0, 0, 0) if bias is None else bias[0]), _section_heads(problem),
        *(problem.blocks or (1, 1))[:2],
    )  # fmt: skip
    kind = "f" if ELEMENT_TYPES[problem.dtype].compute == "float32" else "d"
    reals = struct.pack(
        f"<4{kind}", problem.scale, problem.softcap or 0.0, 1 / (1 - problem.dropout), 0.0
    )
    strides = [stride for each in described for stride in _element_strides(each)]
    limit, above = problem.drop_limit
    bits = struct.pack("<2I", limit << 16 | limit, above)
    data = numbers + reals + bits + struct.pack(f"<{len(strides)}q", *strides)
    return Layout(data, *_alignment(problem, described[:_ROWS]))


def _section_heads(problem: Problem) -> int:
    """Query heads whose keys and values fit in the L2 cache together; 1 if all tiles are equal."""
    if problem.band[1] is None and not problem.blocks:
        return 1
    size = ELEMENT_TYPES[problem.dtype].size
    rows = problem.batch * problem.kv_len * problem.kv_heads
    heads = problem.batch * problem.q_heads
    all_bytes = rows * (problem.head_dim + problem.value_dim) * size
    return max(1, min(heads, heads * _SECTION_BYTES // max(1, all_bytes)))


def _element_strides(described: Described) -> tuple[int, ...]:
    """Strides in elements, 0 along axes of length 1: those of masks and biases broadcast."""
    if described is None:
        return (0, 0, 0, 0)
    shape, strides, size = described
    return tuple(stride // size if n > 1 else 0 for n, stride in zip(shape, strides))


def row_bits(problem: Problem) -> int:
    """A number whose lowest bit is the greatest access, in bytes, that divides all rows."""
    size = ELEMENT_TYPES[problem.dtype].size
    return _WIDEST | problem.head_dim * size | problem.value_dim * size


def _alignment(problem: Problem, tensors: tuple[Described, ...]) -> tuple[int, bool, bool]:
    bits, dense, mapped = row_bits(problem), True, True
    for shape, strides, element in filter(None, tensors):
        if shape[-1] > 1 and strides[-1] != element:
            bits, dense = bits | strides[-1], False
        for length, stride in zip(shape[:-1], strides[:-1]):
            if length > 1:
                bits |= stride
                mapped &= stride >= shape[-1] * element
    return bits & -bits, dense, dense and mapped
