"""Options: alignment, windows, masks, biases and sinks, alone and together, exactly where exact."""

import sys

import budget
import numpy as np
import pytest
import textbook
from arrays import DTYPES, averaging, normal, put, same_bits, wide

import cuflash

LENGTHS = [(1, 1), (5, 9), (9, 5), (70, 70), (65, 130), (130, 65)]
CONDITIONS = [
    {"causal": True},
    {"causal": "top-left"},
    {"window": (0, 0)},
    {"window": (4, None)},
    {"window": (None, 3)},
    {"window": (None, None)},
    {"window": (2, 6)},
    {"causal": True, "window": (3, None)},
    {"causal": True, "window": (3, 7)},
    {"causal": "top-left", "window": (3, 2)},
    {"causal": "top-left", "window": (0, None)},
]


def label(options):
    return "-".join(f"{name}={value}" for name, value in options.items()).replace(" ", "")


@pytest.mark.parametrize("options", CONDITIONS, ids=label)
def test_who_sees_what(xp, options):
    """Count and mean of the visible keys, read from lse and out; empty rows exactly."""
    for q_len, kv_len in LENGTHS:
        q, k, v = averaging(xp, q_len, kv_len, q_heads=2)
        out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
        seen = textbook.visible(q_len, kv_len, **options)
        count = seen.sum(axis=1)
        total = (seen * np.arange(kv_len)).sum(axis=1)
        for head in range(2):
            np.testing.assert_allclose(np.exp(wide(lse)[0, head]), count, rtol=1e-5)
            got = wide(out)[0, :, head, 3]
            np.testing.assert_allclose(got, total / np.maximum(count, 1), rtol=1e-5, atol=1e-5)
        assert not wide(out)[0, count == 0].any()
        assert (wide(lse)[0, :, count == 0] == -np.inf).all()


@pytest.mark.parametrize("options", [CONDITIONS[0], CONDITIONS[9]], ids=label)
def test_gradients_of_unseen_rows_and_keys_are_zero(xp, options):
    for q_len, kv_len in LENGTHS:
        q, k, v, dout = (
            put(xp, normal((1, length, 2, 16), seed=seed))
            for seed, length in enumerate((q_len, kv_len, kv_len, q_len))
        )
        out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
        got = cuflash.attention_backward(dout, q, k, v, out, lse, **options,
                                         dlse=xp.ones_like(lse))
        seen = textbook.visible(q_len, kv_len, **options)
        assert not wide(got.dq)[:, ~seen.any(axis=1)].any()
        assert not wide(got.dk)[:, ~seen.any(axis=0)].any()
        assert not wide(got.dv)[:, ~seen.any(axis=0)].any()


@pytest.mark.parametrize("window", [(3, None), (3, 0), (0, 5)])
def test_a_window_equals_its_mask(xp, window):
    q, k, v = (put(xp, normal((1, 70, 1, 16), seed=seed)) for seed in range(3))
    mask = put(xp, textbook.visible(70, 70, window=window))
    left = wide(cuflash.attention(q, k, v, window=window))
    np.testing.assert_allclose(wide(cuflash.attention(q, k, v, mask=mask)), left, atol=1e-6)


@pytest.mark.parametrize("axes", [(1, 9), (5, 9), (5, 1), (1, 1), (3, 1, 9), (1, 5, 9),
                                  (2, 1, 1, 9), (2, 3, 5, 9), (1, 3, 1, 1), (1, 1, 1, 1)])
def test_masks_and_biases_broadcast(xp, axes):
    inputs = {name: normal((2, length, 3, 16), seed=seed)
              for seed, (name, length) in enumerate((("q", 5), ("k", 9), ("v", 9), ("dout", 5)))}
    mask = np.random.default_rng(4).random(axes) < 0.6
    bias = normal(axes, seed=5)
    budget.check_call(xp, inputs, {"mask": mask})
    budget.check_call(xp, inputs, {"bias": bias})


@pytest.mark.parametrize(("dtype", "bias_dtype"), [
    ("float32", "float16"), ("float32", "bfloat16"), ("float32", "float64"),
    ("bfloat16", "float32"), ("float64", "float16")])  # fmt: skip
