"""The Hopper kernel on a GPU: what the emulator cannot show, or is too slow for."""

from concurrent.futures import ThreadPoolExecutor

import budget
import numpy as np
import pytest
import textbook
from arrays import DTYPES, get, normal, same_bits
from forwards import FORWARDS, HOPPER, forward_by

import cuflash
from cuflash import _counters

pytestmark = pytest.mark.gpu
HALVES = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def on_hopper(cupy, launched):
    """Skips other GPUs; sees to it that the kernel ran and left its counters at 0."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("no Hopper GPU")
    yield
    assert HOPPER in launched
    assert not any(int(counter[0]) for counter in _counters._of_streams.values())


def draw(cupy, q_len, kv_len, head_dim=64, value_dim=None, batch=1, heads=(4, 2), dtype="float16"):
    """Return q, k and v."""
    (q_heads, kv_heads), value_dim = heads, value_dim or head_dim
    shapes = ((batch, q_len, q_heads, head_dim), (batch, kv_len, kv_heads, head_dim),
              (batch, kv_len, kv_heads, value_dim))
    random = cupy.random.default_rng(q_len + kv_len + head_dim)
    return [random.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def in_float64(arrays, **options):
    """Return out and lse by the generic kernel."""
    wide = (array.astype("float32").astype("float64") for array in arrays)
    return cuflash.attention(*wide, **options, return_lse=True)


def check(arrays, got, **options):
    right = in_float64(arrays, **options)
    for name, mine, exact in zip(("out", "lse"), got, right):
        limit = 2e-3 if name == "lse" else 0.02
        difference = abs(mine.astype("float32").astype("float64") - exact)
        finite = np.isfinite(get(exact))
        assert (np.isfinite(get(mine.astype("float32"))) == finite).all()
        assert get(difference)[finite].max(initial=0) <= limit, name


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims(head_dim, cupy):
    dtype = HALVES[head_dim // 8 % 2]
    for kv_len, options in ((700, {}), (700, {"causal": True}), (4500, {"causal": True})):
        arrays = draw(cupy, 520, kv_len, head_dim, dtype=dtype)
        got = cuflash.attention(*arrays, **options, return_lse=True)
        check(arrays, got, **options)
        assert same_bits(cuflash.attention(*arrays, **options), got[0])


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (192, 128), (40, 256), (256, 8)])
def test_widths_that_differ(head_dim, value_dim, cupy):
    arrays = draw(cupy, 300, 900, head_dim, value_dim)
    check(arrays, cuflash.attention(*arrays, return_lse=True))


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left", "window": (300, None)}, {"window": (64, 64)},
    {"softcap": 5.0, "causal": True}, {"dropout": 0.3, "seed": 3},
    {"mask": "rare"}, {"mask": "blocks", "causal": True}, {"bias": "float16"}, {"bias": "float32"},
    {"mask": "rare", "bias": "float16", "window": (400, 0)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_both_forward_kernels_agree(head_dim, options, cupy, launched):
    arrays = draw(cupy, 1100, 1300, head_dim, batch=2)
    random, options = cupy.random.default_rng(1), dict(options)
    shape = (2, 1, 1100, 1300)
    if "mask" in options:
        mask = random.random(shape) < 0.1
        i, j = cupy.ogrid[:1100, :1300]
        options["mask"] = mask if options["mask"] == "rare" else mask & (i // 200 == j // 200)
    if "bias" in options:
        options["bias"] = random.standard_normal(shape).astype(options["bias"])
    found = []
    for kernel in FORWARDS:
        with forward_by(kernel):
            found.append(cuflash.attention(*arrays, **options, return_lse=True))
    if HOPPER not in launched:
        assert head_dim == 256 and "bias" in options  # shared memory has no room
        cuflash.attention(*arrays)
    for mine, other in zip(*found):
        close = cupy.allclose(mine.astype("float32"), other.astype("float32"), 0.01, 0.004)
        assert bool(close)


@pytest.mark.parametrize("q_len", [1, 7, 63, 64, 65, 129])
def test_many_small_tiles(q_len, cupy):
    arrays = draw(cupy, q_len, 130, batch=64, heads=(16, 4))
    for options in ({}, {"causal": True}, {"window": (20, 0)}):
        check(arrays, cuflash.attention(*arrays, **options, return_lse=True), **options)


def test_scores_that_grow_by_the_key(cupy):
    """Each tile's scores are far above those of the one before: references are set again."""
    q, k, v = draw(cupy, 300, 1000, heads=(2, 2))
    q[..., 0] = 8
    for slope in (0.05, 3.0, -3.0):
        k[..., 0] = (cupy.arange(1000) * slope).astype("float16")[None, :, None]
        for options in ({}, {"causal": True}, {"window": (100, 0)}):
            check((q, k, v), cuflash.attention(q, k, v, **options, return_lse=True), **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sampled_rows_of_a_long_sequence(head_dim, cupy):
    length = 65536
    q, k, v = draw(cupy, length, length, head_dim, heads=(2, 1), dtype="bfloat16")
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    rows = [0, 1, 127, 128, 191, 192, 40000, 65407, 65535]
    for row in rows:
        one = cuflash.attention(
            *(x.astype("float32").astype("float64") for x in (
                q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1],
            )), return_lse=True,
        )  # fmt: skip
        assert float(abs(out[:, row].astype("float32") - one[0][:, 0]).max()) < 0.02
        assert float(abs(lse[:, :, row] - one[1][:, :, 0]).max()) < 1e-3


def turned(cupy, array, *axes):
    """Return the same array, laid out in memory in another order of axes."""
    return cupy.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes).tolist())


