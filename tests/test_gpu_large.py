"""More than 2^31 elements, spot-checked against small copies (faults.md K7)."""

import numpy as np
import pytest
from arrays import get, normal, same_bits, wide

import cuflash

pytestmark = pytest.mark.gpu
GIB = 2**30


@pytest.fixture
def room(cupy):
    """Skip unless 40 GiB are free; give the pool's memory back before and after."""
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    if cupy.cuda.runtime.memGetInfo()[0] < 40 * GIB:
        pytest.skip("needs 40 GiB of free GPU memory")
    yield cupy
    pool.free_all_blocks()


def near(left, right, tolerance=2e-3):
    np.testing.assert_allclose(wide(left), wide(right), atol=tolerance, rtol=tolerance)


def test_b71_many_queries(room):
    cupy, rows = room, 2**31 // 64 + 300
    q = cupy.zeros((1, rows, 1, 64), "float16")
    k, v = (cupy.asarray(normal((1, 16, 1, 64), np.float16, seed=n)) for n in (1, 2))
    q[:, -200:] = cupy.asarray(normal((1, 200, 1, 64), np.float16))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    right, right_lse = cuflash.attention(q[:, -200:].copy(), k, v, return_lse=True)
    near(out[:, -200:], right)
    near(lse[..., -200:], right_lse)
    near(out[:, :64], cupy.broadcast_to(v.astype("float32").mean(axis=1, keepdims=True),
                                        (1, 64, 1, 64)))


def test_b71_many_keys(room):
    cupy, keys = room, 2**31 // 64 + 300
    k = cupy.zeros((1, keys, 1, 64), "float16")
    v = cupy.ones((1, keys, 1, 64), "float16")
    q = cupy.full((1, 3, 1, 64), 4, "float16")
    _, lse = cuflash.attention(q, k, v, return_lse=True)
    near(lse, np.full((1, 1, 3), np.log(keys)), 1e-4)
    k[:, -1], v[:, -1] = 4, 7
    near(cuflash.attention(q, k, v), np.full((1, 3, 1, 64), 7))


def test_b71_many_batch_elements(room):
    cupy, batch = room, 2**31 // (16 * 128) + 70
    q = cupy.zeros((batch, 1, 16, 128), "float16")
    q[-1] = 3
    out = cuflash.attention(q, q, q)
    assert (out[-1] == 3).all() and not out[:-1].any()


def test_b73_views_of_one_fused_buffer(room):
    cupy, shape = room, (110, 4300, 3, 24, 64)
    assert np.prod(shape) > 2**31
    fused = cupy.zeros(shape, "float16")
    fused[-1] = cupy.asarray(normal(shape[1:], np.float16))
    q, k, v = (fused[:, :, n] for n in range(3))
    window = {"causal": True, "window": (200, 0)}
    out = cuflash.attention(q, k, v, **window)
    copies = [array[-1:, -500:].copy() for array in (q, k, v)]
    near(out[-1:, -100:], cuflash.attention(*copies, **window)[:, -100:])
    assert not out[:-1].any()


def test_b75_a_mask_of_more_than_2_31_elements(room):
    cupy = room
    q = cupy.zeros((8, 4096, 28, 16), "float16")
    mask = cupy.ones((8, 28, 4096, 4096), "bool")
    mask[-1, -1, :, 1:] = False
    v = cupy.zeros((8, 4096, 28, 16), "float16")
    v[:, 0] = 1
    out = cuflash.attention(q, q, v, mask=mask)
    assert (out[-1, :, -1] == 1).all()
    near(out[-1, :, -2], np.full((4096, 16), 1 / 4096), 1e-5)


def test_b70_a_bias_row_stride_beyond_2_31(room):
    cupy, length = room, 46400
    q = cupy.asarray(normal((1, length, 1, 64), np.float16))
    bias = cupy.zeros((length, length), "float16")
    near(cuflash.attention(q, q, q, bias=bias)[:, -300:], cuflash.attention(q, q, q)[:, -300:])


def test_b26_more_than_32768_of_both(room):
    cupy = room
    q = cupy.zeros((1, 33728, 1, 512), "float32")
    out, lse = cuflash.attention(q, q, cupy.ones_like(q), return_lse=True)
    near(out[:, ::99], np.ones((1, len(range(0, 33728, 99)), 1, 512)), 1e-4)
    near(lse, np.full((1, 1, 33728), 10.426084), 1e-5)


@pytest.mark.slow
def test_b71_backward_of_more_than_2_31_elements(room):
    cupy, batch = room, 2**31 // (16 * 128) + 70
    q = cupy.zeros((batch, 1, 16, 128), "float16")
    q[-1] = 3
    out, lse = cuflash.attention(q, q, q, return_lse=True)
    got = cuflash.attention_backward(q, q, q, q, out, lse)
    assert same_bits(get(got.dv[-1]), get(q[-1])) and not got.dv[:-1].any()
