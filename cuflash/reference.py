"""FlashAttention in NumPy: the page to read first, and what computes NumPy arrays.

The scores of attention, one for each pair of query and key, are too many to keep: at 65,536
tokens they take 16 GiB per head. So they are made tile by tile and used at once.

*Forward.* For a tile of queries, walk over the keys. Softmax needs the maximum and the sum of a
whole row, which are not known before its end; the **online softmax** keeps running ones, and when
the maximum grows, what was summed so far is scaled down by ``exp(old - new)``::

    s   = scale * q k^T                     scores of one tile (softcap, bias, masks: `_scores`)
    m'  = max(m, rowmax(s))                 running maximum
    p   = exp(s - m')
    l'  = l * exp(m - m') + rowsum(p)       running sum
    o'  = o * exp(m - m') + p v             running output

At the end ``out = o / l``, and ``lse = m + ln(l)`` is kept, one number per row.

*Backward.* The probabilities are not kept either: ``p = exp(s - lse)`` makes them again from the
inputs, one tile at a time. With ``D = rowsum(dout * out)``::

    dv += p^T dout      dp = dout v^T      ds = p * (dp - D)      dq += ds k      dk += ds^T q

*Speed.* BLAS does the products. The rest is passes over one tile of scores, which is made in the
same memory every time and fits in the cache of a core; of short sequences one tile holds several
heads. What no query of a tile sees is skipped, and tiles in which nothing is hidden need no masks:
neither causal ones, nor windows, nor what a block mask has as absent or full.

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

TILE_ROWS, TILE_COLUMNS = 256, 512  # queries and keys: 512 KiB of float32


@dataclass(frozen=True)
class _Heads:
    """What is done at once: query heads `h` of batch elements `b`, each with its own kv head.

    Arrays of these heads have the axes (batch, head, row, channel).
    """

    problem: Problem
    extras: Extras
    b: slice
    h: slice

    def tile_of(self, scores: Array, rows: range, columns: range) -> Array:
        """The tile of a mask or a bias; a broadcast axis keeps its length of 1."""
        places = (self.b, self.h, _slice(rows), _slice(columns))
        return scores[tuple(slice(None) if n == 1 else p for n, p in zip(scores.shape, places))]

    def visible(self, rows: range, columns: range) -> Array | None:
        """What a mask shows of a tile; None if all, or without a mask."""
        mask, blocks = self.extras.mask, self.extras.blocks
        if blocks is not None:
            shown: Array | None = blocks.tile(self.b, self.h, rows, columns)
            return shown
        return None if mask is None else self.tile_of(mask, rows, columns)

    def stretches(self, rows: range) -> list[range]:
        """Stretches of keys that these queries may see, each in the order of the keys."""
        seen, blocks = visible_keys(self.problem, rows), self.extras.blocks
        if blocks is None:
            return [seen]
        found = blocks.stretches(self.b, self.h, rows)
        return [range(max(part.start, seen.start), min(part.stop, seen.stop)) for part in found]

    def buffer(self) -> Array:
        """Memory for the scores of one tile.

        Laid out key by key, since NumPy is quicker along queries, each with its own maximum; but
        query by query where a bias, laid out in that way, has to be added.
        """
        problem = self.problem
        heads = len(range(problem.batch)[self.b]), len(range(problem.q_heads)[self.h])
        rows, columns = min(problem.q_len, TILE_ROWS), min(problem.kv_len, TILE_COLUMNS)
        compute = ELEMENT_TYPES[problem.dtype].compute
        if problem.bias is not None:
            return np.empty((*heads, rows, columns), compute)
        return np.empty((*heads, columns, rows), compute).swapaxes(2, 3)

    def keep(self, rows: range, columns: range) -> Array:
        """Which scores of a tile dropout keeps."""
        problem, seed = self.problem, self.extras.seed
        return np.array([
            [kept(seed, problem.drop_limit, b, h, rows, columns)
             for h in range(problem.q_heads)[self.h]]
            for b in range(problem.batch)[self.b]
        ])  # fmt: skip


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
    if out is None:
        out = np.empty(problem.out_shape, element.numpy)
    lse = np.empty(problem.lse_shape, element.compute)
    extras = _per_head(problem, extras)
    for b, g, query_heads in _parts(problem):
        keys, values = _rows(problem, k, b, g), _rows(problem, v, b, g)
        for h in query_heads:
            queries = _rows(problem, q, b, h) * keys.dtype.type(_factor(problem))
            heads = _Heads(problem, extras, b, h)
            buffer = heads.buffer()
            for rows in _row_tiles(problem, extras):
                i = _slice(rows)
                tile, lse[b, h, i] = _forward_rows(heads, rows, queries, keys, values, buffer)
                out[b, i, h] = tile.swapaxes(1, 2)
    return out, lse


def _forward_rows(
    heads: _Heads, rows: range, queries: Array, keys: Array, values: Array, buffer: Array
) -> tuple[Array, Array]:
    """Output and lse of one tile of queries."""
    problem = heads.problem
    shape = (*queries.shape[:2], len(rows))
    m = np.full((*shape, 1), -np.inf, queries.dtype)
    l = np.zeros_like(m)
    o = np.zeros((*shape, problem.value_dim), queries.dtype)
    for columns in _visible_tiles(heads, rows):
        s, hidden, _ = _scores(heads, rows, columns, queries, keys, buffer)
        new_m = np.maximum(m, s.max(axis=-1, keepdims=True))
        safe = np.where(new_m == -np.inf, 0, new_m)
        shrink = np.exp(m - safe)
        s -= safe
        p = np.exp(s, out=s)
        l = l * shrink + p.sum(axis=-1, keepdims=True)
        if problem.dropout:
            p *= heads.keep(rows, columns)
        o *= shrink
        o += _product(p, values[:, :, _slice(columns)], hidden)
        m = new_m

    if problem.sinks:
        sink = heads.extras.sinks[heads.h, None, None]
        top = np.maximum(m, sink)
        safe = np.where(top == -np.inf, 0, top)
        shrink = np.exp(m - safe)
        l, m = l * shrink + np.exp(sink - safe), top
        o *= shrink
    empty = l == 0
    o *= np.where(empty, 0, 1 / ((1 - problem.dropout) * np.where(empty, 1, l)))
    return o, np.where(empty, -np.inf, m + np.log(np.where(empty, 1, l)))[..., 0]


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
    given, extras = extras, _per_head(problem, extras)
    dq, dk, dv = (np.empty(tensor.shape, tensor.dtype) for tensor in (q, k, v))
    sum_dbias = np.zeros(extras.bias.shape, compute) if bias_grad else None
    dsinks = np.zeros(problem.q_heads, compute) if problem.sinks else None
    for b, g, query_heads in _parts(problem):
        keys, values = _rows(problem, k, b, g), _rows(problem, v, b, g)
        sum_dk, sum_dv = np.zeros_like(keys), np.zeros_like(values)
        for h in query_heads:
            heads = _Heads(problem, extras, b, h)
            queries = _rows(problem, q, b, h) * keys.dtype.type(_factor(problem))
            douts = _rows(problem, dout, b, h)
            delta = np.einsum("bhid,bhid->bhi", douts, _rows(problem, out, b, h))
            if dlse is not None:
                delta -= dlse[b, h]
            empty = lse[b, h] == -np.inf
            delta[empty] = 0
            tensors, sums = (queries, keys, values, douts), (sum_dk, sum_dv, sum_dbias)
            sum_dq = _backward_heads(heads, tensors, lse[b, h], delta, sums)
            dq[b, :, h] = sum_dq.swapaxes(1, 2)
            if dsinks is not None:
                share = np.exp(extras.sinks[h, None] - lse[b, h]) * delta
                dsinks[h] -= np.where(empty, 0, share).sum(axis=(0, 2))
        dk[b, :, g], dv[b, :, g] = sum_dk.swapaxes(1, 2), sum_dv.swapaxes(1, 2)
    dbias = None if sum_dbias is None else sum_dbias.astype(extras.bias.dtype)
    if dsinks is not None:
        dsinks = dsinks.astype(given.sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _per_head(problem: Problem, extras: Extras) -> Extras:
    """Slopes as (batch, q_heads) and sinks, in the type that arithmetic is done in."""
    compute, slopes, sinks = ELEMENT_TYPES[problem.dtype].compute, extras.alibi_slopes, extras.sinks
    if slopes is not None:
        slopes = np.broadcast_to(slopes, (problem.batch, problem.q_heads)).astype(compute)
    return extras._replace(
        alibi_slopes=slopes, sinks=None if sinks is None else sinks.astype(compute)
    )


def _backward_heads(
    heads: _Heads, tensors: tuple[Array, ...], lse: Array, delta: Array,
    sums: tuple[Array, Array, Array | None],
) -> Array:  # fmt: skip
    """Gradient of the queries; adds to the sums of those of keys, values and the bias."""
    problem, (q, k, v, dout), (sum_dk, sum_dv, sum_dbias) = heads.problem, tensors, sums
    dq = np.zeros_like(q)
    buffer, second = heads.buffer(), heads.buffer()
    lse = np.where(lse == -np.inf, np.inf, lse)[..., None]  # empty rows: p = 0
    for rows in _row_tiles(problem, heads.extras):
        i = _slice(rows)
        for columns in _visible_tiles(heads, rows):
            j = _slice(columns)
            s, hidden, slope = _scores(heads, rows, columns, q, k, buffer)
            np.minimum(s, lse[:, :, i], out=s)  # p <= 1, however a large lse was rounded
            s -= lse[:, :, i]
            p = np.exp(s, out=s)
            dp = second[:, :, : len(rows), : len(columns)]
            np.matmul(dout[:, :, i], v[:, :, j].swapaxes(2, 3), out=dp)
            if problem.dropout:
                keep = heads.keep(rows, columns) / p.dtype.type(1 - problem.dropout)
                dp *= keep
            dp -= delta[:, :, i, None]
            ds = np.multiply(p, dp, out=dp)
            if hidden is not None:
                np.copyto(ds, 0, where=hidden)  # whatever v, dout or a bent q k^T hold there
            if problem.dropout:
                p *= keep
            if sum_dbias is not None:
                target = heads.tile_of(sum_dbias, rows, columns)
                axes = tuple(axis for axis, n in enumerate(target.shape) if n == 1)
                target += ds.sum(axis=axes, keepdims=True)
            if slope is not None:
                ds *= slope if hidden is None else np.where(hidden, 0, slope)
            hidden_t = None if hidden is None else hidden.swapaxes(2, 3)
            sum_dv[:, :, j] += _product(p.swapaxes(2, 3), dout[:, :, i], hidden_t)
            sum_dk[:, :, j] += _product(ds.swapaxes(2, 3), q[:, :, i], hidden_t)
            dq[:, :, i] += _product(ds, k[:, :, j], hidden)
    dq *= q.dtype.type(_factor(problem))
    return dq


def dropout_mask(problem: Problem, seed: int) -> Array:
    """The keep mask of all scores, (batch, q_heads, q_len, kv_len)."""
    mask = np.empty(problem.score_shape, bool)
    columns = range(problem.kv_len)
    for b, h in np.ndindex(mask.shape[:2]):
        for rows in _tiles(range(problem.q_len), TILE_ROWS):
            mask[b, h, _slice(rows)] = kept(seed, problem.drop_limit, b, h, rows, columns)
    return mask


def _parts(problem: Problem) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Batch elements, kv heads, and the query heads of these: a first of each group, a second, ...

    Of long sequences one head is enough to do at once, of short ones as many as fill a tile.
    """
    tile = min(problem.q_len, TILE_ROWS) * min(problem.kv_len, TILE_COLUMNS)
    count = max(1, TILE_ROWS * TILE_COLUMNS // max(1, tile))
    group = problem.q_heads // max(1, problem.kv_heads)
    step = max(1, min(count, problem.kv_heads))
    for b in _tiles(range(problem.batch), count // step):
        for g in _tiles(range(problem.kv_heads), step):
            first, stop = g.start * group, g.stop * group
            yield _slice(b), _slice(g), [slice(first + r, stop, group) for r in range(group)]


def _rows(problem: Problem, tensor: Array, b: slice, heads: slice) -> Array:
    """(batch, head, row, channel) of some heads, in the type that arithmetic is done in."""
    compute = ELEMENT_TYPES[problem.dtype].compute
    return np.ascontiguousarray(tensor[b, :, heads].swapaxes(1, 2), dtype=compute)


def _factor(problem: Problem) -> float:
    """Queries are multiplied by this, so that scores need not be: with it dk is ds^T q."""
    return problem.scale / (1 if problem.softcap is None else problem.softcap)


def _tiles(whole: range, size: int) -> Iterator[range]:
    for start in range(whole.start, whole.stop, size):
        yield range(start, min(start + size, whole.stop))


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)


def visible_keys(problem: Problem, rows: range) -> range:
    """Keys that any of these queries sees by causal masking and windows."""
    left, right = problem.band
    first, last = rows.start + problem.offset, rows.stop - 1 + problem.offset
    start = 0 if left is None else max(0, first - left)
    stop = problem.kv_len if right is None else min(problem.kv_len, last + right + 1)
    return range(start, max(start, stop))


def _visible_tiles(heads: _Heads, rows: range) -> Iterator[range]:
    """The columns of all tiles in which something is visible."""
    mask = heads.extras.mask
    for keys in heads.stretches(rows):
        for columns in _tiles(keys, TILE_COLUMNS):
            if mask is None or heads.tile_of(mask, rows, columns).any():
                yield columns


def _row_tiles(problem: Problem, extras: Extras) -> Iterator[range]:
    """Tiles of queries; those of a block mask hold whole blocks, few of them."""
    size = TILE_ROWS
    if extras.blocks is not None:
        rows = extras.blocks.block_size[0]
        size = rows * max(1, TILE_ROWS // 2 // rows)
    return _tiles(range(problem.q_len), size)


def _scores(
    heads: _Heads, rows: range, columns: range, queries: Array, keys: Array, buffer: Array
) -> tuple[Array, Array | None, Array | None]:
    """Scores of a tile after softcap, bias and masks, made in the buffer; -inf where hidden.

    Also which are hidden, None if none can be, and the slope of the softcap, None without one.
    """
    problem, extras = heads.problem, heads.extras
    s, slope = buffer[:, :, : len(rows), : len(columns)], None
    np.matmul(queries[:, :, _slice(rows)], keys[:, :, _slice(columns)].swapaxes(2, 3), out=s)
    if problem.softcap is not None:
        np.tanh(s, out=s)
        slope = problem.softcap * (1 - s * s)
        s *= problem.softcap
    if problem.bias is not None:
        s += heads.tile_of(extras.bias, rows, columns).astype(s.dtype)
    i = np.arange(rows.start, rows.stop) + problem.offset
    j = np.arange(columns.start, columns.stop)[:, None]
    if problem.alibi:
        aligned = i - problem.offset + problem.kv_len - problem.q_len
        slopes = extras.alibi_slopes[heads.b, heads.h, None, None]
        s -= slopes * np.abs(aligned - j).T.astype(s.dtype)
    left, right = problem.band
    may_hide = problem.bias is not None
    if right is not None and columns.stop - 1 > i[0] + right:
        np.copyto(s, -np.inf, where=(j > i + right).T)
        may_hide = True
    if left is not None and columns.start < i[-1] - left:
        np.copyto(s, -np.inf, where=(j < i - left).T)
        may_hide = True
    visible = heads.visible(rows, columns)
    if visible is not None:
        np.copyto(s, -np.inf, where=~visible)
        may_hide = True
    return s, s == -np.inf if may_hide else None, slope


def _product(weights: Array, values: Array, hidden: Array | None) -> Array:
    """Product of weights and values in which a hidden pair has no influence, not even by NaN."""
    if hidden is None or np.isfinite(values).all():
        return np.asarray(weights @ values)
    special = ~np.isfinite(values).all(axis=-1)
    product: Array = weights @ np.where(special[..., None], 0, values)
    for b, h, j in np.argwhere(special & ~hidden.all(axis=2)):
        visible = ~hidden[b, h, :, j]
        product[b, h, visible] += weights[b, h, visible, j, None] * values[b, h, j]
    return product
