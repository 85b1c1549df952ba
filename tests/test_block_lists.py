"""What kernels walk, against lists made tile by tile."""

import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arrays import get, same_bits
from blocks import blocks_of, some, unpacked

from cuflash import BlockMask

TILES = [(8, 32), (16, 16), (16, 64), (64, 32), (128, 128), (256, 16)]


def listed(dense, tile_m, tile_n, transposed):
    """Return the entries of each row as (tile, its visible pairs or None if full)."""
    states, _ = blocks_of(dense, (tile_m, tile_n))
    rows = []
    for plane in np.ndindex(states.shape[:2]):
        found = states[plane].T if transposed else states[plane]
        for row, line in enumerate(found):
            rows.append([])
            for tile in np.flatnonzero(line):
                m, n = (tile, row) if transposed else (row, tile)
                part = np.zeros((tile_m, tile_n), bool)
                shown = dense[plane][m * tile_m :, n * tile_n :][:tile_m, :tile_n]
                part[: shown.shape[0], : shown.shape[1]] = shown
                rows[-1].append((tile, None if line[tile] == 2 else part))
    return rows


def check_work(lists, offsets, work, cuts, planes):
    """Each entry of each row is in one piece; pieces of split rows are numbered, longest first."""
    count = (len(offsets) - 1) // planes
    for plane in range(planes):
        pieces = [piece for piece in work[plane].tolist() if piece[0] >= 0]
        assert all(piece == [-1] * 4 for piece in work[plane].tolist()[len(pieces) :])
        lengths = [stop - first for _, first, stop, _ in pieces]
        assert lengths == sorted(lengths, reverse=True)
        split = {row: (first, stop) for row, first, stop, _ in cuts[plane].tolist() if row >= 0}
        for row in range(count):
            own = sorted((first, stop, number) for r, first, stop, number in pieces if r == row)
            bounds = offsets[plane * count + row : plane * count + row + 2]
            assert [own[0][0], own[-1][1]] == bounds
            assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
            numbers = [number for *_, number in own]
            assert numbers == (list(range(*split[row])) if row in split else [-1])
        assert sorted(n for s in split.values() for n in range(*s)) == list(
            range(sum(stop - first for first, stop in split.values()))
        )
        assert sum(stop - first for first, stop in split.values()) <= lists.splits


