"""Dropout (faults.md K5): the generator, the mask bit for bit, its fraction, its replay."""

import numpy as np
import philox
import pytest
from arrays import get, normal, put, same_bits, wide
from forwards import FORWARDS, PORTABLE, forward_by

import cuflash

VECTORS = [  # Random123's known answers for Philox4x32-10
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "right"), VECTORS)
def test_known_answers(counter, key, right):
    from cuflash._dropout import philox4x32

    counter = tuple(np.array([word], np.uint32) for word in words(counter))
    got = philox4x32(counter, tuple(words(key)))
    assert [int(word[0]) for word in got] == words(right)
    assert all(word.dtype == np.uint32 for word in got)
    second = philox.philox4x32_10(counter, words(key))
    assert [int(word[0]) for word in second] == words(right)


def test_counters_broadcast():
    from cuflash._dropout import philox4x32

    zero = np.zeros((1, 1), np.uint32)
    rows, columns = np.arange(3, dtype=np.uint32)[:, None], np.arange(4, dtype=np.uint32)[None]
    got = philox4x32((columns, rows, zero, zero), (7, 9))
    right = philox.philox4x32_10((columns, rows, zero, zero), (7, 9))
    for left, word in zip(got, right, strict=True):
        assert np.array_equal(np.broadcast_to(left, (3, 4)), word)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9])
def test_mask_bit_for_bit(xp, dropout, seed):
    like = {} if xp is np else {"like": xp}
    mask = cuflash.dropout_mask(2, 3, 19, 37, dropout, seed, **like)
    assert isinstance(mask, xp.ndarray) and mask.dtype == bool
    assert np.array_equal(get(mask), philox.keep_mask(2, 3, 19, 37, dropout, seed))


def test_like_takes_an_array_or_a_module(xp):
    for like in (xp, xp.zeros(1)):
        mask = cuflash.dropout_mask(1, 1, 3, 5, 0.5, 3, like=like)
        assert isinstance(mask, xp.ndarray)
        assert np.array_equal(get(mask), philox.keep_mask(1, 1, 3, 5, 0.5, 3))


def test_nearly_everything_dropped(xp):
    """A limit that rounds to 2^15 must not wrap to 0 and keep everything."""
    like = {} if xp is np else {"like": xp}
    assert not get(cuflash.dropout_mask(1, 1, 64, 64, 1 - 2.0**-40, 5, **like)).any()


def within_four_deviations(kept, count, dropout):
    return abs(kept - count * (1 - dropout)) <= 4 * (count * dropout * (1 - dropout)) ** 0.5


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_kept_fraction(dropout):
    mask = cuflash.dropout_mask(2, 2, 1024, 1024, dropout, 11)
    assert within_four_deviations(np.count_nonzero(mask), 2**22, dropout)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_kept_fraction_on_the_gpu(cupy, dropout):
    mask = cuflash.dropout_mask(4, 4, 2048, 2048, dropout, 11, like=cupy)
    assert within_four_deviations(int(cupy.count_nonzero(mask)), 2**26, dropout)


def test_neighbouring_heads_batches_and_seeds_differ():
    mask = cuflash.dropout_mask(2, 2, 64, 64, 0.5, 13)
    other = cuflash.dropout_mask(2, 2, 64, 64, 0.5, 14)
    views = [mask[0, 0], mask[0, 1], mask[1, 0], mask[1, 1], other[0, 0], mask[0, 0].T]
    for n, left in enumerate(views):
        for right in views[:n]:
            assert within_four_deviations(np.count_nonzero(left ^ right), 64 * 64, 0.5)


def recovered(xp, kv_len, q_len, **options):
    """Return p after dropout, read off by values that are unit vectors."""
    q = put(xp, normal((2, q_len, 4, 16)))
    k = put(xp, normal((2, kv_len, 2, 16), seed=1))
    v = xp.zeros((2, kv_len, 2, kv_len), "float32")
    v[:] = xp.eye(kv_len, dtype="float32")[:, None]
    return cuflash.attention(q, k, v, **options).transpose(0, 2, 1, 3)


