"""The kernels for tensor cores where they have ways of their own: masks and biases through shared
memory, tiles that are left out, and sums that hidden infinities spoil.

Small on the emulated GPU, several tiles on a real one.
"""

import budget
import numpy as np
import pytest
import textbook
from arrays import DTYPES, get, inside, normal, same_bits, wide
from forwards import FORWARDS, PORTABLE, forward_by

import cuflash
from cuflash import _params


def draw(q_len, kv_len, head_dim=16, value_dim=16, batch=1, dtype="float16"):
    """Return q, k, v and dout by name; two query heads share one of k and v."""
    shapes = {
        "q": (batch, q_len, 2, head_dim), "k": (batch, kv_len, 1, head_dim),
        "v": (batch, kv_len, 1, value_dim), "dout": (batch, q_len, 2, value_dim),
    }  # fmt: skip
    return {name: normal(shape, DTYPES[dtype], n) for n, (name, shape) in enumerate(shapes.items())}


def forward(machine, kernel, q, k, v, **options):
    """Return the output and lse as a kernel makes them, if it takes such a problem."""
    takes = q.dtype != np.float32 and machine.arch == 90
    with forward_by(kernel):
        results = cuflash.attention(q, k, v, **options, return_lse=True)
    assert machine.launched[-1] == (kernel if takes else PORTABLE)
    return results


def results(machine, inputs, options):
    """Yield all results by name: with each kernel that makes the output, and that makes dq."""
    q, k, v, dout = (machine.put(array) for array in inputs.values())
    options = {name: machine.put(value) for name, value in options.items()}
    for kernel, deterministic in zip(FORWARDS, (False, True)):
        out, lse = forward(machine, kernel, q, k, v, **options)
        machine.launched.clear()
        got = cuflash.attention_backward(
            dout, q, k, v, out, lse, **options, deterministic=deterministic
        )
        assert "attention_backward" in machine.launched
        yield {"out": out, "lse": lse, "dq": got.dq, "dk": got.dk, "dv": got.dv}


def check_call(machine, inputs, options):
    for got in results(machine, inputs, options):
        budget.check_all(got, inputs, options)


@pytest.mark.parametrize("sizes", [(8, 8), (72, 200), (248, 104)])
def test_head_sizes(sizes, machine):
    check_call(machine, draw(*machine.lengths, *sizes), {})


@pytest.mark.parametrize("sizes", [(40, 72), (136, 24), (24, 256)])
def test_head_sizes_in_tf32(sizes, machine):
    """TF32 has the 11 bits of float16: what float16 arrays hold is not rounded."""
    inputs = draw(*machine.lengths, *sizes)
    wider = {name: array.astype("float32") for name, array in inputs.items()}
    for got in results(machine, wider, {"precision": "tf32"}):
        budget.check_all(got, inputs, {})


def shifted(array):
    view = np.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
    view[...] = array
    return view


# How many keys more or less than whole chunks, and the view; axes are (batch, head, query, key).
LAYOUTS = {
    "whole chunks": (0, lambda array: array),
    "odd length": (-3, lambda array: array),
    "padded to whole chunks": (-3, lambda array: inside(array, 0, 0, 0, 3)),
    "shifted by an element": (0, shifted),
    "queries backwards": (0, lambda array: array[:, :, ::-1].copy()[:, :, ::-1]),
    "keys backwards": (0, lambda array: array[..., ::-1].copy()[..., ::-1]),
    "every second key": (0, lambda array: np.repeat(array, 2, axis=3)[..., ::2]),
    "every third query": (0, lambda array: np.repeat(array, 3, axis=2)[:, :, ::3]),
    "keys outside": (-1, lambda array: array.swapaxes(2, 3).copy().swapaxes(2, 3)),
    "heads inside": (0, lambda array: np.moveaxis(np.moveaxis(array, 1, 3).copy(), 3, 1)),
}


