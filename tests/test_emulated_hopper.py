"""Hopper's forward kernel without a GPU: its source run on the CPU.

Each call runs twice: threads in ascending order with late copies and early products, and in
descending order with early copies and late products (emulated.install). There are fewer blocks than
tiles, so that a block takes many.
"""

import dataclasses

import budget
import emulated
import numpy as np
import pytest
import textbook
from arrays import DTYPES, inside, normal
from blocks import some
from forwards import HOPPER, PORTABLE
from numpy.lib.stride_tricks import as_strided
from problems import PROBLEMS, make

import cuflash
from cuflash import _counters, _lists, _plan, _plan_tensor
from cuflash._tiles import HOPPER_FORWARD

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
HALVES = ("float16", "bfloat16")
WIDEST = HOPPER_FORWARD[-1].width
FOR_HOPPER = [
    name for name, problem in sorted(PROBLEMS.items())
    if problem.head_dim % 8 == (problem.value_dim or 8) % 8 == 0
    and max(problem.head_dim, problem.value_dim or 8) <= WIDEST
    and not problem.mask and not problem.bias
]  # fmt: skip
PACK = "pack_mask"


@pytest.fixture
def attend(folder, launched, monkeypatch):
    """A function: out and lse by Hopper's kernel, of which the order of threads changes no bit."""

    def attend(inputs, options=None, place=emulated.put, blocks=2, kernels=(HOPPER,)):
        found = []
        for descending in (False, True):
            launched.clear()
            emulated.install(monkeypatch, folder, 90, descending, multiprocessors=blocks)
            found.append(emulated.one_way(inputs, options or {}, place))
            assert tuple(launched) == kernels
            assert not any(array.inner.any() for array in _counters._of_streams.values())
        assert all(found[0][name].tobytes() == got.tobytes() for name, got in found[1].items())
        return found[0]

    emulated.install(monkeypatch, folder)  # block masks are put there before the call
    return attend


def draw(q_len, kv_len, head_dim=64, value_dim=None, batch=2, heads=(4, 2), dtype="float16"):
    """Return q, k and v by name."""
    (q_heads, kv_heads), value_dim = heads, value_dim or head_dim
    shapes = {"q": (batch, q_len, q_heads, head_dim), "k": (batch, kv_len, kv_heads, head_dim),
              "v": (batch, kv_len, kv_heads, value_dim)}
    return {name: normal(shape, DTYPES[dtype], n) for n, (name, shape) in enumerate(shapes.items())}


def rich(heads):
    """Return options whose code takes registers."""
    return {
        "softcap": 3.0, "sinks": normal((heads,), seed=8), "dropout": 0.25, "seed": 5,
        "alibi_slopes": abs(normal((heads,), seed=9)) / 9,
    }  # fmt: skip


def masked(dense, block_size):
    """Return a dense mask as a block mask on the emulated GPU."""
    return emulated.put_mask(cuflash.BlockMask.from_dense(dense, block_size=block_size))


@pytest.mark.parametrize("name", FOR_HOPPER)
def test_problem(name, attend):
    problem = PROBLEMS[name]
    dtype = HALVES[bool(problem.causal or problem.window)]  # the same for those that share a kernel
    inputs, options, answers = make(name, dtype)
    for result, got in attend(inputs, options).items():
        budget.check(result, got, DTYPES[dtype], *(answer[result] for answer in answers))


KINDS = [
    (number, kind) for number, entry in enumerate(HOPPER_FORWARD)
    for kind in ("plain", "long", "rich", "sparse") if getattr(entry, kind)
]  # fmt: skip


@pytest.fixture
def no_plain_tiles(monkeypatch):
    """Tiles for many keys are taken for few, too."""
    table = tuple(dataclasses.replace(entry, many=(0, 0)) for entry in HOPPER_FORWARD)
    monkeypatch.setattr(_plan_tensor, "HOPPER_FORWARD", table)
    _plan.forward.cache_clear()
    yield
    _plan.forward.cache_clear()


