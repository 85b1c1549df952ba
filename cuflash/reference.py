"""FlashAttention in NumPy: the page to read first, and what computes NumPy arrays.

The scores of attention, one for each pair of query and key, are too many to keep: at 65,536
tokens they take 16 GiB per head. So they are made tile by tile and used at once.

*Forward.* For a tile of queries, walk over the keys. Softmax needs the maximum and the sum of a
whole row, which are not known before its end; the **online softmax** keeps running ones, and when
the maximum grows, what was summed so far is scaled down by ``exp(old - new)``::

    s   = scale * q k^T                     scores of one tile (softcap, bias, masks: `_logits`)
    m'  = max(m, rowmax(s))                 running maximum
    p   = exp(s - m')
    l'  = l * exp(m - m') + rowsum(p)       running sum
    o'  = o * exp(m - m') + p v             running output

At the end ``out = o / l``, and ``lse = m + ln(l)`` is kept, one number per row.

*Backward.* The probabilities are not kept either: ``p = exp(s - lse)`` makes them again from the
inputs, one tile at a time. With ``D = rowsum(dout * out)``::

    dv += p^T dout      dp = dout v^T      ds = p * (dp - D)      dq += ds k      dk += ds^T q

Sources: Dao et al., "FlashAttention", 2022 (algorithms 1 and 4); Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018. The CUDA kernels in ``kernels/`` do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuflash._dropout import kept
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._problem import Extras, Problem

Array = np.ndarray

TILE_ROWS, TILE_COLUMNS = 256, 512


@dataclass(frozen=True)
class _Head:
    """One query head of one batch element."""

    problem: Problem
    extras: Extras
    b: int
    h: int

    @property
    def kv_head(self) -> int:
        return self.h // (self.problem.q_heads // self.problem.kv_heads)

    def rows_of(self, tensor: Array, head: int) -> Array:
        """(rows, channels) of one head, in the type that arithmetic is done in."""
        compute = ELEMENT_TYPES[self.problem.dtype].compute
        return np.ascontiguousarray(tensor[self.b, :, head, :], dtype=compute)

    def tile_of(self, scores: Array, rows: range, columns: range) -> Array:
        """The tile of a mask or a bias; a broadcast axis keeps its length of 1."""
        b, h, q, k = (slice(None) if n == 1 else None for n in scores.shape)
        tile = scores[
            0 if b else self.b, 0 if h else self.h,
            q or slice(rows.start, rows.stop), k or slice(columns.start, columns.stop),
        ]  # fmt: skip
        return tile


@np.errstate(all="ignore")
def attention(
    problem: Problem, q: Array, k: Array, v: Array, extras: Extras, out: Array | None = None
) -> tuple[Array, Array]:
    """Output and lse of one problem.

    Parameters
    ----------
    problem : Problem
    q : (batch, q_len, q_heads, head_dim) array
    k : (batch, kv_len, kv_heads, head_dim) array
    v : (batch, kv_len, kv_heads, value_dim) array
    extras : Extras
    out : (batch, q_len, q_heads, value_dim) array, optional
        Where to write the output.

    Returns
    -------
    out : (batch, q_len, q_heads, value_dim) array
    lse : (batch, q_heads, q_len) array
        float32, or float64 for float64 inputs.
    """
    element = ELEMENT_TYPES[problem.dtype]
    compute = element.compute
    if out is None:
        shape = (problem.batch, problem.q_len, problem.q_heads, problem.value_dim)
        out = np.empty(shape, element.numpy)
    lse = np.empty((problem.batch, problem.q_heads, problem.q_len), compute)
    for b in range(problem.batch):
        for h in range(problem.q_heads):
            head = _Head(problem, extras, b, h)
            queries = head.rows_of(q, h)
            keys, values = head.rows_of(k, head.kv_head), head.rows_of(v, head.kv_head)
            for rows in _tiles(range(problem.q_len), TILE_ROWS):
                here = slice(rows.start, rows.stop)
                tile, lse[b, h, here] = _forward_rows(head, rows, queries[here], keys, values)
                out[b, here, h, :] = tile
    return out, lse


def _forward_rows(
    head: _Head, rows: range, queries: Array, keys: Array, values: Array
) -> tuple[Array, Array]:
    """Output and lse of one tile of queries."""
    problem = head.problem
    m = np.full(len(rows), -np.inf, queries.dtype)
    l = np.zeros(len(rows), queries.dtype)  # noqa: E741
    o = np.zeros((len(rows), problem.value_dim), queries.dtype)

    for columns in _tiles(visible_keys(problem, rows), TILE_COLUMNS):
        s = _logits(head, rows, columns, queries, keys)
        if s is None:
            continue
        hidden = s == -np.inf
        new_m = np.maximum(m, s.max(axis=1))
        safe = np.where(new_m == -np.inf, 0, new_m)
        shrink = np.exp(m - safe)
        p = np.exp(np.subtract(s, safe[:, None], out=s), out=s)
        l = l * shrink + p.sum(axis=1)  # noqa: E741
        if problem.dropout:
            p *= _keep(head, rows, columns)
        o *= shrink[:, None]
        o += _product(p, values[columns.start : columns.stop], hidden)
        m = new_m

    if problem.sinks:
        sink = head.extras.sinks[head.h]
        top = np.maximum(m, sink)
        safe = np.where(top == -np.inf, 0, top)
        shrink = np.exp(m - safe)
        l, m = l * shrink + np.exp(sink - safe), top  # noqa: E741
        o *= shrink[:, None]
    empty = l == 0
    o *= np.where(empty, 0, 1 / ((1 - problem.dropout) * np.where(empty, 1, l)))[:, None]
    return o, np.where(empty, -np.inf, m + np.log(np.where(empty, 1, l)))


@np.errstate(all="ignore")
def attention_backward(
    problem: Problem, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
    extras: Extras, dlse: Array | None, bias_grad: bool, deterministic: bool = True,
) -> tuple[Array, Array, Array, Array | None, Array | None]:  # fmt: skip
    """Gradients (dq, dk, dv, dbias, dsinks) of one problem.

    Parameters are as in :func:`attention`; dout has the shape of out, dlse that of lse. Sums are
    always made in the same order, whether asked to be `deterministic` or not.
    """
    compute = ELEMENT_TYPES[problem.dtype].compute
    dq, dk, dv = (np.empty(tensor.shape, tensor.dtype) for tensor in (q, k, v))
    sum_dbias = np.zeros(extras.bias.shape, compute) if bias_grad else None
    dsinks = np.zeros(problem.q_heads, compute) if problem.sinks else None
    for b in range(problem.batch):
        for g in range(problem.kv_heads):
            sum_dk = np.zeros((problem.kv_len, problem.head_dim), compute)
            sum_dv = np.zeros((problem.kv_len, problem.value_dim), compute)
            group = problem.q_heads // problem.kv_heads
            for h in range(g * group, (g + 1) * group):
                head = _Head(problem, extras, b, h)
                delta = np.einsum("id,id->i", head.rows_of(dout, h), head.rows_of(out, h))
                if dlse is not None:
                    delta -= dlse[b, h]
                delta[lse[b, h] == -np.inf] = 0
                tensors = [head.rows_of(t, n) for t, n in ((q, h), (k, g), (v, g), (dout, h))]
                dq[b, :, h, :] = _backward_head(
                    head, tensors, lse[b, h], delta, sum_dk, sum_dv, sum_dbias
                )
                if dsinks is not None:
                    share = np.exp(extras.sinks[h] - lse[b, h])
                    dsinks[h] -= (share * delta)[lse[b, h] != -np.inf].sum()
            dk[b, :, g, :] = sum_dk
            dv[b, :, g, :] = sum_dv
    dbias = None if sum_dbias is None else sum_dbias.astype(extras.bias.dtype)
    return dq, dk, dv, dbias, dsinks


def dropout_mask(problem: Problem, seed: int) -> Array:
    """The keep mask of all scores, (batch, q_heads, q_len, kv_len)."""
    mask = np.empty((problem.batch, problem.q_heads, problem.q_len, problem.kv_len), bool)
    columns = range(problem.kv_len)
    for b in range(problem.batch):
        for h in range(problem.q_heads):
            for rows in _tiles(range(problem.q_len), TILE_ROWS):
                tile = kept(seed, problem.drop_below, b, h, rows, columns)
                mask[b, h, rows.start : rows.stop] = tile
    return mask


def _backward_head(
    head: _Head, tensors: list[Array], lse: Array, delta: Array,
    sum_dk: Array, sum_dv: Array, sum_dbias: Array | None,
) -> Array:  # fmt: skip
    """Gradient of q of one head; adds its share to those of k, v and the bias."""
    problem = head.problem
    q, k, v, dout = tensors
    dq = np.zeros_like(q)
    scale = q.dtype.type(problem.scale)
    for rows in _tiles(range(problem.q_len), TILE_ROWS):
        i = slice(rows.start, rows.stop)
        finite_lse = np.where(lse[i] == -np.inf, np.inf, lse[i])[:, None]  # empty rows: p = 0
        for columns in _tiles(visible_keys(problem, rows), TILE_COLUMNS):
            j = slice(columns.start, columns.stop)
            s = _logits(head, rows, columns, q[i], k)
            if s is None:
                continue
            hidden = s == -np.inf
            slope = _softcap_slope(problem, q[i], k[j])
            p = np.exp(np.subtract(s, finite_lse, out=s), out=s)
            np.minimum(p, 1, out=p)  # rounding of a large lse must not grow
            dp = dout[i] @ v[j].T
            if problem.dropout:
                keep = _keep(head, rows, columns) / p.dtype.type(1 - problem.dropout)
                dp *= keep
            ds = np.subtract(dp, delta[i, None], out=dp)
            ds *= p
            ds[hidden] = 0  # whatever v, dout or a bent q k^T hold there
            if problem.dropout:
                p *= keep
            if sum_dbias is not None:
                target = head.tile_of(sum_dbias, rows, columns)
                axes = tuple(axis for axis in (0, 1) if target.shape[axis] == 1)
                target += ds.sum(axis=axes, keepdims=True)
            if slope is not None:
                ds *= np.where(hidden, 0, slope)
            sum_dv[j] += _product(p.T, dout[i], hidden.T)
            sum_dk[j] += _product(ds.T, q[i], hidden.T) * scale
            dq[i] += _product(ds, k[j], hidden) * scale
    return dq


def _tiles(whole: range, size: int) -> Iterator[range]:
    for start in range(whole.start, whole.stop, size):
        yield range(start, min(start + size, whole.stop))


def visible_keys(problem: Problem, rows: range) -> range:
    """Keys that any of these queries sees by causal masking and windows."""
    left, right = problem.band
    first, last = rows.start + problem.offset, rows.stop - 1 + problem.offset
    start = 0 if left is None else max(0, first - left)
    stop = problem.kv_len if right is None else min(problem.kv_len, last + right + 1)
    return range(start, max(start, stop))


def _logits(head: _Head, rows: range, columns: range, queries: Array, keys: Array) -> Array | None:
    """Scores of a tile after softcap, bias and masks, -inf where hidden; None if all are."""
    problem, extras = head.problem, head.extras
    mask = None
    if problem.mask:
        mask = head.tile_of(extras.mask, rows, columns)
        if not mask.any():
            return None
    real = queries.dtype.type
    s: Array = queries @ keys[columns.start : columns.stop].T
    s *= real(problem.scale)
    if problem.softcap is not None:
        s /= real(problem.softcap)
        np.tanh(s, out=s)
        s *= real(problem.softcap)
    if problem.bias is not None:
        s += head.tile_of(extras.bias, rows, columns).astype(s.dtype)
    i = np.arange(rows.start, rows.stop)[:, None]
    j = np.arange(columns.start, columns.stop)
    if problem.alibi:
        distance = np.abs(i + problem.kv_len - problem.q_len - j)
        s -= extras.alibi_slopes[head.b, head.h] * distance.astype(s.dtype)

    left, right = problem.band
    i = i + problem.offset
    if right is not None and columns.stop - 1 > rows.start + problem.offset + right:
        s[j > i + right] = -np.inf
    if left is not None and columns.start < rows.stop - 1 + problem.offset - left:
        s[j < i - left] = -np.inf
    if mask is not None:
        s[np.broadcast_to(~mask, s.shape)] = -np.inf
    return s


def _softcap_slope(problem: Problem, queries: Array, keys: Array) -> Array | None:
    """Derivative of the capped scores with respect to those before."""
    if problem.softcap is None:
        return None
    bent = np.tanh(queries @ keys.T * queries.dtype.type(problem.scale / problem.softcap))
    return 1 - bent * bent


def _keep(head: _Head, rows: range, columns: range) -> Array:
    return kept(head.extras.seed, head.problem.drop_below, head.b, head.h, rows, columns)


def _product(weights: Array, values: Array, hidden: Array) -> Array:
    """Product of weights and values in which a hidden pair has no influence, not even by NaN."""
    special = ~np.isfinite(values).all(axis=1)
    if not special.any():
        return weights @ values
    product = weights @ np.where(special[:, None], 0, values)
    for j in np.flatnonzero(special):
        visible = ~hidden[:, j]
        product[visible] += weights[visible, j, None] * values[j]
    return product
