"""merge_states and the conventions of lse (faults.md K6)."""

import budget
import numpy as np
import pytest
import textbook
from arrays import DTYPES, averaging, get, normal, put, same_bits, wide

import cuflash


def state(xp, values, lses, head_dim=4):
    """Return out (1, rows, 1, head_dim) with constant rows, and lse (1, 1, rows)."""
    out = np.tile(np.asarray(values, np.float32)[None, :, None, None], (1, 1, 1, head_dim))
    return xp.asarray(out), xp.asarray(np.asarray(lses, np.float32)[None, None])


def merged(*states):
    return cuflash.merge_states([out for out, _ in states], [lse for _, lse in states])


def test_b63_two_equal_weights(xp):
    out, lse = merged(state(xp, [1], [0]), state(xp, [3], [0]))
    assert (wide(out) == 2).all()
    np.testing.assert_allclose(wide(lse), 0.693147, rtol=1e-6)


def test_b63_only_empty_states(xp):
    empty = state(xp, [0, 0], [-np.inf, -np.inf])
    for count in (1, 2, 5):
        out, lse = merged(*[empty] * count)
        assert not wide(out).any() and (wide(lse) == -np.inf).all()


def test_b63_an_empty_state_changes_nothing(xp):
    some = xp.asarray(normal((2, 3, 4, 5))), xp.asarray(normal((2, 4, 3), seed=1))
    empty = xp.zeros((2, 3, 4, 5), "float32"), xp.full((2, 4, 3), -np.inf, "float32")
    for states in ((some, empty), (empty, some), (empty, some, empty), (some,)):
        out, lse = merged(*states)
        assert same_bits(out, some[0]) and same_bits(lse, some[1])


def test_an_empty_state_may_hold_nan(xp):
    """What an lse of -inf says was not seen never influences anything."""
    out, lse = merged(state(xp, [5], [1]), state(xp, [np.nan], [-np.inf]))
    assert (wide(out) == 5).all() and (wide(lse) == 1).all()


