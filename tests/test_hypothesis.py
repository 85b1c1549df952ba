"""The long tail: drawn shapes, strides and combinations of options against the textbook."""

import budget
import hypothesis
import numpy as np
import pytest
from arrays import DTYPES
from hypothesis import strategies as st

import cuflash

SETTINGS = hypothesis.settings(
    deadline=None, max_examples=150, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
HEAD_DIMS = [1, 3, 8, 16, 17, 40]


@st.composite
def sizes(draw, head_dims):
    """Return batch, q_len, kv_len, q_heads, kv_heads, head_dim and value_dim."""
    kv_heads = draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(1, 3)),
        "q_len": draw(st.integers(1, 40)),
        "kv_len": draw(st.integers(1, 40)),
        "q_heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
        "value_dim": draw(st.sampled_from(head_dims)),
    }


def broadcastable(draw, size, fewest=2):
    """Return a shape that broadcasts to (batch, q_heads, q_len, kv_len)."""
    full = (size["batch"], size["q_heads"], size["q_len"], size["kv_len"])
    shape = tuple(draw(st.sampled_from([1, length])) for length in full)
    return shape[draw(st.integers(0, 4 - fewest)) :]


def strided(draw, array):
    """Return the same numbers in another layout: axes permuted in memory, reversed, spaced."""
    order = draw(st.permutations(range(array.ndim)))
    array = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, 1, -1, 2]))
        if step == -1:
            array = np.flip(np.flip(array, axis).copy(), axis)
        elif step == 2:
            array = np.repeat(array, 2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]
    return array


@st.composite
def options(draw, size, rng, dtype):
    """Return any combination of options, as keyword arguments."""
    chosen = {}
    if draw(st.booleans()):
        chosen["causal"] = draw(st.sampled_from([True, "top-left"]))
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 45)
        chosen["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        shape = broadcastable(draw, size)
        chosen["mask"] = strided(draw, rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9])))
    if draw(st.booleans()):
        shape, kind = broadcastable(draw, size), draw(st.sampled_from([dtype, "float32"]))
        chosen["bias"] = strided(draw, rng.standard_normal(shape).astype(kind))
    if draw(st.booleans()):
        shape = (size["batch"], size["q_heads"])[draw(st.integers(0, 1)) :]
        chosen["alibi_slopes"] = rng.random(shape).astype(np.float32)
    if draw(st.booleans()):
        chosen["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if draw(st.booleans()):
        chosen["sinks"] = rng.standard_normal(size["q_heads"]).astype(np.float32)
    if draw(st.booleans()):
        chosen["scale"] = draw(st.sampled_from([0.0, 0.25, -0.5, 1.0]))
    if draw(st.booleans()):
        chosen |= {"dropout": draw(st.sampled_from([0.1, 0.5])),
                   "seed": draw(st.integers(0, 2**64 - 1))}
    return chosen


@st.composite
def calls(draw, dtypes=tuple(DTYPES), head_dims=HEAD_DIMS, options=options):
    """Return the inputs and options of one call, as NumPy arrays."""
    size, dtype = draw(sizes(head_dims)), DTYPES[draw(st.sampled_from(dtypes))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    queries = (size["batch"], size["q_len"], size["q_heads"])
    keys = (size["batch"], size["kv_len"], size["kv_heads"])
    shapes = {
        "q": (*queries, size["head_dim"]),
        "k": (*keys, size["head_dim"]),
        "v": (*keys, size["value_dim"]),
        "dout": (*queries, size["value_dim"]),
    }
    inputs = {
        name: strided(draw, rng.standard_normal(shape).astype(dtype))
        for name, shape in shapes.items()
    }
    wide = np.float64 if dtype == np.float64 else np.float32
    inputs["dlse"] = rng.standard_normal(np.take(queries, [0, 2, 1])).astype(wide)
    return inputs, draw(options(size, rng, dtype))


@st.composite
def all_options(draw, size, rng, dtype):
    """Return a fixed set of options, so that a GPU compiles few kernels, with any values."""
    return {
        "causal": True,
        "window": (draw(st.integers(0, 45)), None),
        "mask": strided(draw, rng.random(broadcastable(draw, size)) < 0.8),
        "bias": strided(draw, rng.standard_normal(broadcastable(draw, size)).astype(dtype)),
        "softcap": 2.0,
        "sinks": rng.standard_normal(size["q_heads"]).astype(np.float32),
        "dropout": 0.2,
        "seed": draw(st.integers(0, 2**64 - 1)),
    }


def views_on_gpu(cupy, array):
    """Return a CuPy array whose layout is like a NumPy array's: order, signs and gaps."""
    if not isinstance(array, np.ndarray):
        return array
    order = np.argsort([-abs(stride) for stride in array.strides], kind="stable")
    there = cupy.asarray(np.ascontiguousarray(array.transpose(order)))
    if array.itemsize not in map(abs, array.strides):
        there = cupy.repeat(there, 2, axis=-1)[..., ::2]
    there = there.transpose(tuple(np.argsort(order).tolist()))
    for axis, stride in enumerate(array.strides):
        if stride < 0:
            there = cupy.flip(cupy.flip(there, axis).copy(), axis)
    return there


@pytest.mark.gpu
@SETTINGS
@hypothesis.given(calls(("float16",), [16], lambda size, rng, dtype: st.just({})))
def test_any_layout_on_the_gpu(call):
    inputs, chosen = call
    budget.check_call(pytest.importorskip("cupy"), inputs, chosen, place=views_on_gpu)


@pytest.mark.gpu
@SETTINGS
@hypothesis.given(calls(("float32",), [16], all_options))
def test_all_options_on_the_gpu(call):
    inputs, chosen = call
    budget.check_call(pytest.importorskip("cupy"), inputs, chosen, place=views_on_gpu)


@SETTINGS
@hypothesis.given(calls())
def test_any_call_is_within_its_budget(call):
    budget.check_call(np, *call)


@SETTINGS
@hypothesis.given(calls(), st.data())
def test_keys_in_any_order(call, data):
    """Attention sums over a set: keys, values and their columns may be permuted together."""
    inputs, chosen = call
    chosen = {name: value for name, value in chosen.items()
              if name in ("softcap", "sinks", "scale")}
    order = data.draw(st.permutations(range(inputs["k"].shape[1])))
    q, k, v = (inputs[name].astype(np.float64) for name in "qkv")
    left = cuflash.attention(q, k, v, **chosen, return_lse=True)
    right = cuflash.attention(q, k[:, order], v[:, order], **chosen, return_lse=True)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@SETTINGS
@hypothesis.given(calls(), st.data())
def test_hidden_numbers_change_no_bit(call, data):
    """NaN where the mask hides a key from all rows, in all batch elements and heads."""
    inputs, chosen = call
    kv_len = inputs["k"].shape[1]
    hidden = np.array(data.draw(st.lists(st.booleans(), min_size=kv_len, max_size=kv_len)))
    chosen = chosen | {"mask": ~hidden[None, :]}
    results = []
    for number in (0.5, data.draw(st.sampled_from([np.nan, np.inf, 1e4]))):
        k, v = inputs["k"].copy(), inputs["v"].copy()
        k[:, hidden], v[:, hidden] = number, number
        out, lse = cuflash.attention(inputs["q"], k, v, **chosen, return_lse=True)
        got = cuflash.attention_backward(inputs["dout"], inputs["q"], k, v, out, lse, **chosen,
                                         deterministic=True)
        results.append((out, lse, got.dq, got.dk, got.dv))
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()