@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_every_tile(number, kind, attend, request):
    """Several tiles of queries and of keys, and of both a rest."""
    if kind == "long":
        request.getfixturevalue("no_plain_tiles")
    entry, dtype = HOPPER_FORWARD[number], HALVES[number % 2]
    tile = getattr(entry, kind)[0]
    q_len, kv_len = 2 * tile.block_m + 9, 4 * tile.block_n + 17
    inputs = draw(q_len, kv_len, entry.width, None, 1, (2, 1), dtype)
    options, given = {"causal": "top-left" if kind == "rich" else True}, {}
    if kind == "rich":
        options |= rich(2) | {"window": (2 * tile.block_n, None)}
    if kind == "sparse":
        dense = some((1, 2, q_len, kv_len), seed=number)
        mask, given = cuflash.BlockMask.from_dense(dense, block_size=256), {"mask": dense}
        told = cuflash.explain(**inputs, **options, mask=mask, arch=90)
        options["mask"] = emulated.put_mask(mask)
    else:
        told = cuflash.explain(**inputs, **options, arch=90)
    constants = dict(told.plans[0].constants)
    assert {name: constants[name.upper()] for name in vars(tile)} == vars(tile)
    budget.check_all(attend(inputs, options), inputs, options | given)


@pytest.mark.parametrize("blocks", [1, 3, 100])
@pytest.mark.parametrize(("q_len", "kv_len", "options"), [
    (3, 150, {}),
    (2, 40, {"window": (9, 0)}),
    (700, 40, {"causal": True}),  # most tiles see nothing
    (300, 400, {"window": (0, 0)}),
    (400, 300, {"causal": "top-left", "window": (50, None)}),
], ids=str)  # fmt: skip
def test_many_tiles(q_len, kv_len, options, blocks, attend):
    inputs = draw(q_len, kv_len, 16, batch=3)
    budget.check_all(attend(inputs, options, blocks=blocks), inputs, options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("q_len", "kv_len", "options"), [
    (140, 150, {}),
    (40, 170, {"causal": "top-left"}),  # the last keys are hidden from all
    (40, 170, {"window": (9, 0)}),  # the first ones are
    (300, 70, {"causal": True, "softcap": 2.0}),  # the first queries see nothing
    (300, 170, {"causal": "top-left", "window": (None, 0), "dropout": 0.2, "seed": 3}),
], ids=str)  # fmt: skip
def test_what_must_not_be_read(q_len, kv_len, options, value, attend):
    """Arrays lie within larger ones of NaN; keys that nobody sees and blind queries are special."""
    inputs = draw(q_len, kv_len, 40, 24, 1, (2, 1), "bfloat16")
    seen = textbook.visible(q_len, kv_len, options.get("causal", False), options.get("window"))
    dirty = {name: array.copy() for name, array in inputs.items()}
    dirty["q"][:, ~seen.any(axis=1)] = value
    dirty["k"][:, ~seen.any(axis=0)] = dirty["v"][:, ~seen.any(axis=0)] = value
    views = {name: inside(array, 1, 99, 1, 8) for name, array in dirty.items()}
    got = attend(views, options, place=emulated.put_as_it_lies)
    budget.check_all(got, inputs, options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 50)}], ids=str)
def test_a_nan_stays_in_its_batch_element(options, attend):
    """A block takes all tiles one after another, and memory still holds what the others had."""
    inputs = draw(20, 170, 16, batch=3, heads=(2, 1))
    right = attend(inputs, options, blocks=1)
    spoilt = {name: array.copy() for name, array in inputs.items()}
    for array in spoilt.values():
        array[1] = np.nan
    got = attend(spoilt, options, blocks=1)
    for name, array in got.items():
        assert np.array_equal(array[[0, 2]], right[name][[0, 2]]) and np.isnan(array[1]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_of_half_types(dtype, attend):
    """Every finite number comes back through the kernel unchanged: each query sees its own key."""
    v = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype]).reshape(1, -1, 1, 256)
    v = np.where(np.isfinite(v.astype("float32")), v, np.zeros_like(v))
    q = np.zeros((1, v.shape[1], 1, 8), v.dtype)
    assert (attend({"q": q, "k": q, "v": v}, {"window": (0, 0)})["out"] == v).all()


@pytest.mark.parametrize("before", [False, True])
def test_views_reach_to_the_fences(before, attend):
    """Views whose first or last element lies beside an inaccessible page."""
    whole = draw(33, 41, 40, batch=1, heads=(5, 5))

    def view(array):
        array = emulated.put(array, before)
        return array[:, ::2, ::2, :32] if before else array[:, ::2, ::2, 8:]

    got = attend(whole, place=view)
    inputs = {name: view(array).inner for name, array in whole.items()}
    budget.check_all(got, inputs, {})


def turned(array, *axes):
    """Return the same array, laid out in memory in another order of axes."""
    return np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))


def backwards(array, axis):
    return np.flip(np.flip(array, axis).copy(), axis)


