"""What only a GPU can get wrong: streams, graphs, threads, memory, determinism (K14, K17, K21)."""

import threading

import numpy as np
import pytest
from arrays import DTYPES, normal, put, same_bits, wide

import cuflash

pytestmark = pytest.mark.gpu
SHAPE = (2, 130, 4, 64)
OPTIONS = {"causal": True, "softcap": 20.0}
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def inputs(cupy, dtype="float16", seed=0):
    return [cupy.asarray(normal(SHAPE, seed=seed + n).astype(dtype)) for n in range(4)]


def both_ways(q, k, v, dout, **options):
    """Return out, lse, dq, dk, dv."""
    options = OPTIONS | options
    deterministic = options.pop("deterministic", True)
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    got = cuflash.attention_backward(dout, q, k, v, out, lse, **options,
                                     deterministic=deterministic)
    return out, lse, got.dq, got.dk, got.dv


def all_same(left, right):
    return all(same_bits(one, other) for one, other in zip(left, right, strict=True))


def poison(cupy):
    """Leave NaN in the free blocks of the memory pool, whatever size comes next."""
    held = [cupy.full(256 * 2**n, np.nan, "float32") for n in range(16) for _ in range(6)]
    held += [cupy.full(1000 * n, np.nan, "float32") for n in range(1, 200)]
    cupy.cuda.Device().synchronize()
    del held


@pytest.mark.parametrize("deterministic", [False, True])
def test_b127_poisoned_memory(cupy, deterministic):
    arrays = inputs(cupy)
    cupy.get_default_memory_pool().free_all_blocks()
    right = [wide(a) for a in both_ways(*arrays, deterministic=deterministic)]
    for _ in range(3):
        poison(cupy)
        got = [wide(a) for a in both_ways(*arrays, deterministic=deterministic)]
        for one, other in zip(got, right, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3)


def test_b126_fifty_runs_have_the_same_bits(cupy):
    arrays = inputs(cupy)
    right = both_ways(*arrays)
    load = cupy.ones((4096, 4096), "float32")
    other = cupy.cuda.Stream(non_blocking=True)
    for _ in range(50):
        with other:
            load @ load
        assert all_same(both_ways(*arrays), right)
    other.synchronize()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tensor_cores_have_the_same_bits(cupy, width, dtype):
    q, dout = (put(cupy, normal((2, 500, 8, width), seed=n), DTYPES[dtype]) for n in (0, 1))
    k, v = (put(cupy, normal((2, 460, 2, width), seed=n), DTYPES[dtype]) for n in (2, 3))
    mask = cupy.asarray(np.random.default_rng(0).random((500, 460)) < 0.9)
    for options in ({"softcap": None}, {"mask": mask, "dropout": 0.2, "seed": 3}):
        options["precision"] = "tf32"
        right = both_ways(q, k, v, dout, **options)
        for _ in range(20):
            assert all_same(both_ways(q, k, v, dout, **options), right)


@pytest.mark.parametrize("head_dim", [40, 128, 256])
def test_deterministic_for_other_heads(cupy, head_dim):
    q, dout = (cupy.asarray(normal((1, 300, 4, head_dim), np.float16, seed=n)) for n in (0, 1))
    k, v = (cupy.asarray(normal((1, 300, 1, head_dim), np.float16, seed=n)) for n in (2, 3))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    runs = [cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=True)
            for _ in range(10)]
    assert all(all_same(run[:3], runs[0][:3]) for run in runs)


def test_b142_a_slow_producer_on_the_same_stream(cupy):
    arrays = inputs(cupy)
    right = both_ways(*arrays)
    spin = cupy.RawKernel(SPIN, "spin")
    late = [cupy.zeros_like(array) for array in arrays]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin((1,), (1,), (np.int64(200_000_000),))
        for target, array in zip(late, arrays, strict=True):
            target[:] = array
        got = both_ways(*late)
        stream.synchronize()
    assert all_same(got, right)


