"""Block masks: what they hold, constructors, operations, conversion, refusals."""

import builtins

import numpy as np
import pytest
from arrays import get, same_bits
from blocks import check, some

from cuflash import BlockMask, _blockmask, _blocks, _lists

BLOCKS = [16, (32, 16), (48, 64), 128]


@pytest.mark.parametrize("block_size", BLOCKS)
def test_from_dense_and_from_function(xp, block_size):
    dense = some()
    there = xp.asarray(dense)
    check(BlockMask.from_dense(there, block_size=block_size), dense)
    check(BlockMask.from_dense(there[0], block_size=block_size), dense[:1])
    check(BlockMask.from_dense(there[0, 0], block_size=block_size), dense[:1, :1])
    check(BlockMask.from_dense(there[:, :, ::2, ::-1], block_size=block_size),
          dense[:, :, ::2, ::-1])  # fmt: skip
    mask = BlockMask.from_function(lambda b, h, i, j: (i * (b + 1) + j * h) % 37 < 20, 100, 130,
                                   batch=2, heads=3, block_size=block_size, like=xp)  # fmt: skip
    b, h, i, j = np.ogrid[:2, :3, :100, :130]
    check(mask, (i * (b + 1) + j * h) % 37 < 20)


def test_a_function_that_does_not_look_at_all_it_is_given(xp):
    mask = BlockMask.from_function(lambda b, h, i, j: j < 20, 50, 70, block_size=32, like=xp)
    check(mask, np.broadcast_to(np.arange(70) < 20, (1, 1, 50, 70)))


def test_a_function_sees_integers_of_64_bits_within_the_lengths():
    seen = []

    def visible(b, h, i, j):
        seen.append((i.max(), j.max(), *(a.dtype for a in (b, h, i, j))))
        return i >= j

    BlockMask.from_function(visible, 100, 70, block_size=64)
    assert seen == [(99, 69, *[np.int64] * 4)]


def test_from_blocks(xp):
    blocks = np.random.default_rng(0).random((2, 3, 4, 5)) < 0.5
    dense = blocks.repeat(32, 2).repeat(16, 3)[:, :, :100, :77]
    for part in (blocks, blocks[0], blocks[0, 0]):
        mask = BlockMask.from_blocks(xp.asarray(part), 100, 77, block_size=(32, 16))
        whole = dense[tuple(slice(n) for n in mask.shape[:2])]
        check(mask, whole)
        assert isinstance(mask.states, xp.ndarray) and not len(mask.bits)


def test_few_blocks_at_a_time(xp, monkeypatch):
    """Whatever is done in portions does not depend on them."""
    dense = some()

    def results():
        mask = BlockMask.from_dense(xp.asarray(dense), block_size=(16, 32))
        masks = (mask, ~mask, mask & BlockMask.causal(100, 130, block_size=32, like=xp),
                 mask.reblocked(48))  # fmt: skip
        arrays = [array for each in masks for array in (each.states, each.bits, each.to_dense())]
        return arrays + [array for flip in (False, True) for array in mask.lists(16, 16, flip)]

    whole = results()
    for module, number in ((_blocks, 5000), (_lists, 70), (_blockmask, 300)):
        monkeypatch.setattr(module, "_AT_A_TIME", number)
    monkeypatch.setattr(_blocks, "_AT_A_TIME_ON_GPU", 5000)
    assert all(same_bits(a, b) for a, b in zip(whole, results(), strict=True))


def test_operations(xp):
    left, right = some(), some((1, 3, 100, 130), seed=1)
    for left_size, right_size, size in ((32, 32, (32, 32)), ((48, 16), (32, 64), (16, 16))):
        a = BlockMask.from_dense(xp.asarray(left), block_size=left_size)
        b = BlockMask.from_dense(xp.asarray(right), block_size=right_size)
        for mask, dense in ((a & b, left & right), (b & a, left & right), (a | b, left | right),
                            (b | a, left | right)):  # fmt: skip
            assert mask.block_size == size
            check(mask, dense)
        check(~a, ~left)
        check(a & ~a, left & False)
        check(a | ~a, left | True)
    with pytest.raises(TypeError):
        a & True
    with pytest.raises(TypeError):
        [] | a
    assert a != b and a == a and len({a, b, a}) == 2


