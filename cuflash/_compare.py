"""cuflash and the plain computation at one length: time, peak memory, and the error.

The same code measures NumPy and CuPy. Inputs are standard normal and the mask is causal. The truth
is computed by NumPy in float64 for a sample of the queries: a backward pass in which `dout` is zero
for all others gives dk and dv in full, at a cost linear in the length.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import _attention
from cuflash._device import device
from cuflash._dtypes import ELEMENT_TYPES

Array = Any  # of NumPy or CuPy

HEAD_DIM = 64
SAMPLE = 32  # queries whose results are checked
REPEATS, REPEAT_SECONDS = 5, 1.5
CPU_MOST_BYTES = 4 * 2**30  # for the plain computation: containers seldom tell their limit


def plain_forward(xp: Any, q: Array, k: Array, v: Array, hidden: Array) -> tuple[Array, Array]:
    """Output and all probabilities, as a textbook has them.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    q, k, v : (..., seq, head_dim) array
        Of one floating dtype, which the results have too.
    hidden : (q_len, kv_len) array
        0 where a key is visible, else -inf.

    Returns
    -------
    out : (..., q_len, head_dim) array
    p : (..., q_len, kv_len) array
    """
    p = xp.matmul(q * q.dtype.type(1 / math.sqrt(HEAD_DIM)), k.swapaxes(-1, -2))
    p += hidden
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return xp.matmul(p, v), p


def plain_backward(
    xp: Any, dout: Array, q: Array, k: Array, v: Array, out: Array, p: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, from what the forward pass kept."""
    scale = q.dtype.type(1 / math.sqrt(HEAD_DIM))
    dv = xp.matmul(dout.swapaxes(-1, -2), p).swapaxes(-1, -2)  # (dout^T p)^T spares a copy of p
    ds = xp.matmul(dout, v.swapaxes(-1, -2))
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    dk = xp.matmul((q * scale).swapaxes(-1, -2), ds).swapaxes(-1, -2)
    return xp.matmul(ds, k) * scale, dk, dv


@dataclass(frozen=True)
class Cost:
    """What the two passes take.

    Attributes
    ----------
    forward_ms, backward_ms : float
        Medians of milliseconds.
    peak_bytes : int
        Most memory in both passes at once, beyond their inputs.
    seconds : float
        What measuring took.
    """

    forward_ms: float
    backward_ms: float
    peak_bytes: int
    seconds: float

    @property
    def total_ms(self) -> float:
        """Milliseconds of both passes."""
        return self.forward_ms + self.backward_ms

    def seconds_at(self, ratio: float) -> float:
        """Estimate of the seconds at `ratio` times the length, where a call is made twice."""
        return max(2e-3 * self.total_ms * ratio**2, self.seconds * ratio)


