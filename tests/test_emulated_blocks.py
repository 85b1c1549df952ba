"""Block masks in the CUDA kernels without a GPU: their source run on the CPU.

Lists lie between inaccessible pages, as all arrays do. Hopper's forward kernel has
test_emulated_hopper.py.
"""

import budget
import emulated
import numpy as np
import pytest
from arrays import DTYPES, normal
from blocks import some

import cuflash
from cuflash import _lists

pytestmark = [
    pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("portable_forward"),
]
B, H = 2, 2
KINDS = [
    ("float16", 90), ("tf32", 80), ("bfloat16", 86), ("float32", 90),
    ("float16", 75), ("float64", 90), ("tf32", 90),
]  # fmt: skip
PLANES = [(1, 1), (1, H), (B, 1), (B, H)]
BLOCK_SIZES = [64, (16, 32), 128, (48, 80), 16]
LENGTHS = [(130, 300), (129, 127), (201, 70)]
WIDTHS = [(64, 64), (64, 40), (40, 64)]
OPTIONS = {
    "alone": lambda q_len, kv_len: {},
    "causal": lambda q_len, kv_len: {"causal": True},
    "window": lambda q_len, kv_len: {"window": (70, 20)},
    "bias": lambda q_len, kv_len: {"bias": normal((H, q_len, kv_len), seed=11)},
    "dropout": lambda q_len, kv_len: {"dropout": 0.25, "seed": 5},
    "softcap": lambda q_len, kv_len: {"softcap": 2.0},
    "alibi": lambda q_len, kv_len: {"alibi_slopes": abs(normal((B, H), seed=12))},
    "sinks": lambda q_len, kv_len: {"sinks": normal((H,), seed=13)},
    "top_left": lambda q_len, kv_len: {"causal": "top-left", "window": (40, None)},
}
OPTIONS["everything"] = lambda *lengths: {
    name: value for each in list(OPTIONS)[:-2] for name, value in OPTIONS[each](*lengths).items()
}


