"""Attention as a textbook writes it: the whole score matrix at once, forward and gradients.

`truth` works in float64 (in long double for float64 inputs), `plain` does the same steps as a
user's plain code would, rounding to the input dtype after each one: its error is the budget that
cuflash gets. Arrays keep four axes (batch, seq, heads, head_dim); the options are cuflash's own.
"""

import dataclasses

import numpy as np
from philox import keep_mask


@dataclasses.dataclass(frozen=True)
class Forward:
    """What the forward pass leaves behind, heads before sequence, one kv head per query head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    p: np.ndarray  # probabilities before dropout
    kept: np.ndarray  # keep / (1 - dropout)
    slope: np.ndarray  # derivative of the softcap
    sink: np.ndarray  # probability of the sink
    out: np.ndarray
    lse: np.ndarray
    scale: float
    group: int


def heads_first(array, number):
    return np.moveaxis(np.asarray(array).astype(number), 2, 1)


def visible(q_len, kv_len, causal=False, window=None, mask=None):
    """Return which keys each row sees, broadcastable to (batch, q_heads, q_len, kv_len)."""
    i, j = np.ogrid[:q_len, :kv_len]
    here = i if causal == "top-left" else i + kv_len - q_len
    seen = np.ones((q_len, kv_len), bool)
    if causal:
        seen = seen & (j <= here)
    if window is not None:
        left, right = window
        seen = seen & (j >= here - left) if left is not None else seen
        seen = seen & (j <= here + right) if right is not None else seen
    return seen if mask is None else seen & mask


def scores(q, k, scale, softcap, bias, alibi_slopes, number, rounded):
    """Return the scores before masking and the derivative of the softcap."""
    s = rounded(rounded(q @ k.swapaxes(-1, -2)) * number(scale))
    slope = np.ones((), number)
    if softcap is not None:
        s = rounded(number(softcap) * np.tanh(s / number(softcap)))
        slope = 1 - (s / number(softcap)) ** 2
    if bias is not None:
        s = rounded(s + np.asarray(bias).astype(number))
    if alibi_slopes is not None:
        i, j = np.ogrid[: q.shape[2], : k.shape[2]]
        distance = abs(i + k.shape[2] - q.shape[2] - j).astype(number)
        s = rounded(s - np.asarray(alibi_slopes).astype(number)[..., None, None] * distance)
    return s, slope


def softmax(s, sinks):
    """Return probabilities, the sink's probability and the log of the sum of exponentials."""
    sink = np.full((1, 1, 1), -np.inf, s.dtype)
    if sinks is not None:
        sink = np.asarray(sinks).astype(s.dtype)[:, None, None]
    top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(top == -np.inf, 0, top)
    e, e_sink = np.exp(s - top), np.exp(sink - top)
    total = e.sum(axis=-1, keepdims=True) + e_sink
    safe = np.where(total == 0, 1, total)
    return e / safe, e_sink / safe, np.where(total == 0, -np.inf, top + np.log(safe))[..., 0]


def forward(q, k, v, number, rounded, *, causal=False, window=None, mask=None, bias=None,
            alibi_slopes=None, softcap=None, sinks=None, scale=None, dropout=0.0, seed=None):
    """Return the Forward of one call, computed in `number` and rounded at every step."""
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, group = k.shape[1], q_heads // k.shape[2]
    scale = float(head_dim) ** -0.5 if scale is None else scale
    q, k, v = (heads_first(array, number) for array in (q, k, v))
    k, v = (np.repeat(array, group, axis=1) for array in (k, v))
    s, slope = scores(q, k, scale, softcap, bias, alibi_slopes, number, rounded)
    s = np.where(visible(q_len, kv_len, causal, window, mask), s, number(-np.inf))
    p, sink, lse = softmax(s, sinks)
    p, sink = rounded(p), rounded(sink)
    kept = np.ones((), number)
    if dropout:
        keep = keep_mask(batch, q_heads, q_len, kv_len, dropout, seed)
        kept = keep.astype(number) / (1 - number(dropout))
    out = rounded(rounded(p * kept) @ v)
    return Forward(q, k, v, p, kept, slope, sink, out, lse, number(scale), group)


def unbroadcast(gradient, shape):
    """Return gradient summed over the axes along which an array of `shape` was broadcast."""
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return gradient.sum(axis=axes, keepdims=True)


