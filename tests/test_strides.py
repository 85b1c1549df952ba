"""Any strides in, and the rules of out= (faults.md K8)."""

import numpy as np
import pytest
from arrays import averaging, get, normal, put, same_bits, wide

import cuflash

SHAPE = (2, 33, 4, 16)


def contiguous(xp, array):
    return array.copy()


def every_second(xp, array):
    big = xp.full((*array.shape[:3], 2 * array.shape[3]), 99, array.dtype)
    big[..., ::2] = array
    return big[..., ::2]


def backwards_channels(xp, array):
    return xp.ascontiguousarray(array[..., ::-1])[..., ::-1]


def backwards_rows(xp, array):
    return xp.ascontiguousarray(array[:, ::-1])[:, ::-1]


def heads_outside(xp, array):
    return xp.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)


def channels_outside(xp, array):
    return xp.ascontiguousarray(array.swapaxes(2, 3)).swapaxes(2, 3)


def all_reversed_axes(xp, array):
    return xp.ascontiguousarray(array.T).T


def one_of_three(xp, array):
    big = xp.full((*array.shape[:2], 3, *array.shape[2:]), 99, array.dtype)
    big[:, :, 1] = array
    return big[:, :, 1]


def padded_rows(xp, array):
    big = xp.full((*array.shape[:3], array.shape[3] + 1), 99, array.dtype)
    big[..., :-1] = array
    return big[..., :-1]


def shifted_by_one_element(xp, array):
    flat = xp.zeros(array.size + 1, array.dtype)
    view = flat[1:].reshape(array.shape)
    view[:] = array
    return view


VIEWS = [contiguous, every_second, backwards_channels, backwards_rows, heads_outside,
         channels_outside, all_reversed_axes, one_of_three, padded_rows, shifted_by_one_element]


def call(q, k, v, dout, **options):
    """Return out, lse, dq, dk, dv and dbias of one call in float64 NumPy."""
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    got = cuflash.attention_backward(dout, q, k, v, out, lse, **options,
                                     bias_grad="bias" in options, deterministic=True)
    results = [out, lse, got.dq, got.dk, got.dv]
    return [wide(array) for array in results + ([got.dbias] if "bias" in options else [])]


def inputs(xp, dtype):
    return [put(xp, normal(SHAPE, seed=seed), dtype) for seed in range(4)]


def agree(left, right, dtype):
    """Assert closeness: a copy may go to another kernel, which adds in another order."""
    tolerance = {"float16": 4e-3, "float32": 3e-6}[dtype]
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("view", VIEWS)
def test_b80_b81_views_equal_copies(xp, view, dtype):
    arrays = inputs(xp, dtype)
    right = call(*arrays)
    agree(call(*(view(xp, array) for array in arrays)), right, dtype)
    for place in range(4):  # one strided, the others not
        mixed = [view(xp, a) if n == place else a for n, a in enumerate(arrays)]
        agree(call(*mixed), right, dtype)


def test_b82_q_and_kv_of_different_layouts(xp):
    q, k, v, dout = inputs(xp, "float16")
    got = call(heads_outside(xp, q), k, channels_outside(xp, v), one_of_three(xp, dout))
    agree(got, call(q, k, v, dout), "float16")


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_broadcast_arrays_of_stride_zero(xp, axis):
    arrays = []
    for array in inputs(xp, "float32"):
        single = array[(slice(None),) * axis + (slice(0, 1),)]
        arrays.append(xp.broadcast_to(single, SHAPE))
    agree(call(*arrays), call(*(array.copy() for array in arrays)), "float32")


def test_b83_axes_of_size_one_with_odd_strides(xp):
    strided = xp.lib.stride_tricks.as_strided
    q = put(xp, normal((1, 9, 1, 16)))
    odd = strided(q, q.shape, (12344, q.strides[1], 4, q.strides[3]))
    agree(call(odd, odd, odd, odd), call(q, q, q, q), "float32")


def test_unaligned_numpy_arrays():
    """Views of packed records, whose addresses no element size divides."""
    record = np.dtype([("tag", "u1"), ("row", "f4", 16)])
    arrays = []
    for array in inputs(np, "float32"):
        packed = np.zeros(SHAPE[:3], record)
        packed["row"] = array
        assert not packed["row"].flags.aligned
        arrays.append(packed["row"])
    agree(call(*arrays), call(*inputs(np, "float32")), "float32")


