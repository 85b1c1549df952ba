"""faults.md K5, K18 to K21 where a plain call shows it: subnormals, caches, mixed dtypes."""

import subprocess
import sys

import numpy as np
import pytest
from arrays import averaging, channel0, constant, normal, put, same_bits, wide

import cuflash


def test_b167_subnormal_values_are_kept(xp):
    q, k = constant(xp, [0]), constant(xp, [0, 0])
    out = wide(cuflash.attention(q, k, constant(xp, [1e-40, 1e-40])))
    np.testing.assert_allclose(out, 1e-40, rtol=1e-4)


def test_b167_subnormal_scores_are_not_nan(xp):
    q, k = channel0(xp, [1e-30]), channel0(xp, [1e-15, -1e-15])
    out = cuflash.attention(q, k, constant(xp, [0, 1]), scale=1.0)
    np.testing.assert_allclose(wide(out), 0.5, rtol=1e-6)


def test_b168_every_value_counts_on_every_call(xp):
    """Two calls that differ in one value must differ in their result."""
    q, k, v = (put(xp, normal((1, 40, 2, 16), seed=seed)) for seed in range(3))
    mask = put(xp, np.tri(40, dtype=bool))
    changes = {
        "causal": [False, True], "window": [(3, 3), (4, 3), (3, 4), (None, 3)],
        "scale": [0.1, 0.2, -0.1], "softcap": [1.0, 2.0, None], "mask": [mask, ~mask.T],
        "bias": [put(xp, normal((40, 40), seed=s)) for s in (5, 6)],
        "sinks": [put(xp, normal((2,), seed=s)) for s in (5, 6)],
        "alibi_slopes": [put(xp, np.array([a, 1.0]), "float32") for a in (0.5, 0.25)],
    }  # fmt: skip
    for name, values in changes.items():
        results = [wide(cuflash.attention(q, k, v, **{name: value})) for value in values]
        for n, one in enumerate(results):
            assert all(abs(one - other).max() > 1e-4 for other in results[:n]), name
    for one, other in (({"dropout": 0.1}, {"dropout": 0.2}), ({"seed": 1}, {"seed": 2})):
        calls = [cuflash.attention(q, k, v, **({"dropout": 0.3, "seed": 5} | o))
                 for o in (one, other)]
        assert not same_bits(*calls)


@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_b150_no_silent_conversion(xp, place):
    arrays = {name: xp.zeros((1, 4, 1, 16), "float32") for name in "qkv"}
    arrays[place] = arrays[place].astype("float16")
    with pytest.raises(TypeError, match="dtype"):
        cuflash.attention(**arrays)


def test_b150_a_float32_bias_beside_half_inputs(xp):
    q, k, v = averaging(xp, 5, 8, dtype="float16")
    bias = put(xp, np.full((5, 8), -1e30), "float32")
    bias[:, 2:4] = 0
    out, lse = cuflash.attention(q, k, v, bias=bias, return_lse=True)
    np.testing.assert_allclose(wide(out), 2.5)
    got = cuflash.attention_backward(v[:, :5], q, k, v, out, lse, bias=bias, bias_grad=True)
    assert all(np.isfinite(wide(a)).all() for a in (got.dq, got.dk, got.dv, got.dbias))


def test_b150_a_mask_of_one_row_is_broadcast(xp):
    q, k, v = averaging(xp, 5, 8)
    mask = xp.asarray([[True] * 4 + [False] * 4])
    np.testing.assert_allclose(wide(cuflash.attention(q, k, v, mask=mask)), 1.5)


def test_large_logits_need_no_sentinel(xp):
    """The largest finite scores are legal, of either sign."""
    for sign in (1, -1):
        q, k = channel0(xp, [sign * 3e19]), channel0(xp, [1e19, 1e19, -1e19])
        out, lse = cuflash.attention(q, k, constant(xp, [0, 1, 5]), scale=1.0, return_lse=True)
        np.testing.assert_allclose(wide(out), 0.5 if sign == 1 else 5, rtol=1e-6)
        np.testing.assert_allclose(wide(lse), 3e38, rtol=1e-6)


def test_b175_import_and_call_after_fork():
    program = (
        "import os, cuflash, numpy as np\n"
        "q = np.ones((1, 4, 1, 8), np.float32)\n"
        "cuflash.attention(q, q, q)\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if (cuflash.attention(q, q, q) == 1).all() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True,
                            text=True,
                            timeout=120)
    assert result.returncode == 0, result.stderr


def test_b176_threads_on_the_cpu():
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (normal((2, 60, 2, 16), seed=seed) for seed in range(3))
    right = cuflash.attention(q, k, v, causal=True)
    with ThreadPoolExecutor(8) as pool:
        for out in pool.map(lambda _: cuflash.attention(q, k, v, causal=True), range(64)):
            assert same_bits(out, right)