@pytest.mark.parametrize("block_size", [16, (32, 48), (144, 16), 256])
def test_reblocked(xp, block_size):
    dense = some()
    mask = BlockMask.from_dense(xp.asarray(dense), block_size=(48, 32))
    check(mask.reblocked(block_size), dense)


def test_whole_blocks_reblocked(xp):
    """What is known of whole blocks says all that is known of smaller and of larger ones."""
    blocks = np.random.default_rng(0).random((6, 6)) < 0.5
    blocks[1:4, 2:5] = True
    dense = blocks.repeat(48, 0).repeat(80, 1)[:280, :450]
    mask = BlockMask.from_blocks(xp.asarray(blocks), 280, 450, block_size=(48, 80))
    for block_size in ((16, 16), (32, 64), (128, 48), (256, 256)):
        check(mask.reblocked(block_size), dense[None, None])


def test_operations_of_masks_for_batch_elements_and_for_heads(xp):
    left, right = some((2, 1, 100, 130)), some((1, 3, 100, 130), seed=1)
    a = BlockMask.from_dense(xp.asarray(left), block_size=(48, 80))
    b = BlockMask.from_dense(xp.asarray(right), block_size=(32, 48))
    check(a & b, left & right)
    check(b | a, left | right)
    check(~(a & ~b), ~left | right)


def test_new_masks_and_lists_are_waited_for(monkeypatch):
    """As another stream may read them."""
    waited = []
    monkeypatch.setattr(_blockmask, "wait_for", waited.append)
    mask = BlockMask.causal(100)
    made = [mask, ~mask, mask | BlockMask.butterfly(100), mask.reblocked(16)]
    assert all(any(array is each.states for array in waited) for each in made)
    assert mask.lists(64, 64).work is waited[-1]


def test_no_queries_or_no_keys(xp):
    for q_len, kv_len in ((0, 50), (50, 0), (0, 0)):
        mask = BlockMask.causal(q_len, kv_len, block_size=32, like=xp)
        for each in (mask, ~mask, mask | mask, mask.reblocked(48)):
            check(each, np.zeros((1, 1, q_len, kv_len), bool))
        assert not len(mask.lists(16, 16).blocks)
        assert str(mask)


def test_conversion(xp):
    mask = BlockMask.causal(100, block_size=32)
    there = mask.to(xp)
    assert isinstance(there.states, xp.ndarray) and isinstance(there.bits, xp.ndarray)
    assert same_bits(there.states, mask.states) and same_bits(there.bits, mask.bits)
    assert there.to(xp.zeros(3)) is there
    assert there.to(np).to(None).states.tobytes() == mask.states.tobytes()
    assert mask.to(np.zeros(1)) is mask


def test_repr(xp):
    text = repr(BlockMask.causal(48, block_size=16, like=xp))
    where = "the CPU" if xp is np else "CUDA device 0"
    assert text == ("BlockMask((1, 1, 48, 48), blocks of 16 x 16: 33.3% full, 33.3% partial, "
                    f"on {where})")  # fmt: skip


def test_plot(xp):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    mask = BlockMask.bigbird(300, heads=2, block_size=16, like=xp)
    ax = mask.plot(head=1)
    assert np.array_equal(np.asarray(ax.images[0].get_array()), get(mask.states)[0, 1])
    assert mask.plot(ax=ax) is ax
    with pytest.raises(ValueError, match=r"head must be below 2\. Got 2\."):
        mask.plot(head=2)


def test_plot_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def without(name, *more):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="plot needs matplotlib"):
        BlockMask.causal(32).plot()