def check_lists(mask, dense, tile_m, tile_n, transposed):
    lists = mask.lists(tile_m, tile_n, transposed)
    offsets, blocks, words, work, cuts = map(get, lists[:5])
    assert {array.dtype for array in (offsets, blocks, work, cuts)} == {np.dtype(np.int32)}
    tiles, bits = blocks.T
    assert words.dtype == np.uint32 and words.shape[1:] == (tile_m, -(-tile_n // 32))
    rows = listed(dense, tile_m, tile_n, transposed)
    assert offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    shown = unpacked(words)[..., :tile_n]
    assert not unpacked(words)[..., tile_n:].any()
    for row, entries in enumerate(rows):
        here = slice(offsets[row], offsets[row + 1])
        assert tiles[here].tolist() == [tile for tile, _ in entries]
        for place, (_, part) in zip(bits[here], entries, strict=True):
            assert place == -1 if part is None else np.array_equal(shown[place], part)
    assert sorted(bits[bits >= 0]) == list(range(len(words)))
    check_work(lists, offsets.tolist(), work, cuts, dense.shape[0] * dense.shape[1])
    return lists


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block_size", [16, (32, 48), 128, (256, 16)])
@pytest.mark.parametrize("shape", [(2, 3, 100, 130), (1, 2, 130, 40), (1, 1, 300, 129)])
def test_lists(xp, shape, block_size, transposed):
    dense = some(shape)
    mask = BlockMask.from_dense(xp.asarray(dense), block_size=block_size)
    for tiles in TILES:
        lists = check_lists(mask, dense, *tiles, transposed)
        assert all(isinstance(array, xp.ndarray) for array in lists[:5])


@pytest.mark.parametrize("transposed", [False, True])
def test_long_lists_are_split(xp, transposed):
    dense = np.zeros((2, 2, 640, 960), bool)
    dense[:, :, range(640), range(640)] = True
    dense[0, 0, 5] = dense[0, 1, 100:140] = dense[1, 0, :, 70] = dense[1, 0, :, 200] = True
    mask = BlockMask.from_dense(xp.asarray(dense), block_size=16)
    lists = check_lists(mask, dense, 16, 16, transposed)
    cuts = get(lists.cuts)[..., 0].tolist()
    assert cuts == ([[-1, -1], [-1, -1], [4, 12], [-1, -1]] if transposed else
                    [[0, -1, -1], [6, 7, 8], [-1, -1, -1], [-1, -1, -1]])  # fmt: skip
    assert (get(lists.work)[..., 2] - get(lists.work)[..., 1]).max() <= 16
    whole = mask.lists(16, 16, transposed, split=False)
    assert whole.cuts.shape == (4, 0, 4) and whole.splits == 0
    assert (get(whole.work)[..., 3] == -1).all()


def test_lists_are_made_once(xp):
    mask = BlockMask.from_dense(xp.asarray(some()), block_size=32)
    lists, flipped = mask.lists(64, 32), mask.lists(64, 32, transposed=True)
    assert mask.lists(64, 32) is lists and mask.lists(64, 32, True) is flipped
    assert flipped.words is lists.words
    assert mask.lists(32, 32).words is mask.bits


def test_threads_share_a_mask():
    dense = some()
    mask = BlockMask.from_dense(dense, block_size=32)
    keys = [(64, 32, False), (64, 32, True), (16, 16, False), (16, 16, True)] * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda key: mask.lists(*key), keys))
    for key, lists in zip(keys, found):
        right = BlockMask.from_dense(dense, block_size=32).lists(*key)
        assert all(same_bits(a, b) for a, b in zip(lists, right))


def test_a_mask_goes_with_its_last_user(xp):
    """At once, as the memory of a GPU does not wait for the garbage collector."""
    mask = BlockMask.causal(100, block_size=32, like=xp)
    mask.lists(32, 32), mask.lists(64, 16, True)
    gone = weakref.ref(mask)
    del mask
    assert gone() is None


def test_rows_and_columns_without_blocks(xp):
    dense = np.zeros((1, 2, 100, 100), bool)
    dense[0, 1, 70:, 40:50] = True
    mask = BlockMask.from_dense(xp.asarray(dense), block_size=32)
    for transposed in (False, True):
        check_lists(mask, dense, 16, 16, transposed)
    nothing = BlockMask.from_dense(xp.zeros((40, 40), bool), block_size=32)
    assert get(nothing.lists(16, 16).offsets).tolist() == [0] * 4
    assert get(nothing.lists(16, 16).work).tolist() == [[[row, 0, 0, -1] for row in range(3)]]


@pytest.mark.gpu
def test_numpy_and_cupy_agree_bit_for_bit(cupy):
    """At lengths of many portions."""
    for make in (
        lambda like: BlockMask.causal(8000, 9001, like=like),
        lambda like: BlockMask.longformer(8000, window=(300, 20), global_tokens=[5, 70], like=like),
        lambda like: BlockMask.bigbird(8000, heads=4, seed=5, like=like),
        lambda like: ~BlockMask.butterfly(8000, like=like) & BlockMask.causal(8000, like=like),
    ):
        here, there = make(np), make(cupy)
        assert same_bits(here.states, there.states) and same_bits(here.bits, there.bits)
        for tiles in ((128, 128), (128, 64), (64, 256), (32, 32)):
            for transposed in (False, True):
                *arrays, splits = here.lists(*tiles, transposed)
                *others, also = there.lists(*tiles, transposed)
                assert splits == also
                for a, b in zip(arrays, others, strict=True):
                    assert isinstance(b, cupy.ndarray) and same_bits(a, b)