def test_other_byte_order_is_refused_or_right():
    arrays = inputs(np, "float32")
    swapped = [array.astype(">f4") for array in arrays]
    try:
        got = call(*swapped)
    except TypeError:
        return
    agree(got, call(*arrays), "float32")


def test_b149_read_only_inputs(xp):
    arrays = inputs(xp, "float32")
    right = call(*arrays)
    if xp is np:
        for array in arrays:
            array.flags.writeable = False
    before = [get(array).copy() for array in arrays]
    agree(call(*arrays), right, "float32")
    for array, kept in zip(arrays, before, strict=True):
        assert same_bits(array, kept)


@pytest.mark.parametrize("kv_len", [7, 9, 700])
def test_b84_bias_and_mask_rows_of_odd_lengths(xp, kv_len):
    q = put(xp, normal((1, 5, 2, 16)), "float16")
    k, v = (put(xp, normal((1, kv_len, 2, 16), seed=seed)).astype("float16") for seed in (1, 2))
    bias = put(xp, normal((2, 5, kv_len), seed=3), "float16")
    mask = put(xp, np.random.default_rng(4).random((2, 5, kv_len)) < 0.8)
    right = call(q, k, v, q, bias=bias, mask=mask)
    for view in (shifted_by_one_element, all_reversed_axes, backwards_rows):
        bias_view, mask_view = view(xp, bias[None])[0], view(xp, mask[None])[0]
        agree(call(q, k, v, q, bias=bias_view, mask=mask_view), right, "float16")
    zero = call(q, k, v, q, bias=xp.broadcast_to(bias[:1, :1], bias.shape), mask=mask)
    agree(zero, call(q, k, v, q, bias=xp.broadcast_to(bias[:1, :1], bias.shape).copy(),
                     mask=mask), "float16")


def test_strided_vectors_and_lse(xp):
    q, k, v, dout = inputs(xp, "float32")
    slopes = put(xp, np.array([1, 9, 0.5, 9, 0.25, 9, 0.125, 9]) / 8, "float32")
    sinks = put(xp, normal((4,), seed=8))
    options = {"alibi_slopes": slopes[::2], "sinks": sinks[::-1]}
    copies = {name: array.copy() for name, array in options.items()}
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    right, right_lse = cuflash.attention(q, k, v, **copies, return_lse=True)
    agree([wide(out), wide(lse)], [wide(right), wide(right_lse)], "float32")
    flipped, dlse = xp.ascontiguousarray(lse.T).T, xp.broadcast_to(lse[:, :, :1], lse.shape)
    got = cuflash.attention_backward(dout, q, k, v, heads_outside(xp, out), flipped, **options,
                                     dlse=dlse)
    right = cuflash.attention_backward(dout, q, k, v, out, lse, **copies, dlse=dlse.copy())
    agree([wide(a) for a in got if a is not None], [wide(a) for a in right if a is not None],
          "float32")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_b86_out_of_any_strides(xp, view, dtype):
    q, k, v, _ = inputs(xp, dtype)
    right = cuflash.attention(q, k, v)
    base = xp.full(SHAPE, np.nan, dtype)
    out = view(xp, base)
    result, lse = cuflash.attention(q, k, v, out=out, return_lse=True)
    assert result is out and lse.shape == (2, 4, 33)
    if xp is not np and dtype == "float16":  # on tensor cores where rows of `out` are aligned
        agree([wide(out)], [wide(right)], dtype)
    else:
        assert same_bits(out, right)


def test_out_leaves_its_surroundings_alone(xp):
    q, k, v, _ = inputs(xp, "float32")
    big = xp.full((2, 35, 4, 18), 7, "float32")
    cuflash.attention(q, k, v, out=big[:, 1:34, :, 1:17])
    assert same_bits(big[:, 1:34, :, 1:17], cuflash.attention(q, k, v))
    big[:, 1:34, :, 1:17] = 7
    assert (wide(big) == 7).all()