REFUSED = [
    (ValueError, "q_len", lambda: BlockMask.causal(-1)),
    (TypeError, "q_len", lambda: BlockMask.causal(2.0)),
    (TypeError, "kv_len", lambda: BlockMask.causal(2, "a")),
    (ValueError, "block_size", lambda: BlockMask.causal(64, block_size=8)),
    (ValueError, "block_size", lambda: BlockMask.causal(64, block_size=24)),
    (ValueError, "block_size", lambda: BlockMask.causal(64, block_size=(64, 272))),
    (ValueError, "block_size", lambda: BlockMask.causal(64, block_size=(64,))),
    (TypeError, "block_size", lambda: BlockMask.causal(64, block_size=64.0)),
    (ValueError, "alignment", lambda: BlockMask.causal(64, alignment="left")),
    (TypeError, "like", lambda: BlockMask.causal(64, like="cuda")),
    (TypeError, "window", lambda: BlockMask.sliding_window(64, window=3)),
    (ValueError, "window", lambda: BlockMask.sliding_window(64, window=(-1, 0))),
    (TypeError, "prefix", lambda: BlockMask.prefix_lm(64, prefix=1.5)),
    (ValueError, "prefix", lambda: BlockMask.prefix_lm(64, prefix=[[1]])),
    (TypeError, "global_tokens", lambda: BlockMask.longformer(9, window=(1, 1), global_tokens="a")),
    (ValueError, "stride", lambda: BlockMask.strided(64, stride=0)),
    (ValueError, "unit", lambda: BlockMask.fixed(64, stride=2, unit=0)),
    (ValueError, "summary", lambda: BlockMask.fixed(64, stride=2, summary=-1)),
    (ValueError, "window_blocks", lambda: BlockMask.bigbird(64, window_blocks=2)),
    (ValueError, "random_blocks", lambda: BlockMask.bigbird(64, random_blocks=-2)),
    (ValueError, "seed", lambda: BlockMask.bigbird(64, seed=-2)),
    (ValueError, "heads", lambda: BlockMask.bigbird(64, heads=0)),
    (ValueError, "prefix", lambda: BlockMask.prefix_lm(64, prefix=-1)),
    (ValueError, "global_tokens",
     lambda: BlockMask.longformer(9, window=(1, 1), global_tokens=-1)),
    (ValueError, "lengths", lambda: BlockMask.documents([3, -1])),
    (ValueError, "lengths must have 1 axes", lambda: BlockMask.documents(3)),
    (ValueError, "equally many. Got '2 and 1'", lambda: BlockMask.documents([3, 4], [7])),
    (TypeError, "lengths", lambda: BlockMask.documents([3.5])),
    (TypeError, "ids", lambda: BlockMask.segments(np.zeros(3))),
    (ValueError, "ids", lambda: BlockMask.segments(np.zeros((1, 1, 3), int))),
    (ValueError, "batch", lambda: BlockMask.segments(np.zeros((2, 3), int), np.zeros((3, 3), int))),
    (TypeError, "visible", lambda: BlockMask.from_function(3, 64)),
    (TypeError, "visible", lambda: BlockMask.from_function(lambda b, h, i, j: i - j, 64)),
    (ValueError, "visible", lambda: BlockMask.from_function(lambda *_: np.ones(3, bool), 64)),
    (TypeError, "blocks", lambda: BlockMask.from_blocks(np.ones((1, 1)), 64)),
    (TypeError, "blocks", lambda: BlockMask.from_blocks([[True]], 64)),
    (ValueError, "blocks", lambda: BlockMask.from_blocks(np.ones((2, 1), bool), 64)),
    (ValueError, "blocks", lambda: BlockMask.from_blocks(np.ones(1, bool), 64)),
    (TypeError, "mask", lambda: BlockMask.from_dense(np.ones((3, 3)))),
    (ValueError, "mask", lambda: BlockMask.from_dense(np.ones(3, bool))),
    (ValueError, "shape", lambda: BlockMask.causal(64) & BlockMask.causal(65)),
    (ValueError, "shape", lambda: BlockMask.bigbird(64, heads=2) | BlockMask.bigbird(64, heads=3)),
    (ValueError, "tile_m", lambda: BlockMask.causal(64).lists(48, 64)),
    (ValueError, "tile_n", lambda: BlockMask.causal(64).lists(64, 512)),
    (ValueError, "tile_m", lambda: BlockMask.causal(64).lists(4, 64)),
    (ValueError, "tile_n", lambda: BlockMask.causal(64).lists(64, 8)),
    (TypeError, "tile_n", lambda: BlockMask.causal(64).lists(64, "a")),
    (TypeError, "head", lambda: BlockMask.causal(64).plot(head=0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "call"), REFUSED)
def test_refused(kind, name, call):
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    assert name in text and ". Got " in text and text.endswith("."), text


@pytest.mark.gpu
def test_masks_of_two_devices(cupy):
    here, there = BlockMask.causal(64), BlockMask.causal(64, like=cupy)
    for left, right in ((here, there), (there, here)):
        with pytest.raises(ValueError, match=r"device of the left one.*Got "):
            left & right
