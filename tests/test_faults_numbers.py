"""faults.md K1: NaN and Inf, rows that see nothing, the running maximum, large magnitudes."""

import math

import budget
import numpy as np
import pytest
from arrays import averaging, channel0, constant, get, normal, put, same_bits, wide

import cuflash


def backward(dout, q, k, v, **options):
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    return cuflash.attention_backward(dout, q, k, v, out, lse, **options)


def draw(shapes, dtype, seed=0, times=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: (times * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()
    }


def test_b3_scores_below_any_sentinel(xp):
    q, k = channel0(xp, [-20000, 0]), channel0(xp, [1, 0])
    mask = xp.asarray([[True, False], [True, False]])
    out = cuflash.attention(q, k, constant(xp, [1, 100]), mask=mask, scale=1.0)
    assert (wide(out) == 1.0).all()


def test_b5_all_scores_negative(xp):
    shape = (1, 70, 2, 16)
    inputs = draw(dict.fromkeys(("q", "k", "v", "dout"), shape), np.float32)
    inputs["q"], inputs["k"] = abs(inputs["q"]), -abs(inputs["k"])
    budget.check_call(xp, inputs, {})


@pytest.mark.parametrize("magnitude", [3, 300])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_b7_one_key_has_no_gradient_but_v(xp, head_dim, magnitude):
    one = constant(xp, [magnitude], head_dim, "float16")
    out, lse = cuflash.attention(one, one, one, return_lse=True)
    assert same_bits(out, one)
    got = cuflash.attention_backward(one, one, one, one, out, lse)
    assert not wide(got.dq).any() and not wide(got.dk).any()
    rounding = budget.ulp(np.float32, wide(lse).max()) + 2.0**-10  # of lse, and of float16
    assert abs(wide(got.dv) / magnitude - 1).max() <= rounding


def test_b8_float16_causal_inputs_times_three(xp):
    shape = (1, 1024, 1, 128)
    inputs = draw(dict.fromkeys(("q", "k", "v", "dout"), shape), np.float16, times=3)
    budget.check_call(xp, inputs, {"causal": True})


@pytest.mark.parametrize("deterministic", [False, True])
def test_b9_probabilities_never_exceed_one(xp, deterministic):
    shape = (1, 32, 1, 64)
    inputs = draw(dict.fromkeys(("q", "k", "v", "dout"), shape), np.float32, times=1000)
    q, k, v, dout = (put(xp, array) for array in inputs.values())
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    got = cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic)
    for gradient in (got.dq, got.dk, got.dv):
        assert np.isfinite(wide(gradient)).all()
    bound = abs(wide(dout)).sum(axis=1, keepdims=True)  # what p = 1 everywhere would give
    assert (abs(wide(got.dv)) <= bound * 1.00001).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_b9_an_lse_that_was_rounded_down(xp, deterministic):
    """Large scores leave lse coarse; p = exp(s - lse) must stay at 1 where it should be 1."""
    one = constant(xp, [3])
    out, lse = cuflash.attention(one, one, one, return_lse=True)
    got = cuflash.attention_backward(one, one, one, one, out, lse - 2,
                                     deterministic=deterministic)
    np.testing.assert_allclose(wide(got.dv), 3, rtol=1e-6)
    assert abs(wide(got.dq)).max() < 1e-4


def test_b10_float16_product_beyond_65504(xp):
    q, k = constant(xp, [80], 128, "float16"), constant(xp, [80, 80], 128, "float16")
    out = cuflash.attention(q, k, constant(xp, [0, 1], 128, "float16"))
    assert (wide(out) == 0.5).all()


def test_b11_float16_dp_beyond_65504(xp):
    q = channel0(xp, [1], 128, "float16")
    k = constant(xp, [0, 0], 128, "float16")
    v = constant(xp, [1024, 0], 128, "float16")
    got = backward(constant(xp, [1], 128, "float16"), q, k, v)
    dk = wide(got.dk)
    assert dk[0, 0, 0, 0] == 2896 and dk[0, 1, 0, 0] == -2896
    assert not dk[..., 1:].any() and not wide(got.dq).any()


def test_b12_a_bias_of_minus_65504_is_finite(xp):
    q, k = channel0(xp, [-100], 16, "float16"), channel0(xp, [1, 1], 16, "float16")
    bias = xp.full((1, 2), -65504, "float16")
    out, lse = cuflash.attention(q, k, constant(xp, [0, 1], 16, "float16"), bias=bias, scale=1.0,
                                 return_lse=True)
    assert (wide(out) == 0.5).all()
    assert math.isclose(wide(lse).item(), -65604 + math.log(2), rel_tol=1e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "dropout": 0.2, "seed": 1}],
                         ids=["plain", "softcap"])
