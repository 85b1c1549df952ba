"""What is asked of one call: sizes and options, checked. Knows nothing of arrays or GPUs."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuflash._dtypes import ELEMENT_TYPES
from cuflash._errors import integer, reject
from cuflash._values import HashedOnce

Signature = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""
BlockSignature = tuple[tuple[int, int, int, int], tuple[int, int]]
"""Shape and block size of a block mask."""

MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class Problem(HashedOnce):
    """One attention problem. Names and meaning as in :func:`cuflash.attention`.

    `blocks` are batch and heads of a block mask, 1 where all share it, and its blocks' rows and
    columns.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float
    causal: str | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    dropout: float = 0.0
    mask: bool = False
    bias: str | None = None
    alibi: bool = False
    sinks: bool = False
    precision: str = "ieee"
    blocks: tuple[int, int, int, int] | None = None

    __hash__ = HashedOnce.__hash__

    @property
    def offset(self) -> int:
        """Query i stands at key i + offset: of causal masks and windows."""
        return 0 if self.causal == "top-left" else self.kv_len - self.q_len

    @property
    def band(self) -> tuple[int | None, int | None]:
        """How many keys left and right of key i + offset query i sees; None where all."""
        left, right = self.window
        if self.causal is not None:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def drop_limit(self) -> tuple[int, bool]:
        """Dropout drops where 15 random bits are below the number; if True, where they are not."""
        dropped = round(self.dropout * 2**15)
        above = dropped > 2**14
        return 2**15 - dropped if above else dropped, above

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the output and of its gradient."""
        return self.batch, self.q_len, self.q_heads, self.value_dim

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of lse, and of what else has one number for each row of scores."""
        return self.batch, self.q_heads, self.q_len

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of all scores, which are never kept."""
        return self.batch, self.q_heads, self.q_len, self.kv_len

    @property
    def sums_are_dq(self) -> bool:
        """Shares of dq may be added up in dq itself."""
        return self.dtype == ELEMENT_TYPES[self.dtype].compute and self.precision == "ieee"

    @property
    def empty(self) -> bool:
        """Nothing to compute: some axis has length zero."""
        return 0 in self.score_shape


class Extras(NamedTuple):
    """The arrays and numbers of a call beside q, k and v, as far as they are given.

    Scores' arrays have four axes, those of length 1 broadcast; one number per head otherwise.
    `blocks` is a BlockMask, in the place of a mask.
    """

    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    seed: int = 0
    blocks: Any = None


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)) or (
        hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic))
    ):  # reading a number off a GPU would wait for it
        raise reject(TypeError, f"{name} must be a number", value)
    try:
        number = float(value)
    except OverflowError as error:
        raise reject(ValueError, f"{name} must be finite", value) from error
    except (TypeError, ValueError) as error:
        raise reject(TypeError, f"{name} must be a number", value) from error
    if not math.isfinite(number):
        raise reject(ValueError, f"{name} must be finite", value)
    return number


def _alignment(causal: Any) -> str | None:
    if isinstance(causal, str):
        if causal not in ("bottom-right", "top-left"):
            rule = 'causal must be True, False, "bottom-right" or "top-left"'
            raise reject(ValueError, rule, causal)
        return causal
    if not isinstance(causal, (bool, np.bool_)):
        raise reject(TypeError, "causal must be a boolean or the name of an alignment", causal)
    return "bottom-right" if causal else None


def _precision(precision: Any) -> str:
    rule = 'precision must be "ieee" or "tf32"'
    if not isinstance(precision, str):
        raise reject(TypeError, rule, precision)
    if precision not in ("ieee", "tf32"):
        raise reject(ValueError, rule, precision)
    return precision


def _side(window: Any, side: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool):
        raise reject(TypeError, "window must hold integers or None", window)
    try:
        count = operator.index(side)
    except TypeError as error:
        raise reject(TypeError, "window must hold integers or None", window) from error
    if count < 0:
        raise reject(ValueError, "window must not be negative (None leaves an end open)", window)
    return count


def checked_window(window: Any) -> tuple[int | None, int | None]:
    """The window as a pair, each side an integer or None where it is open."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise reject(TypeError, "window must be a pair (left, right) or None", window)
    return _side(window, window[0]), _side(window, window[1])


