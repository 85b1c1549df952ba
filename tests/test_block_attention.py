"""Attention with a block mask is attention with the dense mask, in every combination of options."""

import budget
import numpy as np
import pytest
from arrays import DTYPES, get, normal, put, same_bits
from blocks import some

import cuflash
from cuflash import BlockMask, reference

B, HQ, HK, Q, K = 2, 4, 2, 300, 333


def draw(dtype="float32", head_dim=16, value_dim=24, q_len=Q, kv_len=K, kv_heads=HK):
    """Return q, k, v, dout and dlse."""
    shapes = {"q": (B, q_len, HQ, head_dim), "k": (B, kv_len, kv_heads, head_dim),
              "v": (B, kv_len, kv_heads, value_dim), "dout": (B, q_len, HQ, value_dim)}
    inputs = {name: normal(shape, DTYPES[dtype], seed)
              for seed, (name, shape) in enumerate(shapes.items())}
    wide = "float64" if dtype == "float64" else "float32"
    return inputs | {"dlse": normal((B, HQ, q_len), wide, seed=9)}


def check(xp, inputs, dense, options=None, block_size=64, **more):
    """Compare attention under a block mask, forward and backward, with the textbook."""
    options = options or {}
    mask = BlockMask.from_dense(xp.asarray(dense), block_size=block_size)
    there = {name: put(xp, array) for name, array in inputs.items()}
    dout, dlse = there.pop("dout"), there.pop("dlse")
    given = put(xp, options) | {"mask": mask}
    out, lse = cuflash.attention(**there, **given, return_lse=True)
    grads = cuflash.attention_backward(
        dout, *there.values(), out, lse, **given, dlse=dlse, bias_grad="bias" in options, **more
    )
    results = {name: value for name, value in grads._asdict().items() if value is not None}
    budget.check_all({"out": out, "lse": lse} | results, inputs, options | {"mask": dense})
    return out, lse, grads


OPTIONS = {
    "alone": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top-left"},
    "window": {"window": (70, 20)},
    "bias": {"bias": normal((HQ, Q, K), seed=11)},
    "dropout": {"dropout": 0.25, "seed": 5},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": abs(normal((HQ,), seed=12))},
    "sinks": {"sinks": normal((HQ,), seed=13)},
}
OPTIONS["everything"] = {name: value for each in OPTIONS.values() for name, value in each.items()}
PLANES = [(1, 1), (1, HQ), (B, 1), (B, HQ)]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(xp, name):
    planes = PLANES[list(OPTIONS).index(name) % 4]
    check(xp, draw(), some((*planes, Q, K)), OPTIONS[name])


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_shared_and_separate_masks(xp, planes, deterministic):
    check(xp, draw("float16"), some((*planes, Q, K)), block_size=32, deterministic=deterministic)


@pytest.mark.parametrize("block_size", [16, (16, 256), (48, 80), (128, 32), 256])
def test_block_sizes(xp, block_size):
    check(xp, draw("float16", 64, 64), some((1, 1, Q, K)), {"causal": True}, block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(xp, dtype):
    check(xp, draw(dtype, 64, 64), some((1, HQ, Q, K)), {"window": (200, 30)})


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 333), (300, 1), (17, 40), (129, 127), (65, 600)])
def test_lengths(xp, q_len, kv_len):
    dense = some((B, HQ, q_len, kv_len), seed=2)
    check(xp, draw(q_len=q_len, kv_len=kv_len, kv_heads=1), dense, block_size=(16, 32))


@pytest.mark.parametrize("options", [{}, {"sinks": normal((HQ,))}])
def test_rows_and_columns_that_are_empty(xp, options):
    dense = some((1, HQ, Q, K))
    dense[:, 1] = False
    dense[:, :, 64:192] = False
    dense[:, :, 200] = False
    dense[..., 128:256] = False
    dense[..., 60] = False
    out, lse, grads = check(xp, draw(), dense, options)
    if not options:
        assert not get(out)[:, :, 1].any() and (get(lse)[:, 1] == -np.inf).all()
    assert not get(out)[:, 64:192].any() and not get(grads.dq)[:, 64:192].any()
    assert not get(grads.dk)[:, 128:256].any() and not get(grads.dv)[:, 60].any()