def test_a_bias_of_any_float_dtype(xp, dtype, bias_dtype):
    inputs = {name: normal((1, 33, 2, 16), DTYPES[dtype], seed)
              for seed, name in enumerate(("q", "k", "v", "dout"))}
    bias = normal((2, 1, 33), DTYPES[bias_dtype], seed=9)
    _, _, got = budget.check_call(xp, inputs, {"bias": bias})
    assert got.dbias.dtype == bias.dtype and got.dbias.shape == bias.shape


def test_a_sink_alone_in_an_empty_row(xp):
    q, k, v = averaging(xp, 3, 1, q_heads=2)
    sinks = xp.asarray([2.0, -3.0], "float32")
    out, lse = cuflash.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not wide(out)[:, :2].any()
    np.testing.assert_allclose(wide(lse)[0, :, :2], [[2, 2], [-3, -3]])
    np.testing.assert_allclose(wide(lse)[0, :, 2], np.log1p(np.exp([2, -3])), rtol=1e-6)


def test_sinks_take_their_share(xp):
    q, k, v = averaging(xp, 2, 4)
    v[:] = 1
    for sink in (-np.inf, -50.0, 0.0, np.log(4.0), 50.0, 3e38):
        out = cuflash.attention(q, k, v, sinks=xp.asarray([sink], "float32"))
        right = 4 / (4 + np.exp(min(sink, 700)))
        np.testing.assert_allclose(wide(out), right, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sinks_of_any_float_dtype(xp, dtype):
    inputs = {name: normal((1, 33, 2, 16), np.float32, seed)
              for seed, name in enumerate(("q", "k", "v", "dout"))}
    sinks = normal((2,), dtype, seed=7)
    _, _, got = budget.check_call(xp, inputs, {"sinks": sinks, "causal": True})
    assert got.dsinks.dtype == sinks.dtype and got.dsinks.shape == (2,)


def test_neutral_options_change_no_bit(xp):
    q, k, v = (put(xp, normal((1, 70, 2, 16), seed=seed)) for seed in range(3))
    right = cuflash.attention(q, k, v)
    for options in ({"window": (None, None)}, {"dropout": 0.0}, {"dropout": 0.0, "seed": 3},
                    {"mask": None, "bias": None}, {"scale": 0.25}, {"scale": np.float32(0.25)},
                    {"causal": np.False_}):
        assert same_bits(cuflash.attention(q, k, v, **options), right), options


def test_numpy_numbers_are_numbers(xp):
    q, k, v = (put(xp, normal((1, 70, 2, 16), seed=seed)) for seed in range(3))
    right = cuflash.attention(q, k, v, causal=True, window=(5, None), softcap=3.0, scale=0.5)
    got = cuflash.attention(q, k, v, causal=np.True_, window=(np.int64(5), None),
                            softcap=np.float64(3), scale=np.float32(0.5))
    assert same_bits(got, right)


@pytest.mark.parametrize("side", [10**9, sys.maxsize, 2**63, 2**80])
def test_a_window_beyond_all_keys_is_open(xp, side):
    q, k, v = (put(xp, normal((1, n, 2, 16), seed=n)) for n in (5, 300, 300))
    for window, same in (((side, None), {}), ((None, side), {}), ((side, 0), {"causal": True})):
        got = cuflash.attention(q, k, v, window=window)
        assert same_bits(got, cuflash.attention(q, k, v, **same))


@pytest.mark.parametrize("lengths", [(33, 70), (64, 64), (37, 64)])
def test_an_infinite_key_under_a_softcap_has_finite_gradients(xp, lengths):
    """Its scores are plus or minus the softcap; rows and keys beyond the ends add nothing."""
    q, k, v = (put(xp, normal((1, n, 2, 16), seed=n)) for n in (*lengths, lengths[1]))
    q[0, 3] = 1
    k[0, 5, :, 0], k[0, 5, :, 1:] = float("inf"), 0
    q[..., 0] = abs(q[..., 0]) + 1
    out, lse = cuflash.attention(q, k, v, softcap=3.0, return_lse=True)
    for deterministic in (False, True):
        got = cuflash.attention_backward(
            out, q, k, v, out, lse, softcap=3.0, deterministic=deterministic
        )
        others = np.arange(lengths[1]) != 5
        assert np.isfinite(wide(got.dv)).all() and np.isfinite(wide(got.dk)[:, others]).all()
