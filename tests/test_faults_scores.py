"""faults.md K2 and K3: scale, softcap, the causal diagonal, windows, ALiBi."""

import math

import budget
import numpy as np
import pytest
from arrays import averaging, channel0, constant, normal, put, same_bits, wide

import cuflash


def column(out):
    """Return channel 0 of head 0 of batch element 0."""
    return wide(out)[0, :, 0, 0]


def test_b28_scale_zero_is_a_value(xp):
    q, k, v = (put(xp, normal((1, 9, 1, 16), seed=seed)) for seed in range(3))
    flat = wide(cuflash.attention(q, k, v, scale=0.0))
    np.testing.assert_allclose(flat, np.broadcast_to(wide(v).mean(axis=1), (1, 9, 16))[:, :, None],
                               atol=1e-6)
    assert abs(flat - wide(cuflash.attention(q, k, v))).max() > 0.1
    assert same_bits(cuflash.attention(q, k, v), cuflash.attention(q, k, v, scale=0.25))


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.25])
def test_b29_no_scale_gives_nan(xp, scale):
    shapes = dict.fromkeys(("q", "k", "v", "dout"), (1, 33, 1, 16))
    inputs = {name: normal(shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    budget.check_call(xp, inputs, {"scale": scale, "softcap": 2.0})


def test_b30_the_scale_does_not_touch_the_bias(xp):
    q, k = constant(xp, [0]), constant(xp, [1, 1])
    bias = xp.asarray([[0, math.log(3)]], "float32")
    out = cuflash.attention(q, k, constant(xp, [0, 1]), scale=0.125, bias=bias)
    np.testing.assert_allclose(wide(out), 0.75, rtol=1e-6)


def test_b32_the_cap_does_not_reveal_masked_keys(xp):
    q, k = constant(xp, [0]), constant(xp, [0, 0])
    mask = xp.asarray([[True, False]])
    out = cuflash.attention(q, k, constant(xp, [0, 1]), softcap=1.0, mask=mask)
    assert not wide(out).any()


def test_b33_softcap_gradient_of_improbable_keys(xp):
    """Keys with tiny probabilities, where a derivative rebuilt from log p would be noise."""
    inputs = {name: 3 * normal((1, 40, 1, 16), seed=seed) for seed, name in
              enumerate(("q", "k", "v", "dout"))}
    budget.check_call(xp, inputs, {"softcap": 30.0, "causal": True})


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_b168_each_softcap_counts(xp, softcap):
    """Values that were compiled in must not be taken from an earlier call."""
    q, k = channel0(xp, [4]), channel0(xp, [4, 0])
    out = cuflash.attention(q, k, constant(xp, [1, 0]), softcap=softcap, scale=1.0)
    score = softcap * math.tanh(16 / softcap)
    np.testing.assert_allclose(wide(out), 1 / (1 + math.exp(-score)), rtol=1e-5)


def test_b34_the_diagonal_ends_bottom_right(xp):
    q, k, v = averaging(xp, 2, 5)
    _, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(wide(lse)[0, 0], np.log([4, 5]), rtol=1e-6)
    q, k, v = averaging(xp, 5, 2)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(column(out), [0, 0, 0, 0, 0.5], atol=1e-7)
    assert (wide(lse)[0, 0, :3] == -np.inf).all()
    np.testing.assert_allclose(wide(lse)[0, 0, 3:], np.log([1, 2]), atol=1e-7)


@pytest.mark.parametrize(("causal", "right"), [(True, [7 / 12] * 3 + [1 / 4]),
                                               ("top-left", [1.5, 0.5, 0, 0])])
def test_b35_backward_has_the_same_diagonal(xp, causal, right):
    q, k, v = averaging(xp, 2, 4)
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    got = cuflash.attention_backward(xp.ones_like(out), q, k, v, out, lse, causal=causal)
    np.testing.assert_allclose(column(got.dv), right, rtol=1e-6)


def test_b37_a_window_of_four_tokens(xp):
    q, k, v = averaging(xp, 11, 11)
    out = column(cuflash.attention(q, k, v, causal=True, window=(3, None)))
    np.testing.assert_allclose(out[[0, 3, 10]], [0, 1.5, 8.5], rtol=1e-6)


def test_b39_a_window_wider_than_the_keys_stays_causal(xp):
    q, k, v = (put(xp, normal((1, 70, 1, 16), seed=seed)) for seed in range(3))
    causal = cuflash.attention(q, k, v, causal=True)
    for left in (70, 10**9, 2**40):
        assert same_bits(cuflash.attention(q, k, v, causal=True, window=(left, None)), causal)


def test_b41_causal_as_a_window(xp):
    q, k, v = (put(xp, normal((1, 70, 1, 16), seed=seed)) for seed in range(3))
    causal = wide(cuflash.attention(q, k, v, causal=True))
    for window in ((69, 0), (None, 0)):
        np.testing.assert_allclose(wide(cuflash.attention(q, k, v, window=window)), causal,
                                   atol=1e-6)


def test_b42_every_row_of_a_wide_window(xp):
    q, k, v = averaging(xp, 129, 64)
    out = column(cuflash.attention(q, k, v, window=(32, 64)))
    for i in range(129):
        low, high = max(i - 65 - 32, 0), min(i - 65 + 64, 63)
        expected = (low + high) / 2 if low <= high else 0
        assert math.isclose(out[i], expected, rel_tol=1e-5, abs_tol=1e-6), i


def test_b43_the_last_row_alone_has_the_same_window(xp):
    q, k, v = (put(xp, normal((1, 130, 1, 16), seed=seed)) for seed in range(3))
    options = {"causal": True, "window": (20, None)}
    whole = wide(cuflash.attention(q, k, v, **options))
    last = wide(cuflash.attention(q[:, -1:], k, v, **options))
    np.testing.assert_allclose(last[:, 0], whole[:, -1], atol=1e-6)


def test_b44_a_window_of_the_diagonal_only(xp):
    q, k, v = (put(xp, normal((1, 70, 1, 16), seed=seed)) for seed in range(3))
    out = cuflash.attention(q, k, v, window=(0, 0))
    np.testing.assert_allclose(wide(out), wide(v), rtol=1e-6)


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 70), (3, 70), (70, 3)])
def test_b46_alibi_prefers_the_nearest_key(xp, q_len, kv_len):
    q, k, v = averaging(xp, q_len, kv_len)
    slopes = xp.asarray([40.0], "float32")
    out = column(cuflash.attention(q, k, v, alibi_slopes=slopes))
    nearest = np.clip(np.arange(q_len) + kv_len - q_len, 0, kv_len - 1)
    np.testing.assert_allclose(out, nearest, atol=1e-4)


@pytest.mark.parametrize("slope_dtype", ["float16", "float32", "float64"])
def test_b47_every_head_of_every_batch_has_its_own_slope(xp, slope_dtype):
    slopes = np.arange(1, 13).reshape(3, 4) / 8
    q = xp.zeros((3, 2, 4, 16), "float32")
    k = xp.zeros((3, 2, 2, 16), "float32")
    v = k.copy()
    v[:, 1] = 1
    out = wide(cuflash.attention(q, k, v, alibi_slopes=put(xp, slopes, slope_dtype)))
    right = 1 / (1 + np.exp(-slopes))  # the last row: distances 1 and 0
    np.testing.assert_allclose(out[:, 1, :, 0], right, rtol=1e-5)
    np.testing.assert_allclose(out[:, 0, :, 0], 1 - right, rtol=1e-5)
    one = put(xp, slopes[1], slope_dtype)
    out = wide(cuflash.attention(q, k, v, alibi_slopes=one))
    np.testing.assert_allclose(out[:, 1, :, 5], np.tile(right[1], (3, 1)), rtol=1e-5)