def test_no_call_waits_for_the_device(cupy):
    arrays = inputs(cupy)
    bias = cupy.zeros((130, 130), "float16")
    spin = cupy.RawKernel(SPIN, "spin")
    stream = cupy.cuda.Stream(non_blocking=True)

    def calls():
        both_ways(*arrays)
        both_ways(*arrays, deterministic=False)
        cuflash.attention(*arrays[:3], bias=bias, dropout=0.1)
        state = cuflash.attention(*arrays[:3], return_lse=True)
        cuflash.merge_states([state[0]] * 2, [state[1]] * 2)
        cuflash.dropout_mask(1, 1, 64, 64, 0.5, 3, like=cupy)

    with stream:
        spin((1,), (1,), (np.int64(1),))
        calls()
        stream.synchronize()
        spin((1,), (1,), (np.int64(1_500_000_000),))
        calls()
        waited = stream.done
        stream.synchronize()
    assert not waited


def test_sixteen_streams(cupy):
    sets = [inputs(cupy, seed=10 * n) for n in range(16)]
    right = [both_ways(*arrays) for arrays in sets]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in sets]
    got = []
    for _ in range(3):
        for stream, arrays in zip(streams, sets, strict=True):
            with stream:
                got.append(both_ways(*arrays))
    for stream in streams:
        stream.synchronize()
    assert all(all_same(results, right[n % 16]) for n, results in enumerate(got))


def captured(cupy, call):
    """Return the graph and the results of call(), captured after one warm-up."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
    return stream, graph, results


@pytest.mark.parametrize("deterministic", [False, True])
def test_b171_graph_capture(cupy, deterministic):
    arrays, others = inputs(cupy), inputs(cupy, seed=50)
    right = [wide(a) for a in both_ways(*others, deterministic=deterministic)]
    cupy.cuda.Device().synchronize()
    stream, graph, got = captured(cupy, lambda: both_ways(*arrays, deterministic=deterministic))
    with stream:
        for target, array in zip(arrays, others, strict=True):
            target[:] = array
        for _ in range(3):
            graph.launch()
        stream.synchronize()
    for one, other in zip(got, right, strict=True):
        np.testing.assert_allclose(wide(one), other, atol=2e-3)


def test_graph_capture_of_every_function(cupy):
    q, k, v, _ = inputs(cupy)
    bias = cupy.asarray(normal((4, 1, 130), np.float16))
    strided = cupy.zeros((2, 130, 4, 65), "float16")[..., :-1]
    strided[:] = q
    cupy.cuda.Device().synchronize()

    def calls():
        out, lse = cuflash.attention(strided, k, v, bias=bias, dropout=0.1, seed=7,
                                     return_lse=True)
        got = cuflash.attention_backward(out, strided, k, v, out, lse, bias=bias, dropout=0.1,
                                         seed=7, bias_grad=True)
        merged = cuflash.merge_states([out, out], [lse, lse])
        return out, lse, *got[:4], *merged, cuflash.dropout_mask(1, 1, 9, 9, 0.5, 3, like=cupy)

    right = [wide(array) for array in calls()]
    stream, graph, got = captured(cupy, calls)
    with stream:
        graph.launch()
        stream.synchronize()
    for one, other in zip(got, right, strict=True):
        np.testing.assert_allclose(wide(one), other, atol=5e-3)


def test_b171_an_error_inside_capture_leaves_the_stream_usable(cupy):
    q, k, v, _ = inputs(cupy)
    right = cuflash.attention(q, k, v)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError):
            cuflash.attention(q, k, v, window=(-3, 1))
        stream.end_capture()
        got = cuflash.attention(q, k, v)
        stream.synchronize()
    assert same_bits(got, right)


def test_b172_memory_is_flat_over_500_calls(cupy):
    arrays = inputs(cupy)
    pool = cupy.get_default_memory_pool()

    def after(calls):
        for n in range(calls):
            length = 1 + n % 130
            both_ways(*(array[:, :length] for array in arrays))
        cupy.cuda.Device().synchronize()
        pool.free_all_blocks()
        return pool.total_bytes(), len(cuflash._compile._kernels)

    before = after(140)
    assert after(500) == before


def test_threads_of_one_process(cupy):
    arrays = inputs(cupy)
    right, wrong = both_ways(*arrays), []
    cupy.cuda.Device().synchronize()

    def work():
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                got = both_ways(*arrays)
                stream.synchronize()
                if not all_same(got, right):
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