@pytest.mark.parametrize("what", ["k", "v", "bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e10])
def test_b13_hidden_keys_are_not_read_into_anything(xp, what, value, options):
    shapes = dict.fromkeys(("q", "k", "v", "dout"), (1, 40, 2, 16))
    inputs = {name: put(xp, array) for name, array in draw(shapes, np.float32).items()}
    inputs["bias"] = put(xp, normal((40, 40)))
    options = options | {"mask": xp.asarray(np.arange(40) % 3 != 1)[None, :]}
    results = []
    for number in (0, value):
        inputs[what][:, 1::3] = number
        q, k, v, dout, options["bias"] = inputs.values()
        out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
        got = cuflash.attention_backward(dout, q, k, v, out, lse, **options, bias_grad=True,
                                         deterministic=True)
        for gradient in (got.dk, got.dv, got.dbias):
            assert not wide(gradient)[:, 1::3].any()
        results.append((out, lse, *got[:4]))
    for left, right in zip(*results, strict=True):
        assert same_bits(left, right)


def test_b13_hidden_by_causal_and_window(xp):
    q, k, v = averaging(xp, 130, 130)
    k[:, 128:], v[:, 128:] = np.nan, np.inf
    out = wide(cuflash.attention(q, k, v, causal=True))[0, :, 0, 0]
    np.testing.assert_allclose(out[:128], np.arange(128) / 2, rtol=1e-6)
    assert np.isnan(out[128:]).all()
    q, k, v = averaging(xp, 130, 130)
    k[:, :64], v[:, :64] = np.nan, np.nan
    out = wide(cuflash.attention(q, k, v, window=(3, 0)))[0, :, 0, 0]
    np.testing.assert_allclose(out[67:], np.arange(67, 130) - 1.5, rtol=1e-6)
    assert np.isnan(out[:67]).all()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_with_nan_do_not_reach_keys_they_do_not_see(xp, softcap):
    """The mirror of B13: NaN in q and dout of row i, and dk, dv of keys hidden from it."""
    shapes = dict.fromkeys(("q", "k", "v", "dout"), (1, 70, 1, 16))
    inputs = draw(shapes, np.float32)
    clean = [put(xp, array) for array in inputs.values()]
    inputs["q"][:, :20], inputs["dout"][:, :20] = np.nan, np.nan
    q, k, v, dout = (put(xp, array) for array in inputs.values())
    got = backward(dout, q, k, v, causal=True, softcap=softcap)
    right = backward(clean[3], *clean[:3], causal=True, softcap=softcap)
    for gradient, other in ((got.dk, right.dk), (got.dv, right.dv)):
        assert np.isnan(wide(gradient)[:, :20]).all()
        np.testing.assert_allclose(wide(gradient)[:, 20:], wide(other)[:, 20:], atol=1e-5)
    assert np.isfinite(wide(got.dq)[:, 20:]).all()


def test_b14_a_row_hidden_by_its_mask(xp):
    shapes = dict.fromkeys(("q", "k", "v", "dout"), (1, 65, 2, 16))
    q, k, v, dout = (put(xp, array) for array in draw(shapes, np.float32).values())
    some = np.ones((65, 65), bool)
    some[[0, 30, 64]] = False
    whole, hidden = xp.ones((65, 65), bool), xp.asarray(some)
    out, lse = cuflash.attention(q, k, v, mask=hidden, return_lse=True)
    got = cuflash.attention_backward(dout, q, k, v, out, lse, mask=hidden, deterministic=True)
    full, full_lse = cuflash.attention(q, k, v, mask=whole, return_lse=True)
    right = cuflash.attention_backward(dout, q, k, v, full, full_lse, mask=whole,
                                       deterministic=True)
    for row in (0, 30, 64):
        assert not wide(out)[:, row].any() and not wide(got.dq)[:, row].any()
        assert (wide(lse)[:, :, row] == -np.inf).all()
    seen = some.any(axis=1)
    assert same_bits(get(out)[:, seen], get(full)[:, seen])
    assert same_bits(get(got.dq)[:, seen], get(right.dq)[:, seen])
    assert np.isfinite(wide(got.dk)).all() and np.isfinite(wide(got.dv)).all()


@pytest.mark.parametrize("form", ["mask", "causal"])
def test_b14_nan_in_a_row_that_sees_nothing(xp, form):
    shapes = dict.fromkeys(("q", "dout"), (1, 70, 1, 16)) | dict.fromkeys("kv", (1, 40, 1, 16))
    inputs = draw(shapes, np.float32)
    options = {"causal": True} if form == "causal" else {
        "mask": xp.asarray(np.arange(70)[:, None] >= 30)}
    results = []
    for value in (0, np.nan):
        inputs["q"][:, :30], inputs["dout"][:, :30] = value, value
        q, dout, k, v = (put(xp, array.copy()) for array in inputs.values())
        out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
        got = cuflash.attention_backward(dout, q, k, v, out, lse, **options, deterministic=True)
        assert not wide(out)[:, :30].any() and not wide(got.dq)[:, :30].any()
        results.append((out, lse, *got[:3]))
    for left, right in zip(*results, strict=True):
        assert same_bits(left, right)


def test_b15_a_row_of_the_lowest_bias_is_data(xp):
    q, k, v = averaging(xp, 3, 5)
    bias = xp.full((3, 5), np.finfo(np.float32).min, "float32")
    assert abs(wide(cuflash.attention(q, k, v, bias=bias)) - 2).max() < 1e-5


def test_b16_the_lowest_bias_on_the_first_keys(xp):
    q, k, v = averaging(xp, 441, 441, head_dim=64)
    bias = xp.zeros((441,), "float32")[None, :].copy()
    bias[:, :128] = np.finfo(np.float32).min
    assert abs(wide(cuflash.attention(q, k, v, bias=bias)) - 284.0).max() < 1e-3


def test_a_bias_of_minus_infinity_hides(xp):
    q, k, v = averaging(xp, 2, 4)
    bias = xp.asarray([[0, -np.inf, 0, -np.inf], [-np.inf] * 4], "float32")
    out, lse = cuflash.attention(q, k, v, bias=bias, return_lse=True)
    assert (wide(out)[0, 0] == 1.0).all() and not wide(out)[0, 1].any()
    assert math.isclose(wide(lse)[0, 0, 0], math.log(2), rel_tol=1e-6)
    assert wide(lse)[0, 0, 1] == -np.inf
    got = cuflash.attention_backward(xp.ones_like(out), q, k, v, out, lse, bias=bias)
    assert np.isfinite(wide(got.dq)).all()
    assert (wide(got.dv)[0, :, 0, 0] == [0.5, 0, 0.5, 0]).all()


@pytest.mark.parametrize("form", ["window", "mask"])
def test_b17_a_band_hides_all_early_keys(xp, form):
    q, k, v = averaging(xp, 600, 600)
    i, j = np.ogrid[:600, :600]
    band = {"mask": xp.asarray((j <= i) & (j >= i - 9)), "window": (9, 0)}
    out = wide(cuflash.attention(q, k, v, **{form: band[form]}))[0, :, 0, 0]
    np.testing.assert_allclose(out[9:], np.arange(9, 600) - 4.5, rtol=1e-5)
    np.testing.assert_allclose(out[:9], np.arange(9) / 2, rtol=1e-5)


def test_b18_padding_mask_and_unequal_lengths(xp):
    shapes = {name: (2, length, 4, 128) for name, length in
              {"q": 8, "k": 16, "v": 16, "dout": 8}.items()}
    mask = np.arange(16)[None, None, None, :] < np.array([9, 16])[:, None, None, None]
    budget.check_call(xp, draw(shapes, np.float16), {"mask": mask})


def test_b19_visible_nan_propagates(xp):
    q, k, v = (put(xp, normal((1, 20, 1, 16), seed=seed)) for seed in range(3))
    clean = wide(cuflash.attention(q, k, v))
    q[0, 3, 0, 5] = np.nan
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert np.isnan(wide(out)[:, 3]).all() and np.isnan(wide(lse)[:, :, 3]).all()
    others = np.arange(20) != 3
    assert (wide(out)[:, others] == clean[:, others]).all()
    q[0, 3, 0, 5] = 0
    v[0, 7, 0, 2] = np.nan
    out = wide(cuflash.attention(q, k, v))
    assert np.isnan(out[..., 2]).all() and np.isfinite(out[..., 3]).all()


def test_b20_early_rows_are_written(xp):
    q, k, v = averaging(xp, 300, 1)
    v[:] = 1
    out = xp.full((1, 300, 1, 16), np.nan, "float32")
    result, lse = cuflash.attention(q, k, v, causal=True, out=out, return_lse=True)
    assert result is out
    assert not wide(out)[:, :299].any() and (wide(out)[:, 299] == 1).all()
    assert (wide(lse)[0, 0, :299] == -np.inf).all() and wide(lse)[0, 0, 299] == 0


def test_b21_more_queries_than_keys(xp):
    q, k, v = averaging(xp, 2048, 1024)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert not wide(out)[:, :1024].any() and (wide(lse)[..., :1024] == -np.inf).all()
    np.testing.assert_allclose(wide(out)[0, 1024:, 0, 0], np.arange(1024) / 2, rtol=1e-5)


def test_b22_mask_and_causal_together_hide_a_row(xp):
    q, k, v = averaging(xp, 4, 4)
    v += 1
    mask = xp.asarray([[False, True, True, True]] * 4)
    out, lse = cuflash.attention(q, k, v, mask=mask, causal=True, return_lse=True)
    np.testing.assert_allclose(wide(out)[0, :, 0, 0], [0, 2, 2.5, 3], rtol=1e-6)
    assert wide(lse)[0, 0, 0] == -np.inf


def test_b26_more_than_32768_keys(xp):
    q, k, v = averaging(xp, 3, 33728)
    v[:] = 1
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(wide(out), 1, rtol=1e-5)
    np.testing.assert_allclose(wide(lse), 10.426084, rtol=1e-6)