def backward(f, dout, dlse, rounded, minus=-1):
    """Return dq, dk, dv with all their query heads, ds (for dbias), and the rows of dsinks.

    delta is taken from `out`, as attention_backward must do, which is given no more than that.
    """
    dp = rounded(rounded(dout @ f.v.swapaxes(-1, -2)) * f.kept)
    dv = rounded(rounded(f.p * f.kept).swapaxes(-1, -2) @ dout)
    delta = minus * (dout * f.out).sum(axis=-1, keepdims=True) + dlse[..., None]
    ds = rounded(f.p * (dp + delta))
    dsinks = f.sink * delta
    inner = rounded(rounded(ds * f.slope) * f.scale)
    return rounded(inner @ f.k), rounded(inner.swapaxes(-1, -2) @ f.q), dv, ds, dsinks


def gathered(f, parts, options, rounded):
    """Return the gradients in the layout of their inputs, None where an option is absent."""
    dq, dk, dv, ds, dsinks = parts
    bias, sinks = options.get("bias"), options.get("sinks")

    def per_kv_head(array):
        batch, heads, length, dim = array.shape
        return array.reshape(batch, heads // f.group, f.group, length, dim).sum(axis=2)

    answer = {"dq": np.moveaxis(dq, 1, 2), "dbias": None, "dsinks": None}
    answer["dk"] = rounded(np.moveaxis(per_kv_head(dk), 1, 2))
    answer["dv"] = rounded(np.moveaxis(per_kv_head(dv), 1, 2))
    if bias is not None:
        answer["dbias"] = unbroadcast(ds, bias.shape)
    if sinks is not None:
        answer["dsinks"] = dsinks.sum(axis=(0, 2, 3))
    return answer


def exactly(array):
    return array


def rounding_to(dtype, number):
    """Return the function that rounds to dtype and comes back to the type `number`."""

    def rounded(array):
        with np.errstate(over="ignore"):
            return np.asarray(array).astype(dtype).astype(number)

    return rounded


def number_types(dtype):
    """Return the types in which the truth and the plain computation of a dtype are done."""
    if dtype == np.float64:
        return np.longdouble, np.float64
    return np.float64, np.float32


def answer(number, rounded, q, k, v, dout=None, dlse=None, **options):
    """Return a dict: out, lse and, when dout is given, the gradients."""
    f = forward(q, k, v, number, rounded, **options)
    result = {"out": np.moveaxis(f.out, 1, 2), "lse": f.lse}
    if dout is not None:
        dlse = np.zeros(f.lse.shape) if dlse is None else np.where(f.lse == -np.inf, 0, dlse)
        parts = backward(f, heads_first(dout, number), dlse.astype(number), rounded)
        result |= gathered(f, parts, options, rounded)
    return result


def truth(q, k, v, dout=None, dlse=None, **options):
    """Return the right values: a dict of out, lse, dq, dk, dv, dbias, dsinks."""
    number = number_types(q.dtype)[0]
    return answer(number, exactly, q, k, v, dout, dlse, **options)


def plain(q, k, v, dout=None, dlse=None, **options):
    """Return the same dict as a user's plain code would compute it in the inputs' dtype."""
    number = number_types(q.dtype)[1]
    return answer(number, rounding_to(q.dtype, number), q, k, v, dout, dlse, **options)


def magnitude(q, k, v, dout=None, dlse=None, **options):
    """Return the same dict with all terms taken as positive: how much may cancel."""
    f = forward(q, k, v, np.float64, exactly, **options)
    f = dataclasses.replace(f, q=abs(f.q), k=abs(f.k), v=abs(f.v), scale=abs(f.scale))
    f = dataclasses.replace(f, out=(f.p * f.kept) @ f.v)
    raw = f.scale * (f.q @ f.k.swapaxes(-1, -2))
    result = {"out": np.moveaxis(f.out, 1, 2), "lse": raw.max(axis=-1, initial=0)}
    if dout is not None:
        dlse = np.zeros(f.lse.shape) if dlse is None else abs(np.asarray(dlse, np.float64))
        parts = backward(f, abs(heads_first(dout, np.float64)), dlse, exactly, minus=1)
        result |= gathered(f, parts, options, exactly)
    return result
