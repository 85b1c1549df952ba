"""Arrays of any library, in and out: NumPy and CuPy as they are, all others by DLPack.

DLPack orders the work with the producer's stream on the way in and with the consumer's on the way
out; in between everything runs on CuPy's current stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from cuflash._errors import reject

_CPU_DEVICES = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA and kDLCUDAManaged


def library(array: Any) -> str:
    """Name of the top-level package that an array comes from."""
    return _package(type(array))  # type: ignore[arg-type]


@cache
def _package(kind: Any) -> str:
    name: str = kind.__module__
    return name.partition(".")[0]


def is_cupy(array: Any) -> bool:
    """Whether this is a CuPy array, found out without importing CuPy."""
    return library(array) == "cupy"


def native(name: str, array: Any) -> Any:
    """The array as a NumPy or CuPy array that shares its memory.

    Raises
    ------
    TypeError
        If it is no array, or lies on a device that is neither a CPU nor a CUDA GPU.
    """
    if is_cupy(array):
        return array
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise reject(TypeError, f"{name} must be a plain array (give mask=)", "a masked array")
        return array
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        rule = f"{name} must be an array of NumPy, CuPy or a library with DLPack"
        raise reject(TypeError, rule, type(array).__name__)
    kind = array.__dlpack_device__()[0]
    if kind in _CUDA_DEVICES:
        return cupy_module().from_dlpack(array)
    if kind not in _CPU_DEVICES:
        raise reject(TypeError, f"{name} must lie on a CPU or a CUDA GPU", f"DLPack device {kind}")
    return _from_cpu(name, array)


def _from_cpu(name: str, array: Any) -> np.ndarray:
    if getattr(array, "requires_grad", False):
        rule = f"{name} must be detached from its library's gradients (.detach())"
        raise reject(ValueError, rule, type(array).__name__)
    dtype = str(getattr(array, "dtype", "unknown"))
    if not dtype.endswith("bfloat16"):
        try:
            return np.from_dlpack(array)
        except RuntimeError as error:  # NumPy's answer to an element type that it lacks
            raise reject(TypeError, f"{name} must have a dtype that NumPy knows", dtype) from error
    if library(array) == "torch":  # NumPy's DLPack has no bfloat16: it travels as integers
        bits = np.from_dlpack(array.view(sys.modules["torch"].int16))
        return bits.view(ml_dtypes.bfloat16)
    return np.asarray(array)


def answer(array: Any, like: Any) -> Any:
    """A NumPy or CuPy array as one of the library that `like` comes from.

    Without a copy, but for JAX on the CPU. Libraries that cannot be recognised get the NumPy or
    CuPy array itself.
    """
    name = library(like)
    if array is None or isinstance(like, np.ndarray) or name == "cupy":
        return array
    on_cpu = isinstance(array, np.ndarray)
    if name == "torch":
        torch = sys.modules["torch"]
        if on_cpu and array.dtype == ml_dtypes.bfloat16:
            return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(array)
    if name in ("jax", "jaxlib"):
        import jax

        return jax.numpy.asarray(array) if on_cpu else jax.dlpack.from_dlpack(array)
    if name == "tensorflow":
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(array.__dlpack__())
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(array)
    return array


def device_index(array: Any) -> int:
    """Index of the GPU that a CuPy array lies on; -1 for a NumPy array."""
    return -1 if isinstance(array, np.ndarray) else array.data.device_id


def module_of(array: Any) -> Any:
    """The module numpy or cupy, as an array of one of the two has it."""
    return np if isinstance(array, np.ndarray) else cupy_module()


@contextmanager
def place(like: Any) -> Iterator[Any]:
    """The module numpy or cupy, with the device current where new arrays belong.

    `like` is None (the CPU), an array of any library, or one of the two modules.
    """
    if like is None or like is np:
        yield np
    elif getattr(like, "__name__", None) == "cupy":
        yield like
    else:
        array = native("like", like)
        if isinstance(array, np.ndarray):
            yield np
        else:
            with array.device:
                yield cupy_module()


def to_host(array: Any) -> np.ndarray:
    """The values of a NumPy or CuPy array as a NumPy array; waits for the GPU."""
    return array if isinstance(array, np.ndarray) else array.get()


def wait_for(array: Any) -> None:
    """Waits until what was asked of an array's device on the current stream is done."""
    if not isinstance(array, np.ndarray):
        cupy_module().cuda.get_current_stream().synchronize()


def same_place(name: str, array: Any, first: Any, what: str = "q") -> Any:
    """The array, if it lies on the device of the first one, which is called `what`."""
    index = device_index(array)
    if index != device_index(first):
        where = f"CUDA device {index}" if index >= 0 else "the CPU"
        raise reject(ValueError, f"{name} must lie on the device of {what}", where)
    return array


def cupy_module() -> Any:
    """CuPy, or one sentence that says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "CUDA arrays need CuPy, which is not installed: "
            'pip install "cuflash[cuda13]" (or cuda12, for an older driver).'
        ) from error
    return cupy


def is_aligned(array: Any) -> bool:
    """Whether no element of a CuPy array lies across its natural boundary; NumPy copes itself."""
    if isinstance(array, np.ndarray) or array.size == 0:
        return True
    where = array.data.ptr
    for stride in array.strides:
        where |= stride
    return bool(where % array.itemsize == 0)


def aligned(array: Any) -> Any:
    """The CuPy array itself, or a copy of it if it is not aligned."""
    if is_aligned(array):
        return array
    cupy, size = cupy_module(), array.itemsize
    octets = cupy.ndarray((*array.shape, size), np.uint8, array.data, strides=(*array.strides, 1))
    return octets.copy().view(array.dtype)[..., 0]  # ascontiguousarray need not copy


def repeats(array: Any) -> bool:
    """Whether an element may stand at two places of the array, as in broadcast views."""
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape) if n > 1):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays of one device share memory, or are too intricate to tell."""
    if not isinstance(a, np.ndarray):
        a, b = _shadow(a), _shadow(b)
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _shadow(array: Any) -> np.ndarray:
    """A NumPy array with the address and strides of a CuPy array, never to be read."""
    interface = {
        "data": (array.data.ptr, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.dtype.itemsize}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