def test_attention_drops_what_the_mask_says(xp):
    dropped = wide(recovered(xp, 130, 70, dropout=0.3, seed=2**63 + 5))
    whole = wide(recovered(xp, 130, 70))
    keep = philox.keep_mask(2, 4, 70, 130, 0.3, 2**63 + 5)
    assert np.array_equal(dropped != 0, keep)
    np.testing.assert_allclose(dropped, whole * keep / 0.7, rtol=1e-4, atol=1e-7)


def test_positions_are_absolute(xp):
    """The same mask under causal and window, which skip tiles."""
    keep = philox.keep_mask(2, 4, 130, 130, 0.5, 9)
    i, j = np.ogrid[:130, :130]
    got = wide(recovered(xp, 130, 130, dropout=0.5, seed=9, causal=True, window=(40, None)))
    assert np.array_equal(got != 0, keep & (j <= i) & (j >= i - 40))


def test_b56_mean_is_unbiased(xp):
    for dropout in (0.1, 0.5):
        q = xp.zeros((1, 4, 64, 16), "float32")
        k = xp.zeros((1, 1024, 64, 16), "float32")
        out = cuflash.attention(q, k, xp.ones_like(k), dropout=dropout, seed=1)
        assert abs(wide(out).mean() - 1) < 0.005


def test_b57_calls_without_a_seed_differ(xp):
    q = k = v = put(xp, normal((1, 33, 1, 16)))
    one, two = (cuflash.attention(q, k, v, dropout=0.5) for _ in range(2))
    assert not same_bits(one, two)
    one, two = (cuflash.attention(q, k, v, dropout=0.5, seed=5) for _ in range(2))
    assert same_bits(one, two)


def test_b58_the_seed_alone_decides(xp):
    def call():
        q, k, v = (put(xp, normal((1, 33, 1, 16), seed=seed)) for seed in range(3))
        return cuflash.attention(q, k, v, dropout=0.5, seed=12345)

    one = call()
    hold = xp.zeros(10_000)
    assert same_bits(one, call()) and hold.size


@pytest.mark.parametrize("seed", [0, 2**31, 2**63, 2**64 - 1])
def test_b59_seeds_that_are_accepted(xp, seed):
    q = put(xp, normal((1, 9, 1, 16)))
    out = cuflash.attention(q, q, q, dropout=0.5, seed=seed)
    assert same_bits(out, cuflash.attention(q, q, q, dropout=0.5, seed=np.uint64(seed)))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_b59_seeds_that_are_refused(xp, seed):
    q = put(xp, normal((1, 9, 1, 16)))
    with pytest.raises(ValueError, match="seed"):
        cuflash.attention(q, q, q, dropout=0.5, seed=seed)
    with pytest.raises(ValueError, match="seed"):
        cuflash.dropout_mask(1, 1, 2, 2, 0.5, seed)


@pytest.mark.parametrize("deterministic", [False, True])
def test_b60_backward_replays_the_mask(xp, deterministic):
    q = xp.zeros((2, 70, 4, 16), "float32")
    k = xp.zeros((2, 130, 2, 16), "float32")
    v = xp.ones_like(k)
    options = {"dropout": 0.4, "seed": 77}
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    got = cuflash.attention_backward(xp.ones_like(out), q, k, v, out, lse, **options,
                                     deterministic=deterministic)
    keep = philox.keep_mask(2, 4, 70, 130, 0.4, 77)
    columns = keep.sum(axis=2).reshape(2, 2, 2, 130).sum(axis=2) / 130 / 0.6
    np.testing.assert_allclose(wide(got.dv)[..., 0].swapaxes(1, 2), columns, rtol=1e-4)


def test_lse_is_untouched(xp):
    q, k, v = (put(xp, normal((1, 70, 2, 16), seed=seed)) for seed in range(3))
    _, lse = cuflash.attention(q, k, v, return_lse=True)
    _, dropped = cuflash.attention(q, k, v, dropout=0.5, seed=3, return_lse=True)
    # Other tiles may serve dropout: equal up to the order of summation.
    np.testing.assert_allclose(wide(lse), wide(dropped), rtol=1e-6)


def test_backward_needs_the_seed(xp):
    q = put(xp, normal((1, 9, 1, 16)))
    out, lse = cuflash.attention(q, q, q, dropout=0.5, seed=3, return_lse=True)
    with pytest.raises(ValueError, match="seed"):
        cuflash.attention_backward(out, q, q, q, out, lse, dropout=0.5)


