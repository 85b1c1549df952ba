"""Every named pattern of block masks against its definition, pair by pair."""

import numpy as np
import pytest
from arrays import get, same_bits
from blocks import check

from cuflash import BlockMask

LENGTHS = [(64, 64), (100, 100), (70, 130), (130, 70), (1, 50), (33, 1)]
BLOCKS = [16, (32, 16), (48, 64), 128]


def grid(q_len, kv_len, alignment="bottom-right"):
    """Return where queries stand, and keys."""
    i, j = np.ogrid[:q_len, :kv_len]
    return i + (0 if alignment == "top-left" else kv_len - q_len), j


# name, options for lengths (q_len, kv_len), what is visible at positions p of queries and j of keys
def window(p, j):
    return (j >= p - 20) & (j <= p + 5)


def strided(stride, unit):
    def visible(p, j):
        apart = p // unit - j // unit
        return (j <= p) & ((apart < stride) | (apart % stride == 0))

    return visible


def fixed(stride, summary, unit):
    def visible(p, j):
        u, v = p // unit, j // unit
        return (j <= p) & ((u // stride == v // stride) | (v % stride >= stride - summary))

    return visible


PATTERNS = {
    "causal": ({}, lambda p, j: j <= p),
    "sliding_window": ({"window": (20, 5)}, window),
    "sliding_window_corners": ({"window": (17, 1)}, lambda p, j: (j >= p - 17) & (j <= p + 1)),
    "sliding_window_left": ({"window": (20, None)}, lambda p, j: j >= p - 20),
    "sliding_window_none": ({"window": (None, None)}, lambda p, j: (j >= 0) | (p > j)),
    "prefix_lm": ({"prefix": 40}, lambda p, j: (j <= p) | (j < 40)),
    "longformer": (
        {"window": (20, 5), "global_tokens": 3}, lambda p, j: window(p, j) | (j < 3)
        | ((p < 3) & (p >= 0)),
    ),
    "longformer_tokens": (
        {"window": (20, 5), "global_tokens": [0, 33, 49]},
        lambda p, j: window(p, j) | np.isin(p, [0, 33, 49]) | np.isin(j, [0, 33, 49]),
    ),
    "strided": ({"stride": 5, "unit": 1}, strided(5, 1)),
    "strided_units": ({"stride": 2, "unit": 16}, strided(2, 16)),
    "fixed": ({"stride": 7, "summary": 2, "unit": 1}, fixed(7, 2, 1)),
    "fixed_units": ({"stride": 3, "unit": 16}, fixed(3, 1, 16)),
}  # fmt: skip


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(xp, name, alignment):
    options, visible = PATTERNS[name]
    make = next(getattr(BlockMask, method) for method in dir(BlockMask)
                if name.startswith(method) and not method.startswith("_"))  # fmt: skip
    for q_len, kv_len in LENGTHS:
        dense = np.broadcast_to(visible(*grid(q_len, kv_len, alignment)), (q_len, kv_len))
        for block_size in BLOCKS:
            mask = make(q_len, kv_len, **options, alignment=alignment, block_size=block_size,
                        like=xp)  # fmt: skip
            assert isinstance(mask.states, xp.ndarray) and isinstance(mask.bits, xp.ndarray)
            check(mask, dense[None, None])


def test_the_unit_of_a_pattern_is_a_block(xp):
    p, j = grid(300, 300)
    for block_size, unit in ((64, 64), ((16, 32), 32)):
        mask = BlockMask.strided(300, stride=3, block_size=block_size, like=xp)
        check(mask, strided(3, unit)(p, j)[None, None])
        mask = BlockMask.fixed(300, stride=3, block_size=block_size, like=xp)
        check(mask, fixed(3, 1, unit)(p, j)[None, None])


def test_prefixes_of_batch_elements(xp):
    p, j = grid(70, 130)
    lengths = [0, 30, 130]
    dense = np.stack([(j <= p) | (j < length) for length in lengths])[:, None]
    check(BlockMask.prefix_lm(70, 130, prefix=lengths, block_size=32, like=xp), dense)
    check(BlockMask.prefix_lm(70, 130, prefix=xp.asarray(lengths), block_size=32), dense)


def test_documents(xp):
    q_lengths, kv_lengths = [20, 0, 31, 49], [16, 32, 0, 52]
    q_ids, kv_ids = (np.repeat(range(4), lengths) for lengths in (q_lengths, kv_lengths))
    dense = (q_ids[:, None] == q_ids)[None, None]
    for block_size in BLOCKS:
        options = {"block_size": block_size, "like": xp}
        check(BlockMask.documents(q_lengths, **options), dense)
        check(BlockMask.documents(q_lengths, kv_lengths, **options),
              (q_ids[:, None] == kv_ids)[None, None])  # fmt: skip
        check(BlockMask.segments(xp.asarray(q_ids), block_size=block_size), dense)
    mask = BlockMask.segments(xp.asarray(q_ids))
    assert isinstance(mask.states, xp.ndarray)


def test_segments_in_any_order_and_of_batch_elements(xp):
    rng = np.random.default_rng(1)
    q_ids, kv_ids = rng.integers(-1, 2, (3, 70)), np.sort(rng.integers(0, 2, (1, 90)))
    mask = BlockMask.segments(q_ids, kv_ids, block_size=(16, 32), like=xp)
    check(mask, (q_ids[:, :, None] == kv_ids[:, None])[:, None])


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 16), (12, 5)])
def test_butterfly(xp, rows, columns):
    fewer = min(rows, columns)
    i, j = np.ogrid[:rows, :columns]
    differ = (i * fewer // rows) ^ (j * fewer // columns)
    states = 2 * np.isin(differ, [0, 1, 2, 4, 8])
    mask = BlockMask.butterfly(rows * 16 - 3, columns * 32 - 5, block_size=(16, 32), like=xp)
    assert np.array_equal(get(mask.states)[0, 0], states)
    assert states.any(axis=0).all() and states.any(axis=1).all()


@pytest.mark.parametrize("n", [1, 4, 16])
def test_butterfly_is_the_sum_of_its_factors(n):
    factors = [np.kron(np.kron(np.eye(n // (2 * m)), np.ones((2, 2))), np.eye(m))
               for m in (1, 2, 4, 8) if 2 * m <= n]  # fmt: skip
    square = sum(factors, np.eye(n)) > 0
    for wide in (1, 3):
        rows, columns = 16 * n - 9, 32 * n * wide - 20
        dense = square.repeat(wide, 1).repeat(16, 0).repeat(32, 1)[:rows, :columns]
        check(BlockMask.butterfly(rows, columns, block_size=(16, 32)), dense[None, None])


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", [(200, 200), (90, 300), (300, 90), (1, 100)])
def test_bigbird_window_and_global_blocks(xp, lengths, alignment):
    """A row of blocks sees those within two blocks of where any of its queries stands."""
    (q_len, kv_len), (rows, columns) = lengths, (32, 48)
    p, _ = grid(*lengths, alignment)
    near = abs(p // columns - np.arange(-(-kv_len // columns))) <= 2
    known = np.array([near[i : i + rows].any(axis=0) for i in range(0, q_len, rows)])
    known[:1] = known[:, :1] = True
    options = {"window_blocks": 5, "global_blocks": 1, "alignment": alignment,
               "block_size": (rows, columns), "like": xp}  # fmt: skip
    mask = BlockMask.bigbird(q_len, kv_len, **options, random_blocks=0)
    check(mask, known.repeat(rows, 0).repeat(columns, 1)[None, None, :q_len, :kv_len])
    shown = get(BlockMask.bigbird(q_len, kv_len, **options, random_blocks=1, heads=3).states)[0]
    assert (shown[:, known] == 2).all()
    assert ((shown == 2).sum(axis=-1) == known.sum(axis=-1) + ~known.all(axis=-1)).all()


def test_bigbird(xp):
    options = {"window_blocks": 3, "global_blocks": 2, "random_blocks": 3, "block_size": 16}
    mask = BlockMask.bigbird(16 * 20 - 5, **options, seed=7, batch=2, heads=3, like=xp)
    i, j = np.ogrid[:20, :20]
    known = (i < 2) | (j < 2) | (abs(i - j) <= 1)
    shown = get(mask.states)
    assert mask.shape == (2, 3, 315, 315) and not (shown == 1).any()
    assert (shown[..., known] == 2).all()
    assert ((shown == 2) & ~known).sum(axis=-1)[..., 2:].min() == 3
    assert ((shown == 2) & ~known).sum(axis=-1).max() == 3
    assert len({plane.tobytes() for plane in shown.reshape(6, -1)}) == 6
    assert same_bits(shown, BlockMask.bigbird(315, **options, seed=7, batch=2, heads=3).states)
    assert not same_bits(shown, BlockMask.bigbird(315, **options, batch=2, heads=3).states)
    assert BlockMask.bigbird(315, 100, block_size=16, random_blocks=50, like=xp).density == 1


def test_bigbird_draws_evenly():
    mask = BlockMask.bigbird(16 * 12, block_size=16, heads=5000, window_blocks=1, global_blocks=0,
                             random_blocks=4, seed=3)  # fmt: skip
    share = (mask.states[0] == 2).mean(axis=0)[~np.eye(12, dtype=bool)]
    assert abs(share - 4 / 11).max() < 0.03