def test_what_is_hidden_may_hold_anything(xp):
    dense = some((1, 1, Q, K))
    dense[..., 128:192] = False
    dense[..., 5] = False
    inputs = draw()
    plain = check(xp, inputs, dense)
    for value in (np.nan, np.inf):
        changed = {name: array.copy() for name, array in inputs.items()}
        for name in "kv":
            changed[name][:, 128:192] = changed[name][:, 5] = value
        mask = BlockMask.from_dense(xp.asarray(dense), block_size=64)
        there = {name: put(xp, array) for name, array in changed.items()}
        q, k, v, dout, dlse = there.values()
        out, lse = cuflash.attention(q, k, v, mask=mask, return_lse=True)
        assert same_bits(out, plain[0]) and same_bits(lse, plain[1])
        grads = cuflash.attention_backward(dout, q, k, v, out, lse, mask=mask, dlse=dlse)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_allclose(get(getattr(grads, name)), get(getattr(plain[2], name)),
                                       rtol=1e-3, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("make", [
    lambda xp: BlockMask.causal(Q, K, block_size=32, like=xp),
    lambda xp: BlockMask.butterfly(Q, K, block_size=32, like=xp),
    lambda xp: BlockMask.bigbird(Q, K, block_size=16, heads=HQ, like=xp),
    lambda xp: BlockMask.documents([100, 20, 180], [33, 200, 100], like=xp),
    lambda xp: ~BlockMask.longformer(Q, K, window=(20, 5), block_size=64, like=xp),
])  # fmt: skip
def test_patterns(xp, make):
    mask = make(xp)
    q, k, v, dout, _ = (put(xp, array) for array in draw().values())
    results = []
    for given in (mask, mask.to_dense()):
        out, lse = cuflash.attention(q, k, v, mask=given, return_lse=True)
        grads = cuflash.attention_backward(dout, q, k, v, out, lse, mask=given)
        results.append((out, lse, *grads[:3]))
    for got, right in zip(*results):
        np.testing.assert_allclose(get(got), get(right), rtol=1e-4, atol=1e-5)


def test_three_axes(xp):
    q, k, v, *_ = (put(xp, array) for array in draw().values())
    mask = BlockMask.from_dense(xp.asarray(some((1, HQ, Q, K))), block_size=64)
    out = cuflash.attention(q[0], k[0], v[0], mask=mask)
    assert same_bits(out, cuflash.attention(q[:1], k[:1], v[:1], mask=mask)[0])


def test_nothing_to_do(xp):
    q, k, v = xp.zeros((2, 0, 4, 16)), xp.zeros((2, 5, 4, 16)), xp.zeros((2, 5, 4, 16))
    assert cuflash.attention(q, k, v, mask=BlockMask.causal(0, 5, like=xp)).shape == (2, 0, 4, 16)
    out = cuflash.attention(k, q, q, mask=BlockMask.causal(5, 0, like=xp))
    assert out.shape == (2, 5, 4, 16) and not get(out).any()


@pytest.mark.parametrize("shape", [
    (B, HQ, Q, K + 1), (B, HQ, Q - 1, K), (B + 1, HQ, Q, K), (B, HK, Q, K), (1, 1, K, Q),
    (1, 1, 1, K), (B, HQ, Q, 1),
])  # fmt: skip
def test_a_mask_of_another_shape_is_refused(xp, shape):
    q, k, v, dout, _ = (put(xp, array) for array in draw().values())
    batch, heads, q_len, kv_len = shape
    mask = BlockMask.from_function(lambda b, h, i, j: i >= j, q_len, kv_len, batch=batch,
                                   heads=heads, like=xp)  # fmt: skip
    rule = r"mask must be a BlockMask of shape \(2 or 1, 4 or 1, 300, 333\)\. Got \("
    with pytest.raises(ValueError, match=rule):
        cuflash.attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match=rule):
        cuflash.attention_backward(dout, q, k, v, dout, xp.zeros((B, HQ, Q), "float32"), mask=mask)
    with pytest.raises(ValueError, match=rule):
        cuflash.explain(q, k, v, mask=mask)


