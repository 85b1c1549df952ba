"""What shows only in a fresh process, or with two GPUs: caches, cold threads, fork (K17, K20)."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from arrays import normal, same_bits, wide

import cuflash

pytestmark = pytest.mark.gpu
SETUP = """
import threading, numpy as np, cupy, cuflash
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 130, 2, 64)).astype(np.float16)
g = cupy.asarray(q)
right = cuflash.attention(q, q, q, causal=True).astype(float)
def check(out): assert abs(out.get().astype(float) - right).max() < 5e-3
"""
FIRST_CALL = "check(cuflash.attention(g, g, g, causal=True))"
THREADS = """
failures, gate = [], threading.Barrier(16)
def work(n):
    try:
        gate.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for cap in (None, 1e4) if n % 2 else (1e4, None):
                out = cuflash.attention(g, g, g, causal=True, softcap=cap)
                stream.synchronize()
                check(out)
    except BaseException as error:
        failures.append(repr(error))
cupy.cuda.Device().synchronize()
threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
"""
FORK = """
import os, sys, cuflash, numpy as np
q = np.ones((1, 8, 1, 16), np.float16)
cuflash.attention(q, q, q)
child = os.fork()
if child == 0:
    import cupy
    g = cupy.asarray(q)
    os._exit(0 if (cuflash.attention(g, g, g) == 1).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def run(program, cache, **environment):
    """Run a program in a process of its own with its own kernel cache."""
    root = os.path.dirname(os.path.dirname(cuflash.__file__))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    settings = os.environ | {"CUPY_CACHE_DIR": str(cache), "PYTHONPATH": path} | environment
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True,
                            text=True,
                            env=settings, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


def written(folder):
    """Files and the times of their last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_b162_a_second_process_compiles_nothing(tmp_path):
    run(SETUP + FIRST_CALL, tmp_path)
    files = written(tmp_path)
    run(SETUP + FIRST_CALL, tmp_path)
    assert files
    assert files == written(tmp_path)


def test_b173_sixteen_threads_start_cold(tmp_path):
    run(SETUP + THREADS, tmp_path)


def test_b175_a_forked_child_may_use_the_gpu(tmp_path):
    run(FORK, tmp_path)


def test_b161_a_cache_that_cannot_be_written(tmp_path):
    folder = tmp_path / "read only"
    folder.mkdir()
    folder.chmod(0o500)
    run(SETUP + FIRST_CALL, folder)


def test_b160_a_cuda_path_with_a_space(tmp_path):
    folder = tmp_path / "no cuda here"
    folder.mkdir()
    run(SETUP + FIRST_CALL, tmp_path / "my cache", CUDA_PATH=str(folder))


@pytest.fixture
def two_gpus(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    return cupy


def test_b139_the_device_of_the_arrays(two_gpus):
    cupy = two_gpus
    array = normal((1, 130, 2, 64), np.float16)
    results = []
    for index in (0, 1, 0):
        with cupy.cuda.Device(index):
            q = cupy.asarray(array)
        with cupy.cuda.Device(0):
            out, lse = cuflash.attention(q, q, q, return_lse=True)
            got = cuflash.attention_backward(q, q, q, q, out, lse, deterministic=True)
            assert cupy.cuda.Device().id == 0
        assert out.device.id == index and got.dq.device.id == index
        results.append((out, lse, *got[:3]))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_arrays_on_two_devices_are_refused(two_gpus):
    cupy = two_gpus
    with cupy.cuda.Device(0):
        q = cupy.zeros((1, 9, 1, 64), "float16")
    with cupy.cuda.Device(1):
        k = cupy.zeros((1, 9, 1, 64), "float16")
    with pytest.raises(ValueError, match="device"):
        cuflash.attention(q, k, k)


def test_b141_one_thread_per_gpu(two_gpus):
    cupy = two_gpus
    array, wrong = normal((1, 130, 2, 64), np.float16), []

    def work(index):
        with cupy.cuda.Device(index):
            q = cupy.asarray(array)
            right = wide(cuflash.attention(q, q, q))
            for _ in range(1000):
                out = cuflash.attention(q, q, q)
            if (wide(out) != right).any():
                wrong.append(index)

    start = time.perf_counter()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and time.perf_counter() - start < 60