def test_large_and_far_apart_lses(xp):
    out, lse = merged(state(xp, [1, 1], [1e4, -1e4]), state(xp, [3, 3], [1e4, 1e4]))
    np.testing.assert_allclose(wide(out)[0, :, 0, 0], [2, 3], rtol=1e-6)
    np.testing.assert_allclose(wide(lse)[0, 0], [1e4 + np.log(2), 1e4], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_the_keys_merge_to_the_whole(xp, dtype):
    shapes = {"q": (2, 33, 4, 16), "k": (2, 100, 2, 16), "v": (2, 100, 2, 24)}
    inputs = {name: normal(shape, dtype=DTYPES[dtype], seed=seed)
              for seed, (name, shape) in enumerate(shapes.items())}
    q, k, v = (put(xp, array) for array in inputs.values())
    pieces = [slice(0, 1), slice(1, 60), slice(60, 60), slice(60, 100)]
    states = [cuflash.attention(q, k[:, piece], v[:, piece], return_lse=True) for piece in pieces]
    out, lse = merged(*states)
    assert out.dtype == q.dtype and lse.dtype == states[0][1].dtype
    right, rough = (function(**inputs)["out"] for function in (textbook.truth, textbook.plain))
    allowed = 3 * abs(rough - right).max() + 2 * budget.ulp(out.dtype, abs(right).max())
    assert abs(get(out).astype(right.dtype) - right).max() <= allowed
    whole = cuflash.attention(q, k, v, return_lse=True)[1]
    np.testing.assert_allclose(wide(lse), wide(whole), atol=1e-6)


def test_merging_can_be_differentiated(xp):
    """With dlse, the gradients of two pieces are those of the whole (B66)."""
    q, k, v, dout = (put(xp, normal((1, 20, 2, 16), seed=seed)) for seed in range(4))
    left, right = slice(0, 9), slice(9, 20)
    states = [cuflash.attention(q, k[:, p], v[:, p], return_lse=True) for p in (left, right)]
    out, lse = merged(*states)
    whole = cuflash.attention_backward(dout, q, k, v, out, lse)
    dq = 0
    for piece, (part, part_lse) in zip((left, right), states, strict=True):
        weight = np.exp(wide(part_lse) - wide(lse))  # (B, H, Sq)
        rows = weight.swapaxes(1, 2)[..., None]
        dpart = put(xp, wide(dout) * rows, np.float32)
        dlse = ((wide(part) - wide(out)) * wide(dout)).sum(axis=-1).swapaxes(1, 2) * weight
        got = cuflash.attention_backward(dpart, q, k[:, piece], v[:, piece], part, part_lse,
                                         dlse=put(xp, dlse, np.float32))
        dq = dq + wide(got.dq)
        short = cuflash.attention_backward(dout, q, k[:, piece], v[:, piece], out, lse)
        for one in (got, short):
            np.testing.assert_allclose(wide(one.dk), wide(whole.dk)[:, piece], atol=2e-6)
            np.testing.assert_allclose(wide(one.dv), wide(whole.dv)[:, piece], atol=2e-6)
    np.testing.assert_allclose(dq, wide(whole.dq), atol=2e-6)


def test_b87_states_of_different_layouts(xp):
    outs = [xp.asarray(normal((2, 5, 3, 8), seed=seed)) for seed in range(2)]
    lses = [xp.asarray(normal((2, 3, 5), seed=seed + 2)) for seed in range(2)]
    right = cuflash.merge_states(outs, lses)
    strided = xp.zeros((2, 3, 5, 16), "float32")[..., ::2].swapaxes(1, 2)
    strided[:] = outs[1]
    flipped = xp.zeros((5, 3, 2), "float32").T
    flipped[:] = lses[1]
    got = cuflash.merge_states([outs[0], strided], (lses[0], flipped))
    assert same_bits(got[0], right[0]) and same_bits(got[1], right[1])


def test_three_axes(xp):
    outs = [xp.asarray(normal((5, 3, 8), seed=seed)) for seed in range(2)]
    lses = [xp.asarray(normal((3, 5), seed=seed + 2)) for seed in range(2)]
    whole = cuflash.merge_states([out[None] for out in outs], [lse[None] for lse in lses])
    out, lse = cuflash.merge_states(outs, lses)
    assert out.shape == (5, 3, 8) and lse.shape == (3, 5)
    assert get(out).tobytes() == get(whole[0]).tobytes()


@pytest.mark.parametrize("error", ["count", "none", "shape", "lse_shape", "dtype"])
def test_what_cannot_be_merged(xp, error):
    outs = [xp.zeros((1, 5, 3, 8), "float32") for _ in range(2)]
    lses = [xp.zeros((1, 3, 5), "float32") for _ in range(2)]
    if error == "count":
        lses = lses[:1]
    elif error == "none":
        outs, lses = [], []
    elif error == "shape":
        outs[1] = outs[1][:, :4]
    elif error == "lse_shape":
        lses[1] = lses[1].swapaxes(1, 2)
    else:
        outs[1] = outs[1].astype("float16")
    with pytest.raises((TypeError, ValueError), match=r"outs|lses"):
        cuflash.merge_states(outs, lses)


def test_b64_lse_of_a_row_without_keys(xp):
    q, k, v = averaging(xp, 5, 2)
    _, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert (wide(lse)[0, 0, :3] == -np.inf).all()


def test_b65_lse_is_the_natural_logarithm(xp):
    q, k, v = averaging(xp, 3, 64)
    _, lse = cuflash.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(wide(lse), 4.158883, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b67_lse_is_contiguous_float32(xp, dtype):
    q = xp.zeros((2, 7, 4, 16), DTYPES[dtype])
    _, lse = cuflash.attention(q, q, q, return_lse=True)
    assert lse.shape == (2, 4, 7) and lse.flags.c_contiguous
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
