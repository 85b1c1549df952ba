"""The named problems: sizes and options that every dtype and both array libraries must pass.

Lengths lie on either side of the tile sizes, options come alone and in pairs. An option that is
an array is described by its axes: "b11k" is an array of shape (batch, 1, 1, kv_len).
"""

import dataclasses
import functools
import math

import numpy as np
import textbook
from arrays import DTYPES

SEED = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    q_len: int
    kv_len: int
    head_dim: int = 64
    value_dim: int | None = None  # None: head_dim
    batch: int = 1
    q_heads: int = 2
    kv_heads: int | None = None  # None: q_heads
    causal: bool | str = False
    window: tuple | None = None
    mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None  # None: the dtype of q
    alibi_slopes: str | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    dropout: float = 0.0
    magnitude: float = 1.0

    def shape(self, axes):
        """Return the shape that "b11k" and the like stand for."""
        sizes = {"b": self.batch, "h": self.q_heads, "q": self.q_len, "k": self.kv_len, "1": 1}
        return tuple(sizes[axis] for axis in axes)


def plain_sizes():
    return [
        Problem("one_by_one", 1, 1, 16),
        Problem("head_dim_1", 3, 5, 1),
        Problem("head_dim_1_values_3", 17, 33, 1, 3),
        Problem("head_dim_3", 33, 17, 3),
        Problem("head_dim_16_values_40", 65, 65, 16, 40),
        Problem("head_dim_40", 65, 127, 40, batch=2),
        Problem("odd_below_tile", 127, 127),
        Problem("odd_above_tile", 129, 129, 128),
        Problem("one_query", 1, 129, q_heads=4, kv_heads=2),
        Problem("one_key", 129, 1),
        Problem("many_keys", 5, 777, q_heads=1),
        Problem("head_dim_80", 65, 66, 80),
        Problem("head_dim_96", 127, 65, 96),
        Problem("head_dim_192_values_128", 129, 127, 192, 128, q_heads=1),
        Problem("head_dim_256", 65, 129, 256, q_heads=1),
        Problem("head_dim_512", 33, 65, 512, q_heads=1),
        Problem("head_dim_64_values_512", 33, 65, 64, 512, q_heads=1),
        Problem("grouped", 127, 129, batch=2, q_heads=4, kv_heads=2),
        Problem("one_kv_head", 65, 65, 40, q_heads=6, kv_heads=1),
        Problem("grouped_values", 33, 40, 40, 64, q_heads=8, kv_heads=2),
        Problem("large_logits", 65, 65, magnitude=8.0),
    ]


def single_options():
    return [
        Problem("causal", 129, 129, causal=True),
        Problem("causal_more_keys", 65, 129, 128, causal=True),
        Problem("causal_empty_rows", 129, 65, causal=True),
        Problem("causal_top_left", 65, 129, causal="top-left"),
        Problem("causal_top_left_more_queries", 129, 65, causal="top-left"),
        Problem("window", 129, 129, window=(16, 9)),
        Problem("window_left", 127, 129, window=(7, None)),
        Problem("window_right", 127, 129, window=(None, 5)),
        Problem("window_empty_rows", 129, 65, window=(0, 0)),
        Problem("mask_full", 65, 129, mask="bhqk"),
        Problem("mask_padding", 65, 129, batch=2, mask="b11k"),
        Problem("mask_empty_rows", 65, 127, mask="qk"),
        Problem("bias_full", 65, 129, bias="bhqk"),
        Problem("bias_per_head", 65, 127, batch=2, bias="1h1k"),
        Problem("bias_float32", 65, 65, batch=2, bias="b11k", bias_dtype="float32"),
        Problem("bias_two_axes", 33, 700, q_heads=1, bias="qk"),
        Problem("alibi", 65, 129, q_heads=4, alibi_slopes="h"),
        Problem("alibi_batch", 129, 65, batch=2, alibi_slopes="bh"),
        Problem("softcap", 65, 129, softcap=2.0, magnitude=1.5),
        Problem("sinks", 65, 129, sinks=True),
        Problem("scale_negative", 65, 65, scale=-0.25),
        Problem("scale_zero", 65, 65, scale=0.0),
        Problem("dropout", 65, 129, dropout=0.25),
    ]