GENERIC = "attention_forward_generic"
VIEWS = {
    "heads outside": (HOPPER, lambda array: turned(array, 0, 2, 1, 3)),
    "heads outside batch": (HOPPER, lambda array: turned(array, 2, 0, 1, 3)),
    "batch inside": (HOPPER, lambda array: turned(array, 1, 2, 0, 3)),
    "packed": (HOPPER, lambda array: np.stack([array * 0, array, array * 0], axis=2)[:, :, 1]),
    "every second row": (HOPPER, lambda array: np.repeat(array, 2, axis=1)[:, ::2]),
    "padded rows": (HOPPER, lambda array: inside(array, 0, 0, 0, 8)),
    "rows backwards": (PORTABLE, lambda array: backwards(array, 1)),
    "heads backwards": (PORTABLE, lambda array: backwards(array, 2)),
    "one head for all": (PORTABLE, lambda array: np.broadcast_to(array[:, :, :1], array.shape)),
    "one row for all": (PORTABLE, lambda array: np.broadcast_to(array[:, :1], array.shape)),
    "channels backwards": (GENERIC, lambda array: backwards(array, 3)),
    "rows of odd strides": (GENERIC, lambda array: inside(array, 0, 0, 0, 3)),
}


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("layout", VIEWS)
def test_views(layout, name, attend):
    """One array as a view: the Hopper kernel takes those that the copy engine takes."""
    kernel, view = VIEWS[layout]
    inputs = draw(20, 30, 16, heads=(2, 2))
    inputs[name] = view(inputs[name])
    budget.check_all(attend(inputs, place=emulated.put_as_it_lies, kernels=(kernel,)), inputs, {})


def test_axes_of_length_one_have_any_strides(attend):
    inputs = {name: array[:, :, :1] for name, array in draw(1, 30, 16, batch=1).items()}
    odd = {
        name: as_strided(array, strides=(-6, 3 if name == "q" else array.strides[1], 5, 2))
        for name, array in inputs.items()
    }
    budget.check_all(attend(odd, place=emulated.put_as_it_lies), inputs, {})


