"""The arrays of a workload, and the true answer for a few of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from workloads import Workload

SAMPLED_ROWS = 8
SEED = 20  # of the dropout, for providers that take one
OUTLIER_DEVIATION = 10.0


@dataclass(frozen=True)
class Inputs:
    """Random q, k, v, dout and bias of a workload.

    They are normal, of variance 1. To outliers a second normal number is added, of variance 100.

    Attributes
    ----------
    workload : Workload
    device : str
        "cuda" (CuPy arrays) or "cpu" (NumPy arrays).
    q, k, v, dout : array
        Layout (batch, seq, heads, head_dim).
    bias : array or None
        Shape (1, q_heads, q_len, kv_len).
    """

    workload: Workload
    device: str
    q: Any
    k: Any
    v: Any
    dout: Any
    bias: Any = None


def make_inputs(workload: Workload, device: str, seed: int = 0) -> Inputs:
    """Draw the inputs where they are needed, so that no time goes into copying them."""
    w = workload
    q_shape = (w.batch, w.q_len, w.q_heads, w.head_dim)
    kv_shape = (w.batch, w.kv_len, w.kv_heads, w.head_dim)
    shapes = [q_shape, kv_shape, kv_shape, q_shape]
    shapes += [(1, w.q_heads, w.q_len, w.kv_len)] if w.bias else []
    drawn = np.float64 if w.dtype == "float64" else np.float32
    normal: Any
    if device == "cuda":
        import cupy

        normal = cupy.random.RandomState(seed).standard_normal
    else:
        normal = np.random.default_rng(seed).standard_normal

    def draw(shape: tuple[int, ...]) -> Any:
        values = normal(shape, dtype=drawn)
        if w.outliers:
            chosen = normal(shape, dtype=drawn) > NormalDist().inv_cdf(1 - w.outliers)
            values += chosen * normal(shape, dtype=drawn) * drawn(OUTLIER_DEVIATION)
        return values.astype(numpy_dtype(w.dtype), copy=False)

    return Inputs(w, device, *(draw(shape) for shape in shapes))


def explained(workload: Workload, arch: int) -> Any:
    """Ask cuflash how it runs a workload, causal or full, on a GPU that need not be here."""
    import cuflash

    w = workload
    q = np.zeros((w.batch, w.q_len, w.q_heads, w.head_dim), numpy_dtype(w.dtype))
    k = np.zeros((w.batch, w.kv_len, w.kv_heads, w.head_dim), numpy_dtype(w.dtype))
    return cuflash.explain(q, k, k, causal=w.causal, arch=arch)


def numpy_dtype(name: str) -> np.dtype:
    """Find the NumPy dtype of a name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def to_float64(array: Any) -> np.ndarray:
    """Copy an array of NumPy, CuPy or PyTorch to the host, as float64."""
    if type(array).__module__.startswith("torch"):
        import torch

        return array.detach().to(torch.float64).cpu().numpy()
    if type(array).__module__.startswith("cupy"):
        array = array.get()
    return np.asarray(array).astype(np.float64)


def sample_positions(workload: Workload, seed: int = 1) -> list[tuple[int, int, int]]:
    """Choose a few (batch, head, row), the first and the last row of the array among them."""
    w = workload
    chosen = np.random.default_rng(seed).integers(
        (w.batch, w.q_heads, w.q_len), size=(SAMPLED_ROWS - 2, 3)
    )
    ends = [(0, 0, 0), (w.batch - 1, w.q_heads - 1, w.q_len - 1)]
    return ends + [(int(b), int(h), int(i)) for b, h, i in chosen]


def kept_rows(inputs: Inputs, positions: list[tuple[int, int, int]]) -> np.ndarray | None:
    """Read rows of the mask of cuflash's dropout: shape (len(positions), kv_len), or None."""
    w = inputs.workload
    if not w.dropout:
        return None
    import cuflash

    sizes = (w.batch, w.q_heads, w.q_len, w.kv_len)
    mask = cuflash.dropout_mask(*sizes, w.dropout, SEED, like=inputs.q)
    return np.stack([to_float64(mask[position]) for position in positions])


def true_rows(
    inputs: Inputs, positions: list[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute rows of out and of dq in float64 on the host, with cuflash's dropout.

    A row of either depends on one row of q and dout and on one head of k and v, so that this is
    cheap at any length. dk and dv depend on every row and are left to the tests.

    Returns
    -------
    out, dq : ndarray
        Shape (len(positions), head_dim), float64.
    """
    w = inputs.workload
    scale = w.head_dim**-0.5
    kept = kept_rows(inputs, positions)
    out_rows, dq_rows = [], []
    shown = None if w.mask is None else w.mask.visible(w.q_len)
    for n, (b, h, i) in enumerate(positions):
        seen = w.visible_keys(i)
        keys = slice(seen.start, seen.stop)
        group = h // (w.q_heads // w.kv_heads)
        k = to_float64(inputs.k[b, keys, group])
        v = to_float64(inputs.v[b, keys, group])
        scores = k @ to_float64(inputs.q[b, i, h]) * scale
        if inputs.bias is not None:
            scores += to_float64(inputs.bias[0, h, i, keys])
        if shown is not None:
            scores[~shown(h, i, np.arange(w.kv_len))] = -np.inf
        p = np.exp(scores - scores.max(initial=np.finfo(np.float64).min))
        p /= p.sum() or 1.0  # 0 where all is hidden
        weights = 1.0 if kept is None else kept[n, keys] / (1 - w.dropout)
        dp = v @ to_float64(inputs.dout[b, i, h]) * weights
        out_rows.append((p * weights) @ v)
        dq_rows.append((p * (dp - p @ dp)) @ k * scale)
    return np.stack(out_rows), np.stack(dq_rows)
