"""explain: which kernels a call would run, without a GPU too."""

import numpy as np
import pytest
from arrays import normal
from forwards import HOPPER, PORTABLE

import cuflash

Q = normal((2, 300, 4, 64), np.float16)
KV = normal((2, 300, 2, 64), np.float16)


def test_numpy_runs_the_reference():
    told = cuflash.explain(Q, KV, KV, causal=True)
    assert told.kernel == "reference"
    assert told.plans == () and told.device is None
    assert "CPU" in str(told) and "causal" in str(told)


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_a_gpu_that_is_not_here(arch):
    told = cuflash.explain(Q, KV, KV, softcap=5.0, window=(9, None), arch=arch)
    assert told.kernel == told.plans[0].kernel != "reference"
    assert told.device.arch == arch
    for plan in told.plans:
        assert plan.grid >= 1 and 32 <= plan.threads <= 1024
        assert plan.shared_bytes <= told.device.shared_bytes
        assert plan.kernel in str(told)
    tile = [told.plans[0].constant(name) for name in ("BLOCK_M", "BLOCK_N")]
    assert "tile {} queries x {} keys".format(*tile) in str(told)


@pytest.mark.parametrize(("arch", "options", "kernel"), [
    (90, {}, HOPPER), (90, {"bias": normal((300, 1))}, HOPPER), (80, {}, PORTABLE),
    (100, {}, PORTABLE), (75, {}, "attention_forward_generic"),
], ids=lambda value: str(value)[:9])  # fmt: skip
def test_the_kernel_of_an_architecture(arch, options, kernel):
    assert cuflash.explain(Q, KV, KV, **options, arch=arch).kernel == kernel


@pytest.mark.parametrize("arch", [50, 130, 0])
def test_b163_an_unknown_architecture(arch):
    with pytest.raises(ValueError, match=f"Got {arch}"):
        cuflash.explain(Q, KV, KV, arch=arch)


def test_the_checks_are_those_of_attention():
    with pytest.raises(ValueError, match="window"):
        cuflash.explain(Q, KV, KV, window=(-3, 0), arch=90)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 1), (100_000, 100_000)])
def test_any_sizes(sizes):
    q = np.broadcast_to(np.zeros((1, 1, 1, 16), np.float16), (1, sizes[0], 1, 16))
    k = np.broadcast_to(np.zeros((1, 1, 1, 16), np.float16), (1, sizes[1], 1, 16))
    for arch in (None, 90):
        assert str(cuflash.explain(q, k, k, causal=True, arch=arch))


@pytest.mark.gpu
def test_what_is_told_is_what_runs(cupy):
    q, kv = cupy.asarray(Q), cupy.asarray(KV)
    told = cuflash.explain(q, kv, kv)
    assert told.device.arch == int(cupy.cuda.Device().compute_capability)
    assert told.kernel != "reference" and told.device.name in str(told)
