"""The kernels for tensor cores where they have ways of their own: masks and biases through shared
memory, tiles left out, what lies beside the arrays, what hidden numbers may not do.

Small on the emulated GPU, some tiles on a real one.
"""

import budget
import numpy as np
import pytest
import textbook
from arrays import DTYPES, get, normal, same_bits, wide

import cuflash


def draw(dtype, q_len, kv_len, head_dim=16, value_dim=16, batch=1, q_heads=2, kv_heads=1):
    """Return q, k, v and dout by name."""
    shapes = {
        "q": (batch, q_len, q_heads, head_dim), "k": (batch, kv_len, kv_heads, head_dim),
        "v": (batch, kv_len, kv_heads, value_dim), "dout": (batch, q_len, q_heads, value_dim),
    }  # fmt: skip
    return {name: normal(shape, DTYPES[dtype], n) for n, (name, shape) in enumerate(shapes.items())}


def check_call(machine, inputs, options):
    return budget.check_call(None, inputs, options, place=lambda _, value: machine.put(value))


def inside(array, *more, junk=np.nan):
    """The same array as a view into a larger one, with so much more at the end of its axes."""
    larger = np.full(np.add(array.shape, more), junk).astype(array.dtype)
    view = larger[tuple(map(slice, array.shape))]
    view[...] = array
    return view


def shifted(array):
    view = np.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
    view[...] = array
    return view


LAYOUTS = {
    "rows of whole chunks": (0, lambda array: array),
    "rows of odd length": (-3, lambda array: array),
    "rows padded to whole chunks": (-3, lambda array: inside(array, 0, 0, 0, 3)),
    "shifted by one element": (0, shifted),
    "queries backwards": (0, lambda array: array[:, :, ::-1].copy()[:, :, ::-1]),
    "keys backwards": (0, lambda array: array[..., ::-1].copy()[..., ::-1]),
    "every second key": (0, lambda array: np.repeat(array, 2, axis=3)[..., ::2]),
    "every third query": (0, lambda array: np.repeat(array, 3, axis=2)[:, :, ::3]),
    "keys outside": (-1, lambda array: array.swapaxes(2, 3).copy().swapaxes(2, 3)),
    "heads inside": (0, lambda array: np.moveaxis(np.moveaxis(array, 1, 3).copy(), 3, 1)),
}


def mask_and_bias(shape, bias_dtype, kept=0.7):
    mask = np.random.default_rng(5).random(shape) < kept
    mask[..., ::7, :] &= mask.shape[2] == 1  # some rows see nothing
    return {"mask": mask, "bias": normal(shape, DTYPES[bias_dtype], 6)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float16", "float32")], ids="-".join)
def test_masks_and_biases_of_any_layout(layout, dtypes, machine):
    (more, view), (q_len, kv_len) = LAYOUTS[layout], machine.lengths
    options = mask_and_bias((1, 2, q_len, kv_len + more), dtypes[1])
    views = {name: view(array) for name, array in options.items()}
    assert all(np.array_equal(views[name], options[name]) for name in options)
    check_call(machine, draw(dtypes[0], q_len, kv_len + more), views)


@pytest.mark.parametrize("axes", ["bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11qk", "1h1k", "b1q1"])
def test_masks_and_biases_broadcast(axes, machine):
    q_len, kv_len = machine.lengths
    sizes = {"b": 2, "h": 2, "q": q_len, "k": kv_len, "1": 1}
    options = mask_and_bias([sizes[axis] for axis in axes], "float16")
    check_call(machine, draw("float16", q_len, kv_len, batch=2), options)
    for options["bias"] in (options["bias"][:1, :1, :1, :1], options["bias"][..., ::-1]):
        check_call(machine, draw("float16", q_len, kv_len, batch=2), options)
