"""The public functions of dense attention: what they promise, and a few lines each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuflash import _execute, _merge
from cuflash._execute import Gradients

_SHARED = (
    "causal", "window", "mask", "bias", "alibi_slopes", "softcap", "sinks", "scale", "dropout",
    "seed", "precision",
)  # fmt: skip


def _shared(arguments: dict[str, Any]) -> dict[str, Any]:
    """The keywords that all functions have in common, out of one's arguments."""
    return {name: arguments[name] for name in _SHARED}


def attention(
    q: Any, k: Any, v: Any, *,
    causal: bool | str = False, window: tuple[int | None, int | None] | None = None,
    mask: Any = None, bias: Any = None, alibi_slopes: Any = None, softcap: float | None = None,
    sinks: Any = None, scale: float | None = None, dropout: float = 0.0, seed: int | None = None,
    precision: str = "ieee", return_lse: bool = False, out: Any = None,
) -> Any:  # fmt: skip
    """Exact attention, ``softmax(scale * q k^T) v``, in memory linear in the sequence.

    Arrays of NumPy are computed on the CPU, arrays of CuPy and CUDA arrays of any library with
    DLPack on their GPU. Every combination of options works.

    Parameters
    ----------
    q : (batch, q_len, q_heads, head_dim) array
        float16, bfloat16, float32 or float64; any strides; head_dim from 1 to 512. Without the
        batch axis, for all of q, k and v, the results have none either.
    k : (batch, kv_len, kv_heads, head_dim) array
        Query head h uses key head ``h // (q_heads // kv_heads)``.
    v : (batch, kv_len, kv_heads, value_dim) array
        value_dim may differ from head_dim.
    causal : bool or {"bottom-right", "top-left"}
        True or "bottom-right": query i sees keys ``j <= i + kv_len - q_len``, so the last query
        sees all keys. "top-left": ``j <= i``.
    window : (left, right), optional
        Query i sees keys from ``i + off - left`` to ``i + off + right``, both included, with the
        offset `off` of `causal` (kv_len - q_len unless "top-left"). None leaves an end open.
    mask : bool array or BlockMask, optional
        True where a key is visible; broadcastable to (batch, q_heads, q_len, kv_len). A
        :class:`BlockMask` makes time and memory traffic fall with the blocks that are present.
    bias : floating array, optional
        Added to the scaled (and capped) scores; broadcastable like `mask`.
    alibi_slopes : (q_heads,) or (batch, q_heads) array, optional
        ``slope * |i + kv_len - q_len - j|`` is subtracted from the scores.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, before bias and masks.
    sinks : (q_heads,) array, optional
        Logits of one more key per head, which takes its share of the softmax but has no value.
    scale : float, optional
        Factor of the scores; ``1 / sqrt(head_dim)`` if None. 0 and negative values are legal.
    dropout : float
        Probability in [0, 1) with which a softmax weight is dropped, to the nearest 2^-15.
    seed : int, optional
        Of the dropout, in [0, 2^64). None draws one: where the backward pass follows, draw it with
        :func:`new_seed` and give it to both.
    precision : {"ieee", "tf32"}
        How float32 arrays are multiplied. "ieee": in float32. "tf32": factors may be rounded to 11
        significant bits for the tensor cores (sm_80 and newer, head_dim and value_dim multiples of
        8 up to 256), which is several times faster. Other dtypes are not concerned. Largest errors
        with standard normal inputs, causal, length 2048: of `out` 1e-6 and 2e-3 (bfloat16 arrays:
        8e-3), of gradients 2e-6 and 3e-3.
    return_lse : bool
        Whether to return `lse` too.
    out : (batch, q_len, q_heads, value_dim) array, optional
        Where to write the output.

    Returns
    -------
    out : (batch, q_len, q_heads, value_dim) array
        In the dtype and library of q. Rows that see no key are 0.
    lse : (batch, q_heads, q_len) array
        If `return_lse`: natural logarithm of the sum of the exponentiated scores, float32 (float64
        for float64). Rows that see no key have -inf. Dropout does not touch it.

    Raises
    ------
    TypeError, ValueError
        If an argument breaks a rule: named with its value, before anything is launched.

    Notes
    -----
    Keys that are not visible have no influence, NaN and infinity included. The online softmax
    over tiles is that of FlashAttention [1]_; sums are made in float32 (float64 for float64), and
    equal inputs give equal bits.

    References
    ----------
    .. [1] Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, https://arxiv.org/abs/2205.14135

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 3, 2, 8), np.float32)  # equal scores: each row is a mean of visible values
    >>> v = np.arange(3, dtype=np.float32)[None, :, None, None] + np.zeros_like(q)
    >>> out, lse = cuflash.attention(q, q, v, causal=True, return_lse=True)
    >>> [float(x) for x in out[0, :, 0, 0]]
    [0.0, 0.5, 1.0]
    >>> np.exp(lse[0, 0]).round(3).tolist()
    [1.0, 2.0, 3.0]
    """
    options = _shared(locals())
    return _execute.attention(q, k, v, options, return_lse, out)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
    causal: bool | str = False, window: tuple[int | None, int | None] | None = None,
    mask: Any = None, bias: Any = None, alibi_slopes: Any = None, softcap: float | None = None,
    sinks: Any = None, scale: float | None = None, dropout: float = 0.0, seed: int | None = None,
    precision: str = "ieee", dlse: Any = None, bias_grad: bool = False,
    deterministic: bool = False,
) -> Gradients:  # fmt: skip
    """Gradients of :func:`attention`, recomputed from its inputs, `out` and `lse`.

    Parameters
    ----------
    dout : (batch, q_len, q_heads, value_dim) array
        Gradient of the loss with respect to `out`.
    q, k, v, out, lse : array
        Inputs and results of the forward call; `lse` as ``return_lse=True`` gives it.
    causal, window, mask, bias, alibi_slopes, softcap, sinks, scale, dropout, seed, precision
        As in the forward call. `seed` is required where `dropout` is not 0.
    dlse : (batch, q_heads, q_len) array, optional
        Gradient of the loss with respect to `lse`, in the dtype of `lse`.
    bias_grad : bool
        Whether to compute the gradient of `bias`.
    deterministic : bool
        Whether equal inputs must give equal bits. Else key tiles may add their shares of dq in any
        order, which is faster.

    Returns
    -------
    Gradients
        ``(dq, dk, dv, dbias, dsinks)``, with the shapes and dtypes of what they belong to. Rows
        that see no key have zero gradients.

    Raises
    ------
    TypeError, ValueError
        If an argument breaks a rule: named with its value, before anything is launched.

    Notes
    -----
    With the probabilities ``p = exp(s - lse)``, the scores' gradients are
    ``ds = p * (dout v^T - rowsum(dout * out) + dlse)``. Source: Dao et al., 2022, algorithm 4.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 1, 5, 2, 8))
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> grads = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> bool(np.allclose(grads.dv[0, -1], dout[0, -1] * np.exp(
    ...     (q[0, -1] * k[0, -1]).sum(-1) / np.sqrt(8) - lse[0, :, -1])[:, None]))
    True
    """
    options = _shared(locals())
    return _execute.attention_backward(
        dout, q, k, v, out, lse, options, dlse, bias_grad, deterministic
    )