def test_new_seed_draws_64_bits():
    seeds = [cuflash.new_seed() for _ in range(64)]
    assert len(set(seeds)) == 64
    assert all(isinstance(seed, int) and 0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**56


@pytest.mark.gpu
def test_numpy_and_gpu_drop_the_same(cupy):
    left = recovered(np, 130, 70, dropout=0.3, seed=8)
    assert np.array_equal(left != 0, get(recovered(cupy, 130, 70, dropout=0.3, seed=8)) != 0)


# Of each kind among the 16 x 16 that share their calls (i & 8, j & 8, j & 1), and some others.
ELEMENTS = [(0, 0), (3, 1), (9, 6), (13, 7), (2, 8), (5, 15), (8, 12), (15, 9), (16, 33), (38, 46)]
WITH_DROPOUT = (*FORWARDS, "attention_backward")


def around(element):
    """Return a seed, and dropouts that just keep an element or just not: below, then above 1/2."""
    for seed in range(21, 99):
        bits = int(philox.random_bits(1, 1, 48, 48, seed)[(0, 0, *element)])
        if bits < 2**14 - 1:
            steps = (bits, bits + 1, 2**15 - bits - 1, 2**15 - bits)
            return seed, [step / 2**15 for step in steps]


def check_around(element, mask):
    """Compare masks by `mask(dropout=, seed=)` with limits at and next to an element's bits."""
    seed, dropouts = around(element)
    masks = [mask(dropout=dropout, seed=seed) for dropout in dropouts]
    assert [bool(keep[element]) for keep in masks] == [True, False, True, False]
    for keep, dropout in zip(masks, dropouts, strict=True):
        assert np.array_equal(keep, philox.keep_mask(1, 1, 48, 48, dropout, seed)[0, 0])


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_bit_decides(xp, element):
    like = {} if xp is np else {"like": xp}

    def mask(**options):
        return get(cuflash.dropout_mask(1, 1, 48, 48, **options, **like))[0, 0]

    check_around(element, mask)


def by_tensor_cores(machine, batch, heads, q_len, kv_len, kernel, **options):
    """Return the mask as a forward kernel or the backward one applies it.

    Probabilities are uniform, and values, or rows of dout, are unit vectors.
    """
    zeros = {
        "q": np.zeros((batch, q_len, heads, 8), "float16"),
        "k": np.zeros((batch, kv_len, heads, 8), "float16"),
    }
    q, k = (machine.put(array) for array in zeros.values())
    forward = kernel in FORWARDS
    unit = np.eye(kv_len if forward else q_len, dtype="float16")[:, None]
    units = machine.put(np.tile(unit, (batch, 1, heads, 1)))
    if forward:
        with forward_by(kernel):
            out = cuflash.attention(q, k, units, **options)
        assert machine.launched[-1] == (kernel if machine.arch == 90 else PORTABLE)
        return get(out).transpose(0, 2, 1, 3) != 0
    lse = machine.put(np.full((batch, heads, q_len), np.log(kv_len), "float32"))
    v = machine.put(np.zeros((batch, kv_len, heads, q_len), "float16"))
    got = cuflash.attention_backward(units, q, k, v, units, lse, **options)
    assert kernel in machine.launched
    return get(got.dv).transpose(0, 2, 3, 1) != 0


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kernel", WITH_DROPOUT)
def test_tensor_cores_bit_for_bit(kernel, dropout, width, machine):
    batch, heads, length = (1, 2, 80) if machine.emulated else (4, 1024 // width, 4096)
    lengths = (length, width) if kernel in FORWARDS else (width, length)
    options = {"dropout": dropout, "seed": 2**63 + 7}
    got = by_tensor_cores(machine, batch, heads, *lengths, kernel, **options)
    like = machine.put(np.zeros(1))
    right = cuflash.dropout_mask(batch, heads, *lengths, **options, like=like)
    assert np.array_equal(got, get(right))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("kernel", WITH_DROPOUT)
def test_every_bit_decides_on_tensor_cores(kernel, element, machine):
    def mask(**options):
        return by_tensor_cores(machine, 1, 1, 48, 48, kernel, **options)[0, 0]

    check_around(element, mask)