VIEWS = {
    "heads outside": lambda cupy, array: turned(cupy, array, 0, 2, 1, 3),
    "batch inside": lambda cupy, array: turned(cupy, array, 1, 2, 0, 3),
    "packed": lambda cupy, array: cupy.stack([array * 0, array, array], axis=2)[:, :, 1],
    "padded": lambda cupy, array: cupy.concatenate([array, array * np.nan], axis=3)[..., :64],
    "every third row": lambda cupy, array: cupy.repeat(array, 3, axis=1)[:, ::3],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view, cupy, launched):
    """The same kernel makes the same bits of a copy."""
    views = [VIEWS[view](cupy, array) for array in draw(cupy, 333, 350, batch=2)]
    copies = [array.copy(order="C") for array in views]
    found = [cuflash.attention(*arrays, causal=True) for arrays in (views, copies)]
    assert launched == [HOPPER, HOPPER] and same_bits(*found)


def test_axes_of_length_one_have_any_strides(cupy, launched):
    arrays = draw(cupy, 1, 300, heads=(1, 1))
    odd = [
        cupy.lib.stride_tricks.as_strided(
            array, array.shape, (6, array.strides[1] if array.shape[1] > 1 else 4, 10, 2)
        )
        for array in arrays
    ]
    found = [cuflash.attention(*each) for each in (odd, arrays)]
    assert launched == [HOPPER, HOPPER] and same_bits(*found)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (500, 0), "softcap": 9.0, "dropout": 0.2, "seed": 1},
], ids=str)  # fmt: skip
def test_reruns_have_the_same_bits(options, cupy):
    """Beside other work, so that blocks take tiles in another order each time."""
    arrays = draw(cupy, 2000, 2000, 64, batch=2, heads=(16, 4))
    right = cuflash.attention(*arrays, **options, return_lse=True)
    load, other = cupy.ones((2048, 2048), "float32"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        with other:
            load @ load
        got = cuflash.attention(*arrays, **options, return_lse=True)
        assert same_bits(got[0], right[0]) and same_bits(got[1], right[1])


def test_long_lists_of_a_block_mask(cupy, launched):
    """They are split among blocks that stay: partial results are combined."""
    i, j = np.ogrid[:1500, :6000]
    dense = (abs(i + 4500 - j) < 100) | (i // 128 == 3)
    mask = cuflash.BlockMask.from_dense(cupy.asarray(dense), block_size=128)
    arrays = draw(cupy, 1500, 6000, batch=2)
    got = cuflash.attention(*arrays, mask=mask, return_lse=True)
    assert launched == [HOPPER, "combine_outputs"]
    check(arrays, got, mask=mask)


def test_streams_and_graphs(cupy):
    """Launches on several streams at once, and a graph beside them, share no counter."""
    arrays = draw(cupy, 2000, 2000, 64, batch=2)
    right = cuflash.attention(*arrays, causal=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    outs = [cupy.zeros_like(right) for _ in range(5)]
    cupy.cuda.Device().synchronize()
    with streams[0]:
        cuflash.attention(*arrays, causal=True, out=outs[4])
        streams[0].begin_capture()
        cuflash.attention(*arrays, causal=True, out=outs[4])
        graph = streams[0].end_capture()
    outs[4][...] = 0
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        for stream, out in zip(streams, outs):
            with stream:
                cuflash.attention(*arrays, causal=True, out=out)
        graph.launch(streams[1])
    cupy.cuda.Device().synchronize()
    assert all(same_bits(out, right) for out in outs)


def test_graphs_on_other_inputs(cupy):
    """Two graphs, each replayed twice, and calls between them."""
    arrays, others = draw(cupy, 1900, 2000, 64, batch=2), draw(cupy, 1900, 2000, 64, batch=2)
    for array in others:
        array *= 0.5
    rights = [cuflash.attention(*each, causal=True) for each in (arrays, others)]
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuflash.attention(*arrays, causal=True)
        graphs, outs = [], []
        for _ in range(2):
            stream.begin_capture()
            outs.append(cuflash.attention(*arrays, causal=True))
            graphs.append(stream.end_capture())
        for right, given in zip(rights, (None, others)):
            for array, other in zip(arrays, given or ()):
                array[...] = other
            for graph, out in zip(graphs * 2, outs * 2):
                out.fill(0)
                graph.launch(stream)
                assert same_bits(cuflash.attention(*arrays, causal=True), right)
                assert same_bits(out, right)
        assert not any(int(counter[0]) for counter in _counters._of_graphs[-2:])


def test_threads_share_no_counter(cupy):
    arrays = draw(cupy, 2000, 2000, 64, batch=2)
    right = get(cuflash.attention(*arrays, causal=True))
    cupy.cuda.Device().synchronize()

    def work(number):
        stream = cupy.cuda.Stream.ptds if number % 2 else cupy.cuda.Stream(non_blocking=True)
        with stream:
            outs = [cuflash.attention(*arrays, causal=True) for _ in range(10)]
            stream.synchronize()
        return all(same_bits(out, right) for out in outs)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.parametrize("dtype", HALVES)
def test_within_the_budget(dtype, cupy):
    inputs = {
        name: normal((1, 700, 2, 128), DTYPES[dtype], seed) for seed, name in enumerate("qkv")
    }
    out, lse = cuflash.attention(*map(cupy.asarray, inputs.values()), causal=True, return_lse=True)
    budget.check_all({"out": out, "lse": lse}, inputs, {"causal": True})


def test_rows_that_see_nothing(cupy):
    arrays = draw(cupy, 700, 100)
    out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
    blind = ~textbook.visible(700, 100, True, None).any(axis=1)
    assert not get(out)[:, blind].any() and (get(lse)[..., blind] == -np.inf).all()