def _check_tensors(tensors: dict[str, Signature]) -> None:
    q, k, v = (tensors[name][0] for name in "qkv")
    dtype = tensors["q"][1].name
    for name, (shape, element) in tensors.items():
        kind = element.name
        if len(shape) != 4:
            rule = f"{name} must have axes (batch, seq, heads, head_dim) or (seq, heads, head_dim)"
            raise reject(ValueError, rule, shape)
        if kind not in ELEMENT_TYPES:
            rule = f"{name} must be float16, bfloat16, float32 or float64"
            raise reject(TypeError, rule, kind)
        if kind != dtype:
            raise reject(TypeError, f"{name} must have the dtype of q, {dtype}", kind)
        if not 1 <= shape[3] <= MAX_HEAD_DIM:
            rule = f"{name} must have a head_dim from 1 to {MAX_HEAD_DIM}"
            raise reject(ValueError, rule, shape)
    if k[0] != q[0] or v[0] != q[0]:
        raise reject(ValueError, "q, k and v must have the same batch", (q, k, v))
    if k[1] != v[1]:
        raise reject(ValueError, "k and v must have the same length", (k, v))
    if k[2] != v[2]:
        raise reject(ValueError, "k and v must have the same number of heads", (k, v))
    if k[3] != q[3]:
        raise reject(ValueError, "q and k must have the same head_dim", (q, k))
    if q[2] and (not k[2] or q[2] % k[2]):
        rule = "the heads of q must be a multiple of those of k and v"
        raise reject(ValueError, rule, f"{q[2]} and {k[2]}")