def mask_and_bias(shape, bias_dtype="float16"):
    mask = np.random.default_rng(5).random(shape) < 0.7
    if shape[2] > 1:
        mask[:, :, ::7] = False  # rows that see nothing
    return {"mask": mask, "bias": normal(shape, DTYPES[bias_dtype], 6)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias_dtype", ["float16", "float32"])
def test_masks_and_biases_of_any_layout(layout, bias_dtype, machine):
    (more, view), (q_len, kv_len) = LAYOUTS[layout], machine.lengths
    options = mask_and_bias((1, 2, q_len, kv_len + more), bias_dtype)
    views = {name: view(array) for name, array in options.items()}
    assert all(np.array_equal(views[name], options[name]) for name in options)
    check_call(machine, draw(q_len, kv_len + more), views)


@pytest.mark.parametrize("axes", ["bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11qk", "b11k", "1h11"])
def test_masks_and_biases_broadcast(axes, machine):
    q_len, kv_len = machine.lengths
    sizes = {"b": 2, "h": 2, "q": q_len, "k": kv_len, "1": 1}
    options = mask_and_bias([sizes[axis] for axis in axes])
    other = mask_and_bias([1, 2, q_len, 1])
    inputs = draw(q_len, kv_len, batch=2)
    check_call(machine, inputs, options)
    check_call(machine, inputs, options | {"mask": other["mask"]})
    check_call(machine, inputs, options | {"bias": other["bias"]})


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float64"])
def test_a_bias_of_another_dtype(bias_dtype, machine):
    bias = normal((2, *machine.lengths), DTYPES[bias_dtype], 6)
    check_call(machine, draw(*machine.lengths), {"bias": bias})


def test_every_byte_but_zero_is_true(machine):
    inputs = draw(*machine.lengths)
    octets = np.random.default_rng(5).choice([0, 1, 2, 128, 255], machine.lengths)
    for got in results(machine, inputs, {"mask": octets.astype("uint8").view(bool)}):
        budget.check_all(got, inputs, {"mask": octets != 0})


HIDDEN = {  # by head, query and key
    "first keys": np.s_[:, :, :256],
    "middle keys": np.s_[:, :, 128:256],
    "last keys": np.s_[:, :, 128:],
    "first queries": np.s_[:, :128],
    "middle queries": np.s_[:, 64:128],
    "last queries": np.s_[:, 64:],
    "first head": np.s_[0],
    "last head": np.s_[1],
    "all but a corner": np.s_[:, :-1, 1:],
    "all": np.s_[:],
}


@pytest.mark.parametrize("form", ["mask", "mask and window", "bias"])
@pytest.mark.parametrize("part", HIDDEN)
def test_whole_tiles_are_hidden(part, form, machine):
    q_len, kv_len = 150, 336
    visible = np.random.default_rng(7).random((2, q_len, kv_len)) < 0.9
    visible[HIDDEN[part]] = False
    options = {"mask": visible, "window": (140, 60) if "window" in form else None}
    if form == "bias":
        options = {"bias": np.where(visible, normal(visible.shape), -np.inf).astype("float16")}
    check_call(machine, draw(q_len, kv_len), options)


@pytest.mark.parametrize("options", ["none", "causal", "mask and bias"])
def test_what_lies_beside_the_arrays(options, machine):
    """All arrays lie within larger ones full of NaN, or of True, with aligned rows."""
    q_len, kv_len = (length - 3 for length in machine.lengths)
    inputs = draw(q_len, kv_len, 40, 24, dtype="bfloat16")
    views = {name: inside(array, 1, 99, 1, 8) for name, array in inputs.items()}
    given = {"causal": options == "causal"}
    if "mask" in options:
        arrays = mask_and_bias((1, 2, q_len, kv_len))
        given = {name: inside(array, 1, 1, 99, 3) for name, array in arrays.items()}
    check_call(machine, views, given)


@pytest.mark.parametrize("kernel", FORWARDS)
@pytest.mark.parametrize("value_dim", [16, 24])  # at most as wide as head_dim, and wider
def test_out_leaves_its_surroundings_alone(value_dim, kernel, machine):
    inputs = draw(*machine.lengths, value_dim=value_dim)
    q, k, v, _ = (machine.put(array) for array in inputs.values())
    right, _ = forward(machine, kernel, q, k, v)
    larger = machine.put(np.full(np.add(right.shape, (1, 9, 2, 16)), 7, "float16"))
    place = (slice(1), slice(5, -4), slice(1, -1), slice(8, -8))
    forward(machine, kernel, q, k, v, out=larger[place])
    assert same_bits(larger[place], right)
    larger = get(larger).copy()
    larger[place] = 7
    assert (larger == 7).all()


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_heads_in_sections(heads, machine, monkeypatch):
    """So many of eight heads are done together, as if the others' keys did not fit in the cache."""
    inputs = draw(140, 150, batch=4)
    size = inputs["k"].nbytes + inputs["v"].nbytes
    monkeypatch.setattr(_params, "_SECTION_BYTES", size * heads // 8)
    _params._layout.cache_clear()
    check_call(machine, inputs, {"causal": True})
    _params._layout.cache_clear()


def by_mask(q_len, kv_len):
    mask = np.random.default_rng(5).random((2, q_len, kv_len)) < 0.8
    mask[:, ::9] = mask[:, :, ::5] = mask[:, :, -40:] = False
    rows, keys = np.s_[:, ::9], np.s_[:, ::5]
    return {"mask": mask}, {"q": rows, "dout": rows, "k": keys, "v": keys}


def by_mask_with_more(q_len, kv_len):
    options, spoilt = by_mask(q_len, kv_len)
    return options | {"softcap": 2.0, "dropout": 0.2, "seed": 3}, spoilt


def by_alignment(q_len, kv_len):
    keys = np.s_[:, q_len:]
    return {"causal": "top-left"}, {"k": keys, "v": keys}


def by_window(q_len, kv_len):
    keys = np.s_[:, : kv_len - q_len - 9]
    return {"window": (9, 0)}, {"k": keys, "v": keys}


def by_infinite_bias(q_len, kv_len):
    """The scores themselves must be finite: minus infinity is only added to them."""
    bias = normal((2, q_len, kv_len), np.float16, 6)
    bias[:, ::9] = bias[:, :, ::5] = -np.inf
    return {"bias": bias}, {"dout": np.s_[:, ::9], "v": np.s_[:, ::5]}


@pytest.mark.parametrize("hidden", [by_mask, by_mask_with_more, by_alignment, by_window,
                                    by_infinite_bias])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_hidden_from_all_have_no_influence(value, hidden, machine):
    options, spoilt = hidden(*machine.lengths)
    inputs = draw(*machine.lengths)
    dirty = {name: array.copy() for name, array in inputs.items()}
    for name, place in spoilt.items():
        dirty[name][place] = value
    for got in results(machine, dirty, options):
        budget.check_all(got, inputs, options)


def row_by_row(inputs, seen, **options):
    """Return the textbook's answer, where each row is given the keys that it sees and no others."""
    right = {name: np.zeros(inputs[name[1:]].shape) for name in ("dq", "dk", "dv")}
    right["out"] = np.zeros(inputs["dout"].shape)
    right["lse"] = np.full(np.take(right["out"].shape, (0, 2, 1)), -np.inf)
    for i, keys in enumerate(seen):
        if keys.any():
            places = {"q": np.s_[i : i + 1], "k": keys, "v": keys, "dout": np.s_[i : i + 1]}
            part = {name: inputs[name][:, place] for name, place in places.items()}
            got = textbook.truth(**part, **options)
            right["lse"][:, :, i] = got["lse"][..., 0]
            right["out"][:, i], right["dq"][:, i] = got["out"][:, 0], got["dq"][:, 0]
            right["dk"][:, keys] += got["dk"]
            right["dv"][:, keys] += got["dv"]
    return right


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("value", "softcap"), [(np.nan, None), (np.inf, 2.0)])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("form", ["causal", "window", "mask"])
def test_numbers_hidden_from_some(form, name, value, softcap, machine):
    kv_len, q_len = machine.lengths  # the first rows see nothing, if causal
    inputs = draw(q_len, kv_len)
    inputs[name][:, -20, :, 3] = value
    options = {"causal": form == "causal", "window": (9, 5) if form == "window" else None}
    if form == "mask":
        options["mask"] = np.random.default_rng(5).random((q_len, kv_len)) < 0.4
    right = row_by_row(inputs, textbook.visible(q_len, kv_len, **options), softcap=softcap)
    for got in results(machine, inputs, options | {"softcap": softcap}):
        for name, wanted in right.items():
            have, finite = wide(got[name]), np.isfinite(wanted)
            if np.isnan(value):
                assert np.array_equal(np.isnan(have), np.isnan(wanted)), name
            np.testing.assert_allclose(have[finite], wanted[finite], rtol=2e-3, atol=8e-3)