@pytest.mark.parametrize("wrong", ["shape", "dtype", "rank", "kind", "broadcast"])
def test_b86_out_of_the_wrong_kind(xp, wrong):
    q, k, v, _ = inputs(xp, "float32")
    out = {
        "shape": xp.zeros((2, 33, 4, 15), "float32"),
        "dtype": xp.zeros(SHAPE, "float64"),
        "rank": xp.zeros(SHAPE[1:], "float32"),
        "kind": [1.0],
        "broadcast": xp.broadcast_to(xp.zeros((1, 33, 4, 16), "float32"), SHAPE),
    }[wrong]
    with pytest.raises((TypeError, ValueError), match="out"):
        cuflash.attention(q, k, v, out=out)


def test_b149_out_that_is_read_only():
    q, k, v, _ = inputs(np, "float32")
    out = np.zeros(SHAPE, np.float32)
    out.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match="out"):
        cuflash.attention(q, k, v, out=out)
    assert not out.any()


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks", "part"])
def test_b86_out_overlapping_an_input(xp, name):
    q, k, v, _ = inputs(xp, "float32")
    options = {}
    if name in ("q", "k", "v"):
        out = {"q": q, "k": k, "v": v}[name]
    elif name == "part":
        buffer = xp.zeros(q.size + 5, "float32")
        q, out = buffer[:-5].reshape(SHAPE), buffer[5:].reshape(SHAPE)
    else:
        out = xp.zeros(SHAPE, "float32")
        options[name] = out.reshape(-1)[:4] if name != "bias" else out.reshape(-1)[:33][None]
    kept = get(out).copy()
    with pytest.raises(ValueError, match="out"):
        cuflash.attention(q, k, v, out=out, **options)
    assert same_bits(out, kept)


def test_out_beside_an_input_in_one_buffer(xp):
    """Neighbours and interleaved channels touch no common byte, so they are allowed."""
    q, k, v, _ = inputs(xp, "float32")
    right = cuflash.attention(q, k, v)
    buffer = xp.zeros((3, *SHAPE), "float32")
    buffer[0] = q
    cuflash.attention(buffer[0], k, v, out=buffer[1])
    assert same_bits(buffer[1], right)


def test_inputs_may_be_one_array(xp):
    q = inputs(xp, "float32")[0]
    agree([wide(cuflash.attention(q, q, q))],
          [wide(cuflash.attention(q, q.copy(), q.copy()))], "float32")


def test_averaging_is_in_c_order(xp):
    assert all(array.flags.c_contiguous for array in averaging(xp, 3, 4))


def unaligned(xp, array):
    """The same numbers, one byte off their natural boundaries."""
    octets = xp.zeros(array.nbytes + 1, "uint8")
    octets[1:] = xp.ascontiguousarray(array).reshape(-1).view("uint8")
    return xp.ndarray(array.shape, array.dtype, octets[1:].data)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_argument_may_be_unaligned(xp, dtype):
    q, k, v = inputs(xp, dtype)[:3]
    heads, length = q.shape[2], q.shape[1]
    options = {
        "bias": put(xp, normal((heads, length, k.shape[1]), np.dtype(dtype), 5)),
        "alibi_slopes": put(xp, normal((heads,), np.dtype("float32"), 6)),
        "sinks": put(xp, normal((heads,), np.dtype("float32"), 7)),
    }
    off = {name: unaligned(xp, array) for name, array in options.items()}
    results = []
    for arrays, more in (((q, k, v), options), ([unaligned(xp, a) for a in (q, k, v)], off)):
        out, lse = cuflash.attention(*arrays, **more, return_lse=True)
        rest = (out, lse) if more is options else (unaligned(xp, out), unaligned(xp, lse))
        dlse = lse if more is options else unaligned(xp, lse)
        got = cuflash.attention_backward(
            rest[0], *arrays, *rest, dlse=dlse, bias_grad=True, deterministic=True, **more
        )
        merged = cuflash.merge_states([rest[0]] * 2, [rest[1]] * 2)
        results.append((out, lse, *got, *merged))
    for left, right in zip(*results):
        np.testing.assert_allclose(wide(left), wide(right), rtol=1e-3, atol=1e-3)