def draw(kind, lengths, widths=(64, 64), kv_heads=1, batch=1):
    """Return q, k, v, dout and dlse; those for tf32 are float16, whose errors are as large."""
    (q_len, kv_len), (head_dim, value_dim) = lengths, widths
    dtype = DTYPES["float16" if kind == "tf32" else kind]
    shapes = {"q": (batch, q_len, H, head_dim), "k": (batch, kv_len, kv_heads, head_dim),
              "v": (batch, kv_len, kv_heads, value_dim), "dout": (batch, q_len, H, value_dim)}
    inputs = {name: normal(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
    return inputs | {"dlse": normal((batch, H, q_len), max(dtype, np.dtype("float32")), seed=9)}


def results(kind, inputs, dense, block_size, options=None, **more):
    """Attention under a block mask and its gradients, on the emulated GPU."""
    options = dict(options or {})
    if kind == "tf32":
        inputs = {name: array.astype("float32") for name, array in inputs.items()}
        options["precision"] = "tf32"
    mask = cuflash.BlockMask.from_dense(dense, block_size=block_size)
    return emulated.both_ways(inputs, options | {"mask": emulated.put_mask(mask)}, **more)


@pytest.mark.parametrize("number", range(14))
def test_blocks(number, folder, launched, monkeypatch):
    """Each kind of kernel, option, sort of mask, block size and pair of lengths a few times."""
    kind, arch = KINDS[number % 7]
    lengths, block_size = LENGTHS[number % 3], BLOCK_SIZES[number % 5]
    options = OPTIONS[list(OPTIONS)[number * 3 % 10]](*lengths)
    again = number // 7
    inputs = draw(kind, lengths, WIDTHS[number // 3 % 3], 1 + (again + number) % 2, B)
    dense = some((*PLANES[number // 5 % 4], *lengths), seed=number)
    emulated.install(monkeypatch, folder, arch=arch, descending=number % 3 == 0)
    deterministic = (again + number // 2) % 2 == 0
    got = results(kind, inputs, dense, block_size, options, deterministic=deterministic)
    budget.check_all(got, inputs, options | {"mask": dense})
    generic = arch == 75 or kind in ("float32", "float64")
    assert launched[0] == ("attention_forward_generic" if generic else "attention_forward")


@pytest.mark.parametrize(("dtype", "arch", "width", "block_size"), [
    ("float16", 90, 64, 128), ("float16", 90, 64, 64), ("bfloat16", 80, 128, 128),
    ("bfloat16", 80, 128, 64), ("float16", 86, 256, 64),
])  # fmt: skip
def test_tiles_of_large_and_small_blocks(dtype, arch, width, block_size, folder, monkeypatch):
    emulated.install(monkeypatch, folder, arch=arch)
    inputs, dense = draw(dtype, (140, 200), (width, width)), some((1, H, 140, 200))
    dense[:, :, :128, :128] = True
    got = results(dtype, inputs, dense, block_size, deterministic=arch == 80)
    budget.check_all(got, inputs, {"mask": dense})


def test_the_lowest_tiles(folder, monkeypatch):
    """Those of 8 queries, for the widest rows on GPUs with little shared memory."""
    emulated.install(monkeypatch, folder, arch=75)
    inputs, dense = draw("float64", (21, 50), (512, 512)), some((1, H, 21, 50))
    mask = emulated.put_mask(cuflash.BlockMask.from_dense(dense, block_size=16))
    budget.check_all(emulated.both_ways(inputs, {"mask": mask}), inputs, {"mask": dense})
    assert 8 in {key[0] for key in mask._kept}


@pytest.mark.parametrize(("kind", "arch"), [("float16", 90), ("tf32", 90), ("float32", 90)])
def test_rows_and_columns_that_are_empty(kind, arch, folder, monkeypatch):
    """Whole tiles of them, single ones, and the only ones of a head."""
    emulated.install(monkeypatch, folder, arch=arch)
    inputs, dense = draw(kind, (140, 200)), some((1, H, 140, 200))
    dense[:, 1, :64] = dense[:, :, 100] = dense[:, :, 128:] = False
    dense[..., 64:128] = dense[..., 150] = dense[:, 0, :, :64] = False
    for deterministic in (False, True):
        got = results(kind, inputs, dense, 64, deterministic=deterministic)
        budget.check_all(got, inputs, {"mask": dense})
        empty = ~dense[0].any(axis=-1)
        assert (got["lse"][:, empty] == -np.inf).all()
        assert not got["out"].swapaxes(1, 2)[:, empty].any()
        assert not got["dq"].swapaxes(1, 2)[:, empty].any()
        unseen = ~dense.any(axis=(0, 1, 2))
        assert not got["dk"][:, unseen].any() and not got["dv"][:, unseen].any()
    nothing = results(kind, inputs, dense & False, 64)
    assert not any(nothing[name].any() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize(("kind", "arch", "value"), [
    ("float16", 90, np.nan), ("bfloat16", 86, -np.inf), ("tf32", 90, np.inf),
    ("float32", 90, np.nan),
])  # fmt: skip
def test_hidden_values_have_no_influence(kind, arch, value, folder, monkeypatch):
    """In absent blocks, and in partial ones, where rows are made again pair by pair."""
    emulated.install(monkeypatch, folder, arch=arch)
    inputs, dense = draw(kind, (40, 150)), some((1, H, 40, 150))
    hidden = np.r_[5, 64:96, 149]
    dense[..., hidden] = False
    special = {name: array.copy() for name, array in inputs.items()}
    special["k"][:, hidden] = special["v"][:, hidden] = value
    for deterministic in (False, True):
        got = results(kind, special, dense, (16, 32), deterministic=deterministic)
        budget.check_all(got, inputs, {"mask": dense})
        assert not got["dk"][:, hidden].any() and not got["dv"][:, hidden].any()


def test_rows_that_see_a_nan_keep_it_to_themselves(folder, monkeypatch):
    emulated.install(monkeypatch, folder)
    inputs, dense = draw("float16", (40, 150)), some((1, 1, 40, 150))
    sees = np.isin(np.arange(40), [20, 21, 33])
    dense[0, 0, :, 7] = sees
    inputs["v"][:, 7] = np.nan
    got = results("float16", inputs, dense, (16, 32))
    for name in ("out", "dq"):
        assert np.isnan(got[name][:, sees]).all() and np.isfinite(got[name][:, ~sees]).all()
    assert np.isfinite(got["dv"]).all()
    unseen = ~dense[0, 0, sees].any(axis=0)
    assert np.isfinite(got["dk"][:, unseen]).all()


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_the_order_of_threads_does_not_show(kind, folder, monkeypatch):
    inputs, dense = draw(kind, (140, 200)), some((1, H, 140, 200))
    found = []
    for descending in (False, True):
        emulated.install(monkeypatch, folder, descending=descending)
        found.append(results(kind, inputs, dense, 64, deterministic=True))
    for name, got in found[0].items():
        assert got.tobytes() == found[1][name].tobytes(), name


def test_full_blocks_change_no_bit(folder, monkeypatch):
    emulated.install(monkeypatch, folder)
    inputs, dense = draw("float16", (140, 200)), np.ones((1, 1, 140, 200), bool)
    got = results("float16", inputs, dense, 128, deterministic=True)
    right = emulated.both_ways(inputs, {}, deterministic=True)
    for name, array in right.items():
        assert array.tobytes() == got[name].tobytes(), name


def with_long_rows(planes, q_len, kv_len):
    """Return a mask with few pairs in most rows and columns, and many in some."""
    i, j = np.ogrid[:q_len, :kv_len]
    dense = (abs(i - j) < 20) | (i // 64 == 2) | (j // 64 == 1) | (j // 64 == 4)
    dense = dense & (np.random.default_rng(3).random((*planes, q_len, kv_len)) < 0.95)
    if planes[1] > 1:
        dense[:, 1] = dense[:, 1, ::-1]
    return dense


@pytest.mark.parametrize(("kind", "arch", "planes", "kv_heads", "options"), [
    ("float16", 90, (1, 1), 1, {"sinks": normal((H,), seed=13), "softcap": 2.0}),
    ("float16", 80, (1, H), H, {"causal": True, "dropout": 0.25, "seed": 5}),
    ("bfloat16", 86, (B, H), 1, {}),
    ("tf32", 90, (B, 1), 1, {"window": (300, 20)}),
    ("float32", 90, (1, H), 1, {}),
])  # fmt: skip
def test_split_lists(kind, arch, planes, kv_heads, options, folder, launched, monkeypatch):
    """Long lists, with an infinity that the mask hides: partial results are combined."""
    monkeypatch.setattr(_lists, "_SHORT", 2)
    monkeypatch.setattr(_lists, "_TIMES", 1)
    emulated.install(monkeypatch, folder, arch=arch)
    inputs = draw(kind, (330, 300), kv_heads=kv_heads, batch=B)
    dense = with_long_rows(planes, 330, 300)
    dense[..., 7] = dense[..., 130, :] = False
    special = inputs | {"v": inputs["v"].copy()}
    special["v"][:, 7] = np.inf
    for deterministic in (False, True):
        launched.clear()
        got = results(kind, special, dense, 64, options, deterministic=deterministic)
        budget.check_all(got, inputs, options | {"mask": dense})
        combined = ["combine_outputs", "combine_gradients", "combine_gradients"]
        if kv_heads < H and planes[1] == H:  # heads of a group with lists of their own
            combined.pop()
        if not deterministic:
            combined.pop()
        if kind == "float32":  # generic kernels walk over whole lists
            combined = []
        assert [kernel for kernel in launched if kernel.startswith("combine")] == combined
