"""The arrays of a workload, and the true answer for a few of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from workloads import Workload

SAMPLED_ROWS = 8


@dataclass(frozen=True)
class Inputs:
    """Random normal q, k, v and dout of a workload.

    Attributes
    ----------
    workload : Workload
    device : str
        "cuda" (CuPy arrays) or "cpu" (NumPy arrays).
    q, k, v, dout : array
        Layout (batch, seq, heads, head_dim).
    """

    workload: Workload
    device: str
    q: Any
    k: Any
    v: Any
    dout: Any


def make_inputs(workload: Workload, device: str, seed: int = 0) -> Inputs:
    """Draw the inputs where they are needed, so that no time goes into copying them."""
    w = workload
    q_shape = (w.batch, w.q_len, w.q_heads, w.head_dim)
    kv_shape = (w.batch, w.kv_len, w.kv_heads, w.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    drawn = np.float64 if w.dtype == "float64" else np.float32
    normal: Any
    if device == "cuda":
        import cupy

        normal = cupy.random.RandomState(seed).standard_normal
    else:
        normal = np.random.default_rng(seed).standard_normal
    arrays = [normal(shape, dtype=drawn).astype(numpy_dtype(w.dtype), copy=False)
              for shape in shapes]
    return Inputs(w, device, *arrays)


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


def true_rows(
    inputs: Inputs, positions: list[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute rows of out and of dq in float64 on the host.

    A row of either depends on one row of q and dout and on one head of k and v, so that this is
    cheap at any length. dk and dv depend on every row and are left to the tests.

    Returns
    -------
    out, dq : ndarray
        Shape (len(positions), head_dim), float64.
    """
    w = inputs.workload
    scale = w.head_dim**-0.5
    out_rows, dq_rows = [], []
    for b, h, i in positions:
        seen = min(w.kv_len, i + w.kv_len - w.q_len + 1) if w.causal else w.kv_len
        group = h // (w.q_heads // w.kv_heads)
        k = to_float64(inputs.k[b, :seen, group])
        v = to_float64(inputs.v[b, :seen, group])
        scores = k @ to_float64(inputs.q[b, i, h]) * scale
        p = np.exp(scores - scores.max())
        p /= p.sum()
        dp = v @ to_float64(inputs.dout[b, i, h])
        out_rows.append(p @ v)
        dq_rows.append((p * (dp - p @ dp)) @ k * scale)
    return np.stack(out_rows), np.stack(dq_rows)