def combined_options():
    return [
        Problem("window_left_causal", 129, 129, 40, causal=True, window=(9, None)),
        Problem("window_top_left", 127, 129, 16, causal="top-left", window=(8, None)),
        Problem("grouped_causal_sinks", 65, 129, q_heads=4, kv_heads=1, causal=True, sinks=True),
        Problem("empty_rows_sinks", 129, 65, 16, causal=True, sinks=True, batch=2),
        Problem("mask_causal_softcap", 65, 65, mask="11qk", causal=True, softcap=3.0),
        Problem("mask_bias", 65, 129, 16, mask="b11k", bias="hqk", batch=2),
        Problem("alibi_window_softcap", 129, 129, 16, alibi_slopes="h", window=(30, 3),
                softcap=5.0),
        Problem("bias_softcap_grouped", 65, 65, 96, q_heads=4, kv_heads=2, bias="11q1",
                softcap=1.0),
        Problem("dropout_causal_grouped", 65, 129, 128, q_heads=4, kv_heads=2, causal=True,
                dropout=0.5),
        Problem("dropout_mask_sinks", 65, 66, 40, mask="b1qk", batch=2, dropout=0.1, sinks=True),
        Problem("alibi_bias_scale", 33, 65, 80, alibi_slopes="h", bias="b1qk", scale=0.3),
        Problem("everything", 65, 129, 64, 40, batch=2, q_heads=4, kv_heads=2, causal=True,
                window=(70, 3), mask="bhqk", bias="1hqk", alibi_slopes="bh", softcap=4.0,
                sinks=True, scale=0.2, dropout=0.2),
        Problem("everything_empty_rows", 129, 65, 16, batch=2, q_heads=2, kv_heads=1,
                causal="top-left", window=(3, 5), mask="b1qk", bias="qk", alibi_slopes="h",
                softcap=4.0, sinks=True, dropout=0.2),
    ]


PROBLEMS = {
    problem.name: problem for problem in plain_sizes() + single_options() + combined_options()
}


# On a GPU each dtype of a problem compiles kernels: these run in all dtypes, the others in one.
IN_ALL_DTYPES = ("odd_above_tile", "grouped", "head_dim_256", "causal", "window", "mask_full",
                 "bias_full", "softcap", "everything")  # fmt: skip
ROTATION = ("float16", "bfloat16", "float32", "float16", "bfloat16", "float32", "float64")


def usual_on_gpu(name, dtype_name):
    """Return whether a GPU run without --slow has this problem in this dtype."""
    turn = ROTATION[list(PROBLEMS).index(name) % len(ROTATION)]
    return name in IN_ALL_DTYPES or dtype_name == turn


def make_inputs(problem, dtype):
    """Return q, k, v, dout and dlse of a problem as a dict of NumPy arrays."""
    rng = np.random.default_rng(list(problem.name.encode()))
    p = problem
    kv_heads, value_dim = p.kv_heads or p.q_heads, p.value_dim or p.head_dim

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    inputs = {
        "q": draw(p.batch, p.q_len, p.q_heads, p.head_dim) * np.array(p.magnitude, dtype),
        "k": draw(p.batch, p.kv_len, kv_heads, p.head_dim),
        "v": draw(p.batch, p.kv_len, kv_heads, value_dim),
        "dout": draw(p.batch, p.q_len, p.q_heads, value_dim),
    }
    wide = np.float64 if dtype == np.float64 else np.float32
    inputs["dlse"] = rng.standard_normal((p.batch, p.q_heads, p.q_len)).astype(wide)
    return inputs


def make_options(problem, dtype):
    """Return the options of a problem, those that are given, as keyword arguments."""
    rng = np.random.default_rng([*problem.name.encode(), 1])
    p = problem
    options = {"causal": p.causal, "window": p.window, "softcap": p.softcap, "scale": p.scale}
    if p.dropout:
        options |= {"dropout": p.dropout, "seed": SEED}
    if p.mask:
        options["mask"] = rng.random(p.shape(p.mask)) < 0.7
        if "q" in p.mask:
            options["mask"][..., ::7, :] = False
    if p.bias:
        options["bias"] = rng.standard_normal(p.shape(p.bias)).astype(p.bias_dtype or dtype)
    if p.alibi_slopes:
        drawn = rng.random(p.shape(p.alibi_slopes))
        options["alibi_slopes"] = (0.5 * drawn).astype(np.float32)
    if p.sinks:
        options["sinks"] = rng.standard_normal(p.q_heads).astype(np.float32)
    return options


@functools.lru_cache(maxsize=8)
def make(name, dtype_name):
    """Return the inputs, the options, and the three textbook answers that make a budget."""
    problem, dtype = PROBLEMS[name], DTYPES[dtype_name]
    inputs, options = make_inputs(problem, dtype), make_options(problem, dtype)
    answers = [
        function(**inputs, **options)
        for function in (textbook.truth, textbook.plain, textbook.magnitude)
    ]
    assert all(math.isfinite(answer["out"].sum()) for answer in answers)
    return inputs, options, answers