def merge_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over all keys, from results over disjoint parts of them.

    Parameters
    ----------
    outs : sequence of (batch, q_len, q_heads, value_dim) arrays
        Outputs of :func:`attention` with the same queries and different keys; without the batch
        axis too.
    lses : sequence of (batch, q_heads, q_len) arrays
        Their `lse`. A part that sees no key, (0, -inf), changes nothing.

    Returns
    -------
    out, lse : array
        As one call over all keys would give them.

    Raises
    ------
    TypeError, ValueError
        If shapes, dtypes or devices do not agree.

    Notes
    -----
    With weights ``w_n = exp(lse_n - lse)``: ``out = sum w_n out_n``. The gradients of a part are
    ``dout_n = w_n dout`` and ``dlse_n = w_n (dlse + rowsum(dout * (out_n - out)))``, and
    ``attention_backward(dout_n, ..., out_n, lse_n, dlse=dlse_n)`` takes them on. The same comes of
    ``attention_backward(dout, ..., out, lse, dlse=dlse)`` with the keys of one part and the merged
    results. Source: Milakov and Gimelshein, 2018; Dao et al., 2022, section 3.1.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8))
    >>> left = cuflash.attention(q, k[:, :2], v[:, :2], return_lse=True)
    >>> right = cuflash.attention(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> out, lse = cuflash.merge_states(*zip(left, right))
    >>> bool(np.allclose(out, cuflash.attention(q, k, v)))
    True
    """
    return _merge.merge_states(outs, lses)


def dropout_mask(
    batch: int, q_heads: int, q_len: int, kv_len: int, dropout: float, seed: int, *,
    like: Any = None,
) -> Any:  # fmt: skip
    """The softmax weights that dropout keeps, bit for bit as all kernels decide it.

    Parameters
    ----------
    batch, q_heads, q_len, kv_len : int
    dropout : float
        Probability in [0, 1).
    seed : int
        In [0, 2^64).
    like : array or module, optional
        A CUDA array, or the module ``cupy``: the mask is made on its GPU. Else by NumPy.

    Returns
    -------
    (batch, q_heads, q_len, kv_len) bool array
        True where a weight is kept (and divided by ``1 - dropout``).

    Raises
    ------
    TypeError, ValueError
        If an argument breaks a rule.

    Notes
    -----
    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on
    (seed, b, h, i, j): an element's decision depends on nothing else.

    Examples
    --------
    >>> import cuflash
    >>> bool(cuflash.dropout_mask(1, 8, 128, 128, 0.25, seed=1).mean().round(2) == 0.75)
    True
    """
    return _execute.dropout_mask((batch, q_heads, q_len, kv_len), dropout, seed, like)


def explain(
    q: Any, k: Any, v: Any, *,
    causal: bool | str = False, window: tuple[int | None, int | None] | None = None,
    mask: Any = None, bias: Any = None, alibi_slopes: Any = None, softcap: float | None = None,
    sinks: Any = None, scale: float | None = None, dropout: float = 0.0, seed: int | None = None,
    precision: str = "ieee", arch: int | None = None,
) -> Any:  # fmt: skip
    """How a call of :func:`attention` and its gradient would run: kernels, tiles, memory traffic.

    Shown for arrays with aligned, contiguous rows; others get narrower memory accesses.

    Parameters
    ----------
    q, k, v : array
        As in :func:`attention`.
    causal, window, mask, bias, alibi_slopes, softcap, sinks, scale, dropout, seed, precision
        As in :func:`attention`.
    arch : int, optional
        Plan for a GPU of this architecture (90 for sm_90), which need not be present.

    Returns
    -------
    Explanation
        Print it. Attributes: `kernel` (name of the forward kernel), `plans` (one for each launch,
        forward first), `builds` (registers, spills; empty where no compiler is installed).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 1024, 8, 64), np.float32)
    >>> cuflash.explain(q, q, q).kernel
    'reference'
    >>> cuflash.explain(q, q, q, arch=90).kernel
    'attention_forward_generic'
    """
    options = _shared(locals())
    return _execute.explain(q, k, v, options, arch)
