"""Arrays of other libraries, by the DLPack protocol (faults.md K18)."""

import sys

import numpy as np
import pytest
from arrays import normal, put, wide

import cuflash

SHAPE = (1, 33, 2, 16)


class Producer:
    """An array of a library that nobody knows; writes down what it is asked for."""

    def __init__(self, array):
        self.array, self.streams = array, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **options)


class OldProducer(Producer):
    """A producer from before DLPack 1.0: no keyword but stream."""

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream)


class Foreign:
    """A producer that says its memory is on a CUDA device."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        raise AssertionError("asked for memory although the device can't be used")


def numpy_inputs(dtype=np.float32):
    return [normal(SHAPE, dtype, seed=seed) for seed in range(4)]


def both_ways(q, k, v, dout, **options):
    """Return out, lse and the gradients that are there."""
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    got = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    return [out, lse, *(array for array in got if array is not None)]


def to_numpy(array):
    """Return an array of torch, jax, NumPy or CuPy as float64 NumPy."""
    if type(array).__module__.startswith("torch"):
        return array.detach().double().cpu().numpy()
    return wide(array) if hasattr(array, "get") else np.asarray(array).astype(np.float64)


def agree(left, right, tolerance):
    assert len(left) == len(right)
    for one, other in zip(map(to_numpy, left), map(to_numpy, right), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_an_unknown_library(xp, kind):
    arrays = [put(xp, array) for array in numpy_inputs()]
    got = both_ways(*(kind(array) for array in arrays))
    assert all(hasattr(array, "__dlpack__") for array in got)
    agree(got, both_ways(*arrays), 1e-6)


def test_b147_no_stream_for_memory_of_the_cpu():
    producers = [Producer(array) for array in numpy_inputs()]
    both_ways(*producers)
    assert all(stream is None for producer in producers for stream in producer.streams)


@pytest.mark.gpu
def test_b147_the_current_stream(cupy):
    arrays = [cupy.asarray(array) for array in numpy_inputs()]
    cupy.cuda.Device().synchronize()
    own = cupy.cuda.Stream(non_blocking=True)
    for stream, expected in ((cupy.cuda.Stream.null, 1), (own, own.ptr)):
        with stream:
            producers = [Producer(array) for array in arrays]
            both_ways(*producers)
            seen = {number for producer in producers for number in producer.streams}
        assert seen == {expected}
    stream.synchronize()


@pytest.mark.gpu
def test_b147_the_per_thread_default_stream(cupy):
    arrays = [cupy.asarray(array) for array in numpy_inputs()]
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream.ptds as stream:
        producer = Producer(arrays[0])
        cuflash.attention(producer, *arrays[1:3])
        stream.synchronize()
    assert set(producer.streams) == {2}


def test_b148_producers_are_let_go(xp):
    arrays = [put(xp, array) for array in numpy_inputs()]
    producers = [Producer(array) for array in arrays]
    both_ways(*producers)
    counts = [sys.getrefcount(array) for array in arrays]
    for _ in range(300):
        cuflash.attention(*producers[:3])
    assert [sys.getrefcount(array) for array in arrays] == counts


def test_b146_the_strides_of_a_producer_stay(xp):
    arrays = [put(xp, array).swapaxes(1, 2) for array in numpy_inputs()]
    strides = [array.strides for array in arrays]
    got = both_ways(*(Producer(array) for array in arrays))
    agree(got, both_ways(*(array.copy() for array in arrays)), 1e-5)
    assert [array.strides for array in arrays] == strides


def test_every_option_may_come_from_another_library(xp):
    q, k, v, dout = (put(xp, array) for array in numpy_inputs())
    options = {"mask": put(xp, normal((33, 33)) < 1), "bias": put(xp, normal((33, 33), seed=9)),
               "alibi_slopes": put(xp, np.ones(2), "float32"), "sinks": put(xp, normal((2,)))}
    strange = {name: Producer(array) for name, array in options.items()}
    agree(both_ways(q, k, v, dout, **strange), both_ways(q, k, v, dout, **options), 1e-6)


def test_cuda_memory_without_cuda():
    """One sentence that says what is missing, before the memory is touched (B165)."""
    from conftest import cuda_problem

    if not cuda_problem():
        pytest.skip("there is a CUDA device")
    with pytest.raises((ImportError, RuntimeError)) as error:
        cuflash.attention(Foreign(), Foreign(), Foreign())
    assert "CUDA" in str(error.value) or "cupy" in str(error.value).lower()
    assert "\n" not in str(error.value)


def test_b145_dtypes_that_do_not_exist_here(xp):
    array = put(xp, np.ones(SHAPE, np.int8))
    with pytest.raises(TypeError, match="q"):
        cuflash.attention(Producer(array), Producer(array), Producer(array))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch(dtype, device):
    torch = pytest.importorskip("torch")
    arrays = numpy_inputs()
    tensors = [torch.from_numpy(a).to(device).to(getattr(torch, dtype)) for a in arrays]
    got = both_ways(*tensors, causal=True)
    assert all(isinstance(array, torch.Tensor) and array.device.type == device for array in got)
    assert got[0].dtype == tensors[0].dtype
    right = both_ways(*(tensor.double().cpu().numpy() for tensor in tensors), causal=True)
    agree(got, right, {"float16": 1e-2, "bfloat16": 6e-2}.get(dtype, 1e-5))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_views_options_and_out(device):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(a).to(device).transpose(1, 2).contiguous().transpose(1, 2)
               for a in numpy_inputs()[:3])
    mask = torch.ones(33, 33, dtype=torch.bool, device=device).tril()
    bias = torch.from_numpy(normal((2, 33, 33))).to(device)
    out = torch.empty(SHAPE, device=device)
    result = cuflash.attention(q, k, v, mask=mask, bias=bias, out=out)
    assert result is out
    right = cuflash.attention(*(a.cpu().numpy() for a in (q, k, v)), mask=mask.cpu().numpy(),
                              bias=bias.cpu().numpy())
    agree([out], [right], 1e-5)
    agree([cuflash.attention(q, k, v, mask=mask, bias=bias)], [right], 1e-5)


def test_b151_a_tensor_that_requires_grad():
    torch = pytest.importorskip("torch")
    q = torch.ones(SHAPE, requires_grad=True)
    with pytest.raises((BufferError, TypeError)):
        cuflash.attention(q, q, q)


def test_b145_torch_float8_is_a_type_error():
    torch = pytest.importorskip("torch")
    q = torch.zeros(SHAPE).to(torch.float8_e4m3fn)
    with pytest.raises((TypeError, BufferError)):
        cuflash.attention(q, q, q)


@pytest.mark.gpu
def test_torch_side_stream(cupy):
    """The result is ordered behind the producer's work on torch's stream."""
    torch = pytest.importorskip("torch")
    q, k, v, _ = (torch.from_numpy(a).cuda() for a in numpy_inputs())
    right = cuflash.attention(q, k, v).cpu()
    big = torch.ones(8192, 8192, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for _ in range(10):
            big = big @ big * 1e-4
        late = q * 2 * 0.5 + 0 * big[0, 0].nan_to_num(0, 0, 0)
        got = cuflash.attention(late, k, v) * 1
        assert torch.allclose(got.cpu(), right, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax(dtype):
    jax = pytest.importorskip("jax")
    device = jax.devices("cpu")[0]
    arrays = [jax.device_put(jax.numpy.asarray(a).astype(dtype), device) for a in numpy_inputs()]
    got = both_ways(*arrays)
    assert all(isinstance(array, jax.Array) for array in got)
    assert got[0].dtype == arrays[0].dtype
    right = both_ways(*(np.asarray(array).astype(np.float64) for array in arrays))
    agree(got, right, {"float16": 1e-2, "bfloat16": 6e-2, "float32": 1e-5}[dtype])


def test_libraries_may_not_be_mixed_silently():
    """NumPy beside torch on the CPU is the same device: right, or a TypeError."""
    torch = pytest.importorskip("torch")
    q, k, v, _ = numpy_inputs()
    right = cuflash.attention(q, k, v)
    try:
        got = cuflash.attention(torch.from_numpy(q), k, v)
    except (TypeError, ValueError):
        return
    agree([got], [right], 1e-6)