@dataclass(frozen=True)
class _Passes:
    """A forward pass, and the backward pass that takes its results."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]

    def both(self) -> tuple[Any, Any]:
        kept = self.forward()
        return kept, self.backward(kept)


@dataclass(frozen=True)
class Place:
    """Where and in which element type to compute; `xp` is the module NumPy or CuPy."""

    xp: Any
    dtype: np.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether `xp` is CuPy."""
        return self.xp is not np

    @property
    def heads(self) -> int:
        """So many that a GPU is busy."""
        return 16 if self.on_gpu else 4

    @property
    def plain_dtype(self) -> np.dtype:
        """That of the plain computation: float32 where 16-bit products are slow or missing."""
        fast = self.dtype.itemsize > 2 or (self.on_gpu and self.dtype == np.float16)
        return self.dtype if fast else np.dtype(np.float32)

    @property
    def tolerance(self) -> float:
        """Allowed error: four roundings to the dtype and 64 to the type that sums are made in."""
        compute = ELEMENT_TYPES[self.dtype.name].compute
        eps = float(ml_dtypes.finfo(self.dtype).eps)  # type: ignore[no-untyped-call]
        return 4 * eps + 64 * float(np.finfo(compute).eps)

    def __str__(self) -> str:
        if self.on_gpu:
            return f"CuPy {self.xp.__version__} on {device(self.xp.cuda.Device().id).name}"
        return f"NumPy {self.xp.__version__} on {os.cpu_count()} CPU cores"

    def now(self) -> float:
        """Seconds of a clock, read when all work is done."""
        if self.on_gpu:
            self.xp.cuda.Device().synchronize()
        return time.perf_counter()

    def spare_bytes(self) -> int:
        """What the plain computation may take: half of the memory that is free."""
        if self.on_gpu:
            self.xp.get_default_memory_pool().free_all_blocks()
            return int(self.xp.cuda.runtime.memGetInfo()[0]) // 2
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            return CPU_MOST_BYTES // 2
        return min(free * 1024 // 2, CPU_MOST_BYTES)

    def peak(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """Most bytes held at once by arrays made during a call; and the call's result."""
        return _pool_peak(self.xp, call) if self.on_gpu else _traced_peak(call)


def _traced_peak(call: Callable[[], Any]) -> tuple[int, Any]:
    tracemalloc.start()  # NumPy reports its arrays there
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


def _pool_peak(cupy: Any, call: Callable[[], Any]) -> tuple[int, Any]:
    class Count(cupy.cuda.MemoryHook):  # type: ignore[misc]
        """Follows what CuPy's memory pool hands out and takes back, in units of 512 bytes."""

        name = "cuflash"
        used = peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            if event["mem_ptr"]:
                self.used += event["mem_size"]
                self.peak = max(self.peak, self.used)

        def free_postprocess(self, **event: Any) -> None:
            self.used -= event["mem_size"]

    with Count() as count:
        result = call()
    return count.peak, result


def draw(place: Place, length: int) -> np.ndarray:
    """q, k, v and dout in one NumPy array, (4, 1, length, heads, head_dim)."""
    shape = (4, 1, length, place.heads, HEAD_DIM)
    real = np.dtype(ELEMENT_TYPES[place.dtype.name].compute)
    return np.random.default_rng(length).standard_normal(shape, real).astype(place.dtype)


def first_call(place: Place, inputs: np.ndarray) -> float:
    """Seconds of cuflash's first call, which fills caches: a GPU compiles or loads its kernels."""
    q, k, v, dout = map(place.xp.asarray, inputs)
    passes = _cuflash(q, k, v, dout)
    start = place.now()
    passes.both()
    return place.now() - start


def measure_cuflash(place: Place, inputs: np.ndarray) -> tuple[Cost, float]:
    """Cost of cuflash, and its error: see :func:`_error`."""
    start, length = place.now(), inputs.shape[2]
    queries = np.random.default_rng(0).choice(length, min(length, SAMPLE), replace=False)
    q, k, v, dout = map(place.xp.asarray, inputs)
    sparse = np.zeros_like(inputs[3])
    sparse[:, queries] = inputs[3][:, queries]
    passes = _cuflash(q, k, v, place.xp.asarray(sparse))
    peak, ((out, _), gradients) = place.peak(passes.both)
    results = [x if place.xp is np else x.get() for x in (out, *gradients[:3])]
    error = _error(inputs, queries, results)
    times = _times(place, _cuflash(q, k, v, dout))
    return Cost(*times, peak, place.now() - start), error


def measure_plain(place: Place, inputs: np.ndarray) -> Cost:
    """Cost of the plain computation on the same inputs, in the layout that it likes best."""
    start, xp, dtype = place.now(), place.xp, place.plain_dtype
    swapped = inputs[:, 0].swapaxes(1, 2).astype(dtype, order="C")
    q, k, v, dout = map(xp.asarray, swapped)
    hidden = xp.where(xp.tri(q.shape[1], dtype=bool), dtype.type(0), dtype.type(-np.inf))
    passes = _Passes(
        lambda: plain_forward(xp, q, k, v, hidden),
        lambda kept: plain_backward(xp, dout, q, k, v, *kept),
    )
    peak = place.peak(passes.both)[0]
    return Cost(*_times(place, passes), peak, place.now() - start)


def plain_bytes(place: Place, length: int) -> int:
    """Memory for the plain computation: p, ds and one more of their size, and the mask."""
    return (3 * place.heads + 2) * length**2 * place.plain_dtype.itemsize


def _cuflash(q: Array, k: Array, v: Array, dout: Array) -> _Passes:
    return _Passes(
        lambda: _attention.attention(q, k, v, causal=True, return_lse=True),
        lambda kept: _attention.attention_backward(dout, q, k, v, *kept, causal=True),
    )


def _times(place: Place, passes: _Passes) -> tuple[float, float]:
    """Medians of milliseconds, forward and backward; what is slow is timed less often."""
    forward: list[float] = []
    backward: list[float] = []
    start = place.now()
    while len(forward) < REPEATS and (not forward or place.now() - start < REPEAT_SECONDS):
        before = place.now()
        kept = passes.forward()
        between = place.now()
        gradients = passes.backward(kept)
        backward.append((place.now() - between) * 1e3)
        forward.append((between - before) * 1e3)
        del kept, gradients  # before the next pass takes as much again
    return statistics.median(forward), statistics.median(backward)


def _error(inputs: np.ndarray, queries: np.ndarray, results: list[np.ndarray]) -> float:
    """Greatest difference from float64, relative to the largest element of each array and head.

    Parameters
    ----------
    inputs : (4, 1, length, heads, head_dim) array
    queries : (n,) int array
        Those where dout was not zero.
    results : list of (1, length, heads, head_dim) arrays
        out, compared at the queries; dq, dk and dv, compared everywhere.
    """
    hidden = np.where(np.arange(inputs.shape[2]) <= queries[:, None], 0.0, -np.inf)
    errors = []
    for head in range(inputs.shape[3]):
        q, k, v, dout = inputs[:, 0, :, head].astype(np.float64)
        got = [tensor[0, :, head].astype(np.float64) for tensor in results]
        got[0] = got[0][queries]
        out, p = plain_forward(np, q[queries], k, v, hidden)
        dq, dk, dv = plain_backward(np, dout[queries], q[queries], k, v, out, p)
        all_dq = np.zeros_like(q)
        all_dq[queries] = dq
        errors += [abs(x - y).max() / abs(y).max() for x, y in zip(got, (out, all_dq, dk, dv))]
    return float(np.max(errors))  # NaN stays NaN