B, H = 2, 2
PLANES = [(1, 1), (1, H), (B, 1), (B, H)]
BLOCK_SIZES = [128, 256, (128, 256), (256, 128)]
OPTIONS = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (150, 20)},
    "top-left": {"causal": "top-left", "window": (140, None)},
    "sinks": {"sinks": normal((H,), seed=13)},
    "dropout": {"dropout": 0.25, "seed": 5},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": abs(normal((B, H), seed=12))},
    "everything": rich(H) | {"causal": True, "window": (200, None)},
}


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_blocks(number, attend):
    lengths = [(300, 420), (129, 127), (270, 140)][number // 2 % 3]
    widths = [(64, 64), (128, 40), (40, 64)][number % 3]
    heads = (H, 1 + number % 2)
    inputs = draw(*lengths, *widths, B, heads, HALVES[number // 3 % 2])
    options = list(OPTIONS.values())[number]
    dense = some((*PLANES[number % 4], *lengths), seed=number)
    mask = masked(dense, BLOCK_SIZES[number // 2 % 4])
    budget.check_all(attend(inputs, options | {"mask": mask}), inputs, options | {"mask": dense})


def masks_and_biases(kind, q_len, kv_len):
    """Return options for draw(q_len, kv_len).

    The mask hides whole tiles of keys: the first, the last, two in a row, all of a tile of queries.
    """
    mask = some((B, 1, q_len, kv_len), seed=3)
    mask[0, ..., :128] = mask[0, ..., 256:512] = mask[1, ..., 512:] = mask[:, :, 128:256] = False
    bias = normal((q_len, kv_len), seed=5)
    halves = normal((1, 4, q_len, kv_len), DTYPES["float16"], 7)
    return {
        "mask": {"mask": mask},
        "mask of keys": {"mask": mask[:, :, :1]},
        "turned mask": {"mask": turned(mask[:, 0, None], 3, 2, 0, 1)},
        "bias": {"bias": bias},
        "bias of keys": {"bias": bias[:B, None, None]},
        "turned bias": {"bias": turned(bias, 1, 0)},
        "both": {"mask": mask, "bias": halves} | rich(4),
    }[kind]


@pytest.mark.parametrize("kind", [
    "mask", "mask of keys", "turned mask", "bias", "bias of keys", "turned bias", "both",
])  # fmt: skip
def test_masks_and_biases(kind, attend):
    """Tiles of keys that a mask hides from all queries of a tile are passed by."""
    lengths = 300, 657
    inputs, options = draw(*lengths, 64, batch=B), masks_and_biases(kind, *lengths)
    kernels = (PACK, HOPPER) if "mask" in options else (HOPPER,)
    got = attend(inputs, options, place=emulated.put_as_it_lies, kernels=kernels)
    budget.check_all(got, inputs, options)


def test_a_bias_under_a_block_mask(attend):
    lengths = 300, 420
    inputs, dense = draw(*lengths, 40, batch=B), some((B, 1, *lengths), seed=2)
    options = {"bias": normal((4, *lengths), DTYPES["float16"], 1), "causal": True}
    got = attend(inputs, options | {"mask": masked(dense, 128)})
    budget.check_all(got, inputs, options | {"mask": dense})


def test_rows_and_columns_that_are_empty(attend):
    """Whole tiles of them, single ones, and the only ones of a head."""
    inputs, dense = draw(300, 400, batch=1, heads=(H, 1)), some((1, H, 300, 400))
    dense[:, 1, :256] = dense[:, :, 100] = dense[:, :, 280:] = False
    dense[..., 128:256] = dense[..., 350] = dense[:, 0, :, :128] = False
    got = attend(inputs, {"mask": masked(dense, 128)})
    budget.check_all(got, inputs, {"mask": dense})
    empty = ~dense[0].any(axis=-1)
    assert (got["lse"][:, empty] == -np.inf).all()
    assert not got["out"].swapaxes(1, 2)[:, empty].any()
    nothing = attend(inputs, {"mask": masked(dense & False, 128)})
    assert not nothing["out"].any() and (nothing["lse"] == -np.inf).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_keys_that_a_mask_hides(by_blocks, value, attend):
    """In tiles that are passed by, and in others, where rows are made again pair by pair."""
    inputs, dense = draw(20, 300, 16, batch=1, heads=(H, 1)), some((1, H, 20, 300))
    hidden = np.r_[5, 128:256, 299]
    dense[..., hidden] = False
    special = {name: array.copy() for name, array in inputs.items()}
    special["k"][:, hidden] = special["v"][:, hidden] = value
    mask, kernels = (masked(dense, 128), (HOPPER,)) if by_blocks else (dense, (PACK, HOPPER))
    got = attend(special, {"mask": mask}, kernels=kernels)
    budget.check_all(got, inputs, {"mask": dense})


def test_rows_that_see_a_nan_keep_it_to_themselves(attend):
    inputs, dense = draw(200, 150, 16, batch=1, heads=(1, 1)), some((1, 1, 200, 150))
    sees = np.isin(np.arange(200), [20, 21, 33, 130])
    dense[0, 0, :, 7] = sees
    inputs["v"][:, 7] = np.nan
    out = attend(inputs, {"mask": masked(dense, 128)})["out"]
    assert np.isnan(out[:, sees]).all() and np.isfinite(out[:, ~sees]).all()


@pytest.mark.parametrize(("planes", "heads", "options"), [
    ((1, 1), 1, {"softcap": 2.0}),
    ((1, H), H, {"causal": True, "dropout": 0.25, "seed": 5}),
    ((B, H), H, {"sinks": normal((H,), seed=13)}),
], ids=["one list", "by head", "by batch and head"])  # fmt: skip
def test_split_lists(planes, heads, options, attend, monkeypatch):
    """Partial results are combined. Heads may have unlike numbers of works: the rest is empty."""
    monkeypatch.setattr(_lists, "_SHORT", 2)
    monkeypatch.setattr(_lists, "_TIMES", 1)
    inputs = draw(260, 700, 16, batch=planes[0], heads=(heads, 1))
    i, j = np.ogrid[:260, :700]
    dense = (abs(i + 440 - j) < 20) | (i // 128 == 1) & (j % 9 == 0)
    dense = np.broadcast_to(dense, (*planes, 260, 700)).copy()
    dense[..., 690] = False
    special = inputs | {"v": inputs["v"].copy()}
    if heads > 1:
        dense[:, 1, 128:256, 300:] = False
    else:
        special["v"][:, 690] = np.inf  # rows are made again, pair by pair
    mask = masked(dense, 128)
    got = attend(special, options | {"mask": mask}, kernels=(HOPPER, "combine_outputs"))
    budget.check_all(got, inputs, options | {"mask": dense})
    (lists,) = mask._kept.values()
    assert (lists.work.inner < 0).all(axis=-1).any() == (heads > 1)