def _check_scores(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    fits = len(shape) <= 4 and all(
        a in (1, b) for a, b in zip(shape[::-1], full[::-1])
    )
    if not fits:
        rule = f"{name} must broadcast to (batch, q_heads, q_len, kv_len) = {full}"
        raise reject(ValueError, rule, shape)


def _check_heads(name: str, signature: Signature, allowed: tuple[tuple[int, ...], ...]) -> None:
    shape, kind = signature[0], signature[1].name
    if kind not in ELEMENT_TYPES:
        raise reject(TypeError, f"{name} must have a floating-point dtype", kind)
    if shape not in allowed:
        names = " or ".join(map(str, allowed))
        raise reject(ValueError, f"{name} must have shape {names}", shape)


def describe(
    q: Signature, k: Signature, v: Signature, *,
    causal: Any = False, window: Any = None, mask: Signature | None = None,
    bias: Signature | None = None, alibi_slopes: Signature | None = None, softcap: Any = None,
    sinks: Signature | None = None, scale: Any = None, dropout: Any = 0.0, precision: Any = "ieee",
    blocks: BlockSignature | None = None,
) -> Problem:  # fmt: skip
    """Checks one call and describes it.

    Arrays are given by shape (four axes) and dtype, a block mask by its shape and block size.
    """
    return _describe(
        q, k, v, mask, bias, alibi_slopes, sinks, blocks,
        causal if causal is True or causal is False else _alignment(causal),
        window if window is None else checked_window(window),
        softcap if softcap is None else _number("softcap", softcap),
        scale if scale is None else _number("scale", scale),
        dropout if type(dropout) is float else _number("dropout", dropout),
        _precision(precision),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _describe(
    q: Signature, k: Signature, v: Signature, mask: Signature | None, bias: Signature | None,
    alibi_slopes: Signature | None, sinks: Signature | None, blocks: BlockSignature | None,
    causal: bool | str | None, window: tuple[int | None, int | None] | None, softcap: float | None,
    scale: float | None, dropout: float, precision: str,
) -> Problem:  # fmt: skip
    """:func:`describe`, once for each set of options, which are hashable here."""
    _check_tensors({"q": q, "k": k, "v": v})
    (batch, q_len, q_heads, head_dim), (_, kv_len, kv_heads, _) = q[0], k[0]
    _check_arrays(mask, bias, alibi_slopes, sinks, (batch, q_heads, q_len, kv_len))
    if blocks is not None:
        _check_blocks(blocks[0], (batch, q_heads, q_len, kv_len))
    if softcap is not None and softcap <= 0:
        raise reject(ValueError, "softcap must be positive", softcap)
    limits = np.finfo(ELEMENT_TYPES[q[1].name].compute)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value and not float(limits.tiny) <= abs(value) <= float(limits.max):
            raise reject(ValueError, f"{name} must be a normal number in {limits.dtype}", value)
    # An end that lies beyond all keys is open.
    left, right = (
        None if side is None or side >= q_len + kv_len else side for side in window or (None, None)
    )
    if not 0 <= dropout < 1:
        raise reject(ValueError, "dropout must lie in [0, 1)", dropout)
    return Problem(
        batch, q_len, kv_len, q_heads, kv_heads, head_dim, v[0][3], q[1].name,
        1 / math.sqrt(head_dim) if scale is None else scale,
        _alignment(causal or False), (left, right), softcap, dropout,
        mask is not None, bias and bias[1].name, alibi_slopes is not None, sinks is not None,
        precision if q[1] == np.float32 else "ieee",
        None if blocks is None else (*blocks[0][:2], *blocks[1]),
    )  # fmt: skip


def _check_arrays(
    mask: Signature | None, bias: Signature | None, alibi_slopes: Signature | None,
    sinks: Signature | None, full: tuple[int, ...],
) -> None:  # fmt: skip
    if mask is not None:
        if mask[1] != np.bool_:
            raise reject(TypeError, "mask must be boolean, True where visible", mask[1].name)
        _check_scores("mask", mask[0], full)
    if bias is not None:
        if bias[1].name not in ELEMENT_TYPES:
            raise reject(TypeError, "bias must have a floating-point dtype", bias[1].name)
        _check_scores("bias", bias[0], full)
    if alibi_slopes is not None:
        _check_heads("alibi_slopes", alibi_slopes, ((full[1],), full[:2]))
    if sinks is not None:
        _check_heads("sinks", sinks, ((full[1],),))


def _check_blocks(shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    if shape[2:] != full[2:] or any(a not in (1, b) for a, b in zip(shape, full)):
        batch, heads, q_len, kv_len = full
        rule = f"mask must be a BlockMask of shape ({batch} or 1, {heads} or 1, {q_len}, {kv_len})"
        raise reject(ValueError, rule, shape)


def describe_scores(sizes: tuple[Any, Any, Any, Any], dropout: Any) -> Problem:
    """Checks and describes the scores that a dropout mask is asked for, by their four axes."""
    names = ("batch", "q_heads", "q_len", "kv_len")
    batch, heads, q_len, kv_len = (integer(name, size) for name, size in zip(names, sizes))
    element = np.dtype(np.float32)
    keys = ((batch, kv_len, heads, 1), element)
    return describe(((batch, q_len, heads, 1), element), keys, keys, dropout=dropout)


def check_flag(name: str, value: Any) -> None:
    """Raises unless the value is a boolean."""
    if not isinstance(value, (bool, np.bool_)):
        raise reject(TypeError, f"{name} must be a boolean", value)


def checked_seed(seed: Any) -> int:
    """The seed as an integer below 2^64."""
    if isinstance(seed, bool):
        raise reject(TypeError, "seed must be an integer", seed)
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise reject(TypeError, "seed must be an integer", seed) from error
    if not 0 <= number < 2**64:
        raise reject(ValueError, "seed must lie in [0, 2^64)", seed)
    return number
