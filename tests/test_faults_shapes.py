"""faults.md K4, K9, K10, K11: head groups, head sizes, empty and tiny sizes, large grids."""

import budget
import numpy as np
import pytest
from arrays import averaging, normal, put, same_bits, wide

import cuflash


def draw(q_len, kv_len, q_heads, kv_heads, head_dim, value_dim, dtype=np.float32, batch=1):
    shapes = {
        "q": (batch, q_len, q_heads, head_dim),
        "k": (batch, kv_len, kv_heads, head_dim),
        "v": (batch, kv_len, kv_heads, value_dim),
        "dout": (batch, q_len, q_heads, value_dim),
    }
    return {name: normal(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(33, 2), (3, 2), (2, 3), (4, 0)])
def test_b50_heads_that_do_not_divide(xp, q_heads, kv_heads):
    q = xp.zeros((1, 4, q_heads, 16), "float32")
    k = xp.zeros((1, 4, kv_heads, 16), "float32")
    with pytest.raises(ValueError) as error:
        cuflash.attention(q, k, k)
    assert str(q_heads) in str(error.value) and str(kv_heads) in str(error.value)


def test_b51_dv_adds_over_the_group(xp):
    q = xp.zeros((1, 3, 8, 16), "float32")
    k = xp.zeros((1, 4, 2, 16), "float32")
    v = xp.asarray(normal((1, 4, 2, 40)))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    got = cuflash.attention_backward(xp.ones_like(out), q, k, v, out, lse)
    assert got.dv.shape == v.shape
    np.testing.assert_allclose(wide(got.dv), 3.0, rtol=1e-6)


def test_b52_causal_limits_of_grouped_heads(xp):
    q, k, v = averaging(xp, 300, 300, q_heads=4, kv_heads=1)
    out = wide(cuflash.attention(q, k, v, causal=True))
    right = np.broadcast_to(np.arange(300)[:, None, None] / 2, (300, 4, 16))
    np.testing.assert_allclose(out[0], right, rtol=1e-5)


def test_b54_query_head_h_reads_kv_head_h_over_group(xp):
    q, k = xp.zeros((1, 5, 6, 16), "float32"), xp.zeros((1, 7, 2, 16), "float32")
    v = xp.asarray(np.broadcast_to(np.arange(2.0)[:, None], (1, 7, 2, 16)).astype("float32"))
    out = wide(cuflash.attention(q, k, v))
    np.testing.assert_allclose(out[0, 0, :, 0], [0, 0, 0, 1, 1, 1], atol=1e-6)


@pytest.mark.parametrize("head_dim", range(1, 257))
def test_b90_every_head_dim(head_dim):
    budget.check_call(np, draw(5, 9, 1, 1, head_dim, head_dim), {})


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", range(1, 257))
def test_b90_every_head_dim_on_the_gpu(cupy, head_dim):
    budget.check_call(cupy, draw(70, 130, 1, 1, head_dim, head_dim, np.float16), {})


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 512), (512, 1), (1, 512)])
def test_b91_values_of_another_size(xp, head_dim, value_dim):
    budget.check_call(xp, draw(33, 65, 1, 1, head_dim, value_dim, np.float16), {})


@pytest.mark.parametrize("head_dim", [200, 256])
def test_b92_large_heads_and_two_batch_elements(xp, head_dim):
    inputs = draw(65, 65, 2, 1, head_dim, head_dim, np.float16, batch=2)
    budget.check_call(xp, inputs, {"causal": True})


@pytest.mark.parametrize("empty", ["batch", "heads", "q_len", "kv_len"])
@pytest.mark.parametrize("sink", [False, True])
def test_b94_zero_sizes(xp, empty, sink):
    size = {"batch": 2, "heads": 2, "q_len": 3, "kv_len": 4} | {empty: 0}
    q = xp.ones((size["batch"], size["q_len"], size["heads"], 16), "float32")
    k = xp.ones((size["batch"], size["kv_len"], size["heads"], 16), "float32")
    v = xp.ones((size["batch"], size["kv_len"], size["heads"], 16), "float32")
    sinks = xp.full((size["heads"],), 2.0, "float32") if sink else None
    out, lse = cuflash.attention(q, k, v, sinks=sinks, return_lse=True)
    assert out.shape == (*q.shape[:3], 16)
    assert lse.shape == (size["batch"], size["heads"], size["q_len"])
    if empty == "kv_len":
        assert not wide(out).any() and (wide(lse) == (2.0 if sink else -np.inf)).all()
    got = cuflash.attention_backward(xp.ones_like(out), q, k, v, out, lse, sinks=sinks,
                                     dlse=xp.ones_like(lse))
    for gradient, source in ((got.dq, q), (got.dk, k), (got.dv, v), (got.dsinks, sinks)):
        assert (gradient is None) if source is None else gradient.shape == source.shape
    if empty in ("kv_len", "q_len"):
        assert not wide(got.dq).any() and not wide(got.dk).any() and not wide(got.dv).any()
    if sink and empty == "kv_len":
        np.testing.assert_allclose(wide(got.dsinks), 6.0)  # 2 batch elements of 3 rows, dlse = 1


def test_b94_zero_keys_write_the_given_out(xp):
    q, k = xp.ones((1, 3, 1, 16), "float32"), xp.ones((1, 0, 1, 16), "float32")
    out = xp.full((1, 3, 1, 16), np.nan, "float32")
    cuflash.attention(q, k, k, out=out)
    assert not wide(out).any()


@pytest.mark.parametrize("q_len", range(1, 18))
def test_b95_tiny_lengths(xp, q_len):
    for kv_len in range(1, 18):
        inputs = draw(q_len, kv_len, 2, 1, 16, 16)
        budget.check_call(xp, inputs, {"causal": True})


def test_b97_more_batch_elements_than_a_grid_axis(xp):
    q = xp.asarray(normal((66_000, 1, 1, 16)))
    k = xp.asarray(normal((66_000, 1, 1, 16), seed=1))
    out, lse = cuflash.attention(q, k, k, return_lse=True)
    assert same_bits(out, k)
    got = cuflash.attention_backward(k, q, k, k, out, lse)
    np.testing.assert_allclose(wide(got.dv), wide(k), rtol=1e-6)


def test_b97_more_heads_than_a_grid_axis(xp):
    q = xp.asarray(normal((1, 2, 66_000, 16)))
    k = put(xp, normal((1, 1, 66_000, 16), seed=1))
    out = cuflash.attention(q, k, k)
    assert same_bits(out[:, 1:], k)
