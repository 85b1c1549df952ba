"""Plain attention: matmul, softmax, matmul, for NumPy and CuPy alike.

This is what a user without a fused kernel writes, written well: in place where that is possible,
and with the large matrices never transposed. Arrays here are (batch, heads, seq, head_dim), which
spares the matrix products a copy.
"""

from __future__ import annotations

from typing import Any

from workloads import ITEM_BYTES, Workload


def matrix_bytes(workload: Workload, direction: str) -> int:
    """Bytes of the score-sized matrices that exist at once: p, and in the backward ds as well."""
    one = workload.score_size * ITEM_BYTES[workload.dtype]
    return 2 * one if direction == "backward" else one


def hidden_scores(xp: Any, workload: Workload, dtype: Any) -> Any:
    """Make the (q_len, kv_len) matrix that is added to the scores, or None."""
    w = workload
    if not w.causal:
        return None
    visible = xp.tri(w.q_len, w.kv_len, w.kv_len - w.q_len, dtype=bool)
    return xp.where(visible, xp.zeros((), dtype), xp.full((), -xp.inf, dtype))


def forward(xp: Any, q: Any, k: Any, v: Any, hidden: Any) -> tuple[Any, Any]:
    """Compute out and the probabilities p."""
    p = xp.matmul(q * q.dtype.type(q.shape[-1] ** -0.5), k.swapaxes(-1, -2))
    if hidden is not None:
        p += hidden
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return xp.matmul(p, v), p


def backward(xp: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, p: Any) -> tuple[Any, Any, Any]:
    """Compute dq, dk and dv from what the forward pass kept."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    dv = xp.matmul(dout.swapaxes(-1, -2), p).swapaxes(-1, -2)
    ds = xp.matmul(dout, v.swapaxes(-1, -2))
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    dk = xp.matmul((q * scale).swapaxes(-1, -2), ds).swapaxes(-1, -2)
    return xp.matmul(ds, k) * scale, dk, dv


def forward_by_head(xp: Any, q: Any, k: Any, v: Any, hidden: Any) -> Any:
    """Compute out with the matrix of one head at a time."""
    out = xp.empty(q.shape[:-1] + v.shape[-1:], q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[b, h] = forward(xp, q[b, h], k[b, h], v[b, h], hidden)[0]
    return out


def backward_by_head(
    xp: Any, dout: Any, q: Any, k: Any, v: Any, hidden: Any
) -> tuple[Any, Any, Any]:
    """Compute dq, dk and dv with the matrices of one head at a time, p made anew."""
    dq, dk, dv = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            head = (b, h)
            out, p = forward(xp, q[head], k[head], v[head], hidden)
            grads = backward(xp, dout[head], q[head], k[head], v[head], out, p)
            dq[head], dk[head], dv[head] = grads
    return dq, dk, dv


def sum_groups(gradient: Any, kv_heads: int) -> Any:
    """Add the gradients of the query heads that share one head of k and v."""
    batch, heads, length, head_dim = gradient.shape
    if heads == kv_heads:
        return gradient
    return gradient.reshape(batch, kv_heads, heads // kv_heads, length, head_dim).sum(axis=2)
