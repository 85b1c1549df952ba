"""The CUDA kernels without a GPU: their source run on the CPU, between inaccessible pages.

Hopper's forward kernel has test_emulated_hopper.py.
"""

import budget
import emulated
import ml_dtypes
import numpy as np
import pytest
from emulated import both_ways
from problems import PROBLEMS, make

import cuflash

pytestmark = [
    pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("portable_forward"),
]
DTYPES = ("float32", "float16", "float64", "bfloat16")


SMALL = [name for name in sorted(PROBLEMS) if "many" not in name and "512" not in name]
FOR_TENSOR_CORES = [
    name for name in SMALL
    if PROBLEMS[name].head_dim % 8 == 0 and (PROBLEMS[name].value_dim or 8) % 8 == 0
]


def check(results, inputs, answers):
    for name, got in results.items():
        budget.check(name, got, inputs["q"].dtype, *(answer[name] for answer in answers))


@pytest.mark.parametrize("number", range(0, len(SMALL), 2))
def test_problem(number, folder, launched, monkeypatch):
    dtype = DTYPES[number // 2 % 4]
    inputs, options, answers = make(SMALL[number], dtype)
    arch = 75 if "float16" in dtype else 90  # without tensor-core kernels
    emulated.install(monkeypatch, folder, arch=arch, descending=number % 4 == 0)
    check(both_ways(inputs, options, deterministic=number % 8 < 4), inputs, answers)
    assert launched[0] == "attention_forward_generic"


@pytest.mark.parametrize("number", range(len(FOR_TENSOR_CORES)))
def test_problem_on_tensor_cores(number, folder, launched, monkeypatch):
    dtype, arch = ("float16", "bfloat16")[number % 2], (90, 80, 86)[number % 3]
    inputs, options, answers = make(FOR_TENSOR_CORES[number], dtype)
    emulated.install(monkeypatch, folder, arch=arch, descending=number // 2 % 2 == 0)
    more = {"bias_grad": False, "deterministic": number // 3 % 2 == 0}
    check(both_ways(inputs, options, **more), inputs, answers)
    last = "attention_backward_query" if more["deterministic"] else "convert_dq_fragments"
    assert {"attention_forward", "attention_backward", last} <= set(launched)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["everything", "causal", "mask_bias"])
def test_the_order_of_threads_does_not_show(name, dtype, folder, monkeypatch):
    inputs, options, _ = make(name, dtype)
    results = []
    for descending in (False, True):
        emulated.install(monkeypatch, folder, descending=descending)
        results.append(both_ways(inputs, options, deterministic=True))
    for key, got in results[0].items():
        assert got.tobytes() == results[1][key].tobytes(), key


@pytest.mark.parametrize("arch", [75, 86])
def test_the_tiles_of_smaller_gpus(arch, folder, monkeypatch):
    inputs, options, answers = make("odd_above_tile", "float32")
    emulated.install(monkeypatch, folder, arch=arch)
    check(both_ways(inputs, options), inputs, answers)


@pytest.mark.parametrize("arch", [75, 86])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tf32_without_a_tile_backward(arch, deterministic, folder, launched, monkeypatch):
    emulated.install(monkeypatch, folder, arch=arch)
    inputs, _, answers = make("head_dim_256", "float16")
    wider = {name: array.astype("float32") for name, array in inputs.items()}
    check(both_ways(wider, {"precision": "tf32"}, deterministic=deterministic), inputs, answers)
    assert "attention_backward_generic" in launched


@pytest.mark.parametrize("before", [False, True])
def test_views_reach_to_the_fences(before, folder, monkeypatch):
    """Strided views whose first or last element lies beside an inaccessible page."""
    emulated.install(monkeypatch, folder)
    rng = np.random.default_rng(0)
    base = {name: rng.standard_normal((1, 33, 5, 40)).astype("float32") for name in "qkv"}

    def view(array):
        whole = emulated.put(array, before)
        return whole[:, ::2, ::2, ::-1] if before else whole[:, 1::2, ::2, 3:]

    q, k, v = (view(array) for array in base.values())
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    right, right_lse = cuflash.attention(q.inner, k.inner, v.inner, causal=True, return_lse=True)
    np.testing.assert_allclose(out.inner, right, atol=2e-6)
    np.testing.assert_allclose(lse.inner, right_lse, atol=2e-6)
    got = cuflash.attention_backward(out, q, k, v, out, lse, causal=True)
    tensors = (q.inner, k.inner, v.inner, right, right_lse)
    want = cuflash.attention_backward(right, *tensors, causal=True)
    for a, b in zip(got[:3], want[:3]):
        np.testing.assert_allclose(a.inner, b, atol=4e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_values_have_no_influence(value, folder, monkeypatch):
    emulated.install(monkeypatch, folder)
    inputs, options, _ = make("mask_causal_softcap", "float32")
    results = []
    for special in (0, value):
        changed = {name: array.copy() for name, array in inputs.items()}
        changed["k"][:, -1] = changed["v"][:, -1] = special
        shown = np.arange(changed["k"].shape[1]) < changed["k"].shape[1] - 1
        mask = options["mask"] & shown
        results.append(both_ways(changed, {**options, "mask": mask}, deterministic=True))
    for name, got in results[0].items():
        assert np.isfinite(got[got != -np.inf]).all()
        assert np.array_equal(got, results[1][name]), name


@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_bits_of_half_types(dtype, width, folder, launched, monkeypatch):
    """Every finite number comes back from a copy through the kernel unchanged."""
    emulated.install(monkeypatch, folder)
    heads = 2**16 // width
    v = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(1, 1, heads, width)
    v = np.where(np.isfinite(v.astype("float32")), v, np.zeros_like(v))
    q = np.zeros((1, 1, heads, 8), dtype)
    out = cuflash.attention(*(emulated.put(array) for array in (q, q, v)))
    assert (out.inner == v).all()
    assert launched == ["attention_forward" if width == 256 else "attention_forward_generic"]


def test_infinite_keys_and_ragged_ends(folder, monkeypatch):
    """Rows and keys beyond the ends must not meet an infinity (softcap makes its score finite)."""
    emulated.install(monkeypatch, folder)
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, n, 1, 16)).astype("float32") for n in (33, 70, 70, 33))
    k[0, 5], k[0, 5, :, 0], q[..., 0] = 0, np.inf, abs(q[..., 0]) + 1
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    for deterministic in (False, True):
        results = both_ways(tensors, {"softcap": 3.0}, deterministic=deterministic)
        others = np.arange(70) != 5
        assert np.isfinite(results["dv"]).all() and np.isfinite(results["dk"][:, others]).all()
