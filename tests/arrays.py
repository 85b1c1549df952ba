"""Arrays for the tests: the same inputs in NumPy or CuPy, and results back in NumPy."""

import ctypes

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def get(array):
    """Return a NumPy or CuPy array as a NumPy array of its own dtype."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def wide(array):
    """Return a NumPy or CuPy array as float64 NumPy."""
    return get(array).astype(np.float64)


def put(xp, value, dtype=None):
    """Return value as an array of the module xp; nested options (a dict, None, numbers) too."""
    if isinstance(value, dict):
        return {name: put(xp, item) for name, item in value.items()}
    if isinstance(value, (list, np.ndarray)):
        array = np.asarray(value)
        return xp.asarray(array if dtype is None else array.astype(dtype))
    return value


def bytes_under(array):
    """Return the bytes that a NumPy array lies on, from a multiple of 16 on, and its place there.

    With these another library can make an array of the same strides and the same alignment.
    """
    reach = [stride * (length - 1) for stride, length in zip(array.strides, array.shape)]
    place = array.ctypes.data
    start = (place + sum(step for step in reach if step < 0)) // 16 * 16
    stop = place + sum(step for step in reach if step > 0) + array.itemsize
    return np.frombuffer(ctypes.string_at(start, stop - start), np.uint8), place - start


def inside(array, *more, junk=np.nan):
    """Return the same array as a view into a larger one, so much longer at the ends of its axes."""
    larger = np.full(np.add(array.shape, more), junk).astype(array.dtype)
    view = larger[tuple(map(slice, array.shape))]
    view[...] = array
    return view


def normal(shape, dtype=np.float32, seed=0):
    """Return standard normal numbers, rounded to dtype."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_bits(left, right):
    """Return whether two arrays agree in shape, dtype and every bit."""
    left, right = np.ascontiguousarray(get(left)), np.ascontiguousarray(get(right))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.tobytes() == right.tobytes()


def ramp(length, heads, dim, dtype=np.float32, start=0):
    """Return values v (1, length, heads, dim) where every channel of key j holds start + j."""
    column = np.arange(start, start + length, dtype=np.float64)[None, :, None, None]
    return np.broadcast_to(column, (1, length, heads, dim)).astype(dtype, order="C")


def averaging(xp, q_len, kv_len, q_heads=1, kv_heads=1, head_dim=16, dtype="float32"):
    """Return q and k of zeros and v with V[j] = j: each row is the mean of the keys it sees."""
    q = xp.zeros((1, q_len, q_heads, head_dim), dtype)
    k = xp.zeros((1, kv_len, kv_heads, head_dim), dtype)
    return q, k, xp.asarray(ramp(kv_len, kv_heads, head_dim, dtype))


def channel0(xp, numbers, head_dim=16, dtype="float32"):
    """Return (1, len(numbers), 1, head_dim) with the numbers in channel 0 and zeros elsewhere."""
    array = np.zeros((1, len(numbers), 1, head_dim))
    array[0, :, 0, 0] = numbers
    return xp.asarray(array.astype(dtype))


def constant(xp, numbers, head_dim=16, dtype="float32"):
    """Return (1, len(numbers), 1, head_dim) with each number in all channels of its row."""
    column = np.asarray(numbers, np.float64)[None, :, None, None]
    rows = np.broadcast_to(column, (1, len(numbers), 1, head_dim))
    return xp.asarray(rows.astype(dtype, order="C"))