@pytest.mark.gpu
def test_a_mask_of_another_device_is_refused(cupy):
    for here, there in ((np, cupy), (cupy, np)):
        q, k, v, *_ = (put(here, array) for array in draw().values())
        mask = BlockMask.causal(Q, K, like=there)
        with pytest.raises(ValueError, match=r"mask must lie on the device of q \(mask.to"):
            cuflash.attention(q, k, v, mask=mask)
        cuflash.attention(q, k, v, mask=mask.to(q))


@pytest.mark.gpu
def test_blocks_of_one_device_for_a_mask_on_the_other(cupy):
    blocks = np.eye(3, dtype=bool)
    for here, there in ((np, cupy), (cupy, np)):
        mask = BlockMask.from_blocks(here.asarray(blocks), 300, like=there)
        assert isinstance(mask.states, there.ndarray) and mask.density == pytest.approx(1 / 3)


@pytest.mark.gpu
def test_a_mask_made_on_one_stream_is_used_on_another(cupy):
    q, k, v, *_ = (put(cupy, array) for array in draw().values())
    right = cuflash.attention(q, k, v, mask=BlockMask.bigbird(Q, K, block_size=16, like=cupy))
    cupy.cuda.Device().synchronize()
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for _ in range(5):
        with first:
            cupy.arange(10**7)[::-1].copy().sort()  # keeps the stream busy
            mask = BlockMask.bigbird(Q, K, block_size=16, like=cupy)
        with second:
            out = cuflash.attention(q, k, v, mask=mask)
        second.synchronize()
        assert same_bits(out, right)


def test_numpy_skips_absent_blocks_and_masks_only_partial_ones(monkeypatch):
    scored = []

    def counting(heads, rows, columns, *more):
        scored.append((len(rows) * len(columns), heads.visible(rows, columns) is None))
        return score(heads, rows, columns, *more)

    score = reference._scores
    monkeypatch.setattr(reference, "_scores", counting)
    blocks = np.random.default_rng(0).random((8, 8)) < 0.3
    mask = BlockMask.from_blocks(blocks, 1000) | BlockMask.sliding_window(1000, window=(9, 9))
    q = normal((1, 1000, 1, 16))
    cuflash.attention(q, q, q, mask=mask)
    assert sum(n for n, _ in scored) <= (mask.states > 0).sum() * 128**2
    assert sum(n for n, plain in scored if plain) >= ((mask.states == 2).sum() - 15) * 128**2
    scored.clear()
    blocks[:] = True
    blocks[0, 7] = False
    cuflash.attention(q, q, q, mask=BlockMask.from_blocks(blocks, 1000), window=(50, 0))
    assert sum(n for n, _ in scored) <= 8 * 128 * (128 + 50)


def test_explain_tells_the_density(xp):
    q = xp.zeros((1, 1024, 2, 64), "float16")
    mask = BlockMask.causal(1024, like=xp)
    for arch in (None, 90):
        told = cuflash.explain(q, q, q, mask=mask, arch=arch)
        assert "block mask, 56.2% of the blocks present" in str(told)
    told, whole = (cuflash.explain(q, q, q, mask=one, arch=80) for one in (mask, None))
    assert told.forward_bytes < whole.forward_bytes


def test_a_mask_that_hides_nothing_is_none(xp):
    q, k, v, *_ = (put(xp, array) for array in draw().values())
    mask = BlockMask.from_function(lambda b, h, i, j: i >= 0, Q, K, block_size=32, like=xp)
    assert same_bits(cuflash.attention(q, k, v, mask=mask), cuflash.attention(q, k, v))
