"""Plain attention: matmul, softmax, matmul, for NumPy and CuPy alike.

This is what a user without a fused kernel writes, written well: in place where that is possible,
and with the large matrices never transposed. Arrays here are (batch, heads, seq, head_dim), which
spares the matrix products a copy, and no narrower than float32: NumPy has no narrower products,
and CuPy's (14.2) of many matrices at once are those of float32 for float16, and fail for bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from workloads import GRADIENTS, ITEM_BYTES, Workload

Draw = Callable[[tuple[int, ...]], Any]


class Kept(NamedTuple):
    """What the forward pass leaves to the backward pass.

    Attributes
    ----------
    out, p : array
        The result, and the probabilities.
    weights : array or None
        What dropout multiplies the probabilities by.
    """

    out: Any
    p: Any
    weights: Any


def dtype_name(workload: Workload) -> str:
    """Name the dtype of the computation."""
    return "float64" if workload.dtype == "float64" else "float32"


def matrix_bytes(workload: Workload, direction: str) -> int:
    """Bytes of the score-sized matrices that exist at once.

    They are p, and in the backward pass ds as well; dropout's weights and random numbers; the bias.
    """
    count = (2 if direction in GRADIENTS else 1) + (2 if workload.dropout else 0)
    bias = workload.score_size // workload.batch if workload.bias else 0
    return (count * workload.score_size + bias) * ITEM_BYTES[dtype_name(workload)]


def visible(xp: Any, workload: Workload) -> Any:
    """Make the (q_len, kv_len) matrix that is True where a score is visible, or None."""
    w = workload
    if w.mask is not None:
        assert w.mask.heads == 1
        seen = w.mask.visible(w.q_len, xp.asarray)
        return seen(0, xp.arange(w.q_len)[:, None], xp.arange(w.kv_len))
    if not w.causal and w.window is None:
        return None
    own = w.kv_len - w.q_len
    left, right = w.window or (w.kv_len, 0)
    seen = xp.tri(w.q_len, w.kv_len, own if w.causal else own + right, dtype=bool)
    if w.window is None:
        return seen
    return seen & ~xp.tri(w.q_len, w.kv_len, own - left - 1, dtype=bool)


def added_scores(xp: Any, workload: Workload, bias: Any) -> Any:
    """Make the matrix that is added to the scores, of 2 or 4 axes, or None."""
    dtype = xp.dtype(dtype_name(workload))
    seen = visible(xp, workload)
    if bias is not None:
        bias = bias.astype(dtype, copy=False)
    if seen is None:
        return bias
    return xp.where(seen, dtype.type(0) if bias is None else bias, dtype.type(-xp.inf))


def drawing(xp: Any, workload: Workload) -> Draw | None:
    """Make the function that draws dropout's weights, or None."""
    if not workload.dropout:
        return None
    generator = xp.random.default_rng(0)
    one = xp.dtype(dtype_name(workload)).type

    def draw(shape: tuple[int, ...]) -> Any:
        dropped = generator.random(shape, dtype=xp.float32) < workload.dropout
        return xp.where(dropped, one(0), one(1 / (1 - workload.dropout)))

    return draw


def forward(
    xp: Any, q: Any, k: Any, v: Any, added: Any = None, draw: Draw | None = None
) -> Kept:
    """Compute out, and keep what the backward pass needs."""
    p = xp.matmul(q * q.dtype.type(q.shape[-1] ** -0.5), k.swapaxes(-1, -2))
    if added is not None:
        p += added
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    if draw is None:
        return Kept(xp.matmul(p, v), p, None)
    weights = draw(p.shape)
    return Kept(xp.matmul(p * weights, v), p, weights)


def backward(
    xp: Any, dout: Any, q: Any, k: Any, v: Any, kept: Kept
) -> tuple[Any, Any, Any]:
    """Compute dq, dk and dv from what the forward pass kept."""
    out, p, weights = kept
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    dropped = p if weights is None else p * weights
    dv = xp.matmul(dout.swapaxes(-1, -2), dropped).swapaxes(-1, -2)
    ds = xp.matmul(dout, v.swapaxes(-1, -2))
    if weights is not None:
        ds *= weights
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    dk = xp.matmul((q * scale).swapaxes(-1, -2), ds).swapaxes(-1, -2)
    return xp.matmul(ds, k) * scale, dk, dv


def forward_by_head(
    xp: Any, q: Any, k: Any, v: Any, added: Any = None, draw: Draw | None = None
) -> Any:
    """Compute out with the matrix of one head at a time."""
    out = xp.empty(q.shape[:-1] + v.shape[-1:], q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[b, h] = forward(xp, q[b, h], k[b, h], v[b, h], _of_head(added, h), draw).out
    return out


def backward_by_head(
    xp: Any, dout: Any, q: Any, k: Any, v: Any, added: Any = None, draw: Draw | None = None
) -> tuple[Any, Any, Any]:
    """Compute dq, dk and dv with the matrices of one head at a time, p made anew."""
    dq, dk, dv = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = (b, h)
            kept = forward(xp, q[head], k[head], v[head], _of_head(added, h), draw)
            grads = backward(xp, dout[head], q[head], k[head], v[head], kept)
            dq[head], dk[head], dv[head] = grads
    return dq, dk, dv


def _of_head(added: Any, h: int) -> Any:
    return added if added is None or added.ndim == 2 else added[0, h]


def sum_groups(gradient: Any, kv_heads: int) -> Any:
    """Add the gradients of the query heads that share one head of k and v."""
    batch, heads, length, head_dim = gradient.shape
    if heads == kv_heads:
        return gradient
    return gradient.reshape(batch, kv_heads, heads // kv_heads, length, head_dim).sum(axis=2)
