"""Block masks made block by block, to compare with."""

import numpy as np
import pytest
from arrays import get


def blocks_of(dense, block_size):
    """Return states and unpacked partial blocks of a dense mask, block by block."""
    rows, columns = block_size
    *planes, q_len, kv_len = dense.shape
    states = np.zeros((*planes, -(-q_len // rows), -(-kv_len // columns)), np.uint8)
    partial = []
    for place in np.ndindex(states.shape):
        i, j = place[2] * rows, place[3] * columns
        part = dense[place[:2]][i : i + rows, j : j + columns]
        states[place] = 2 if part.all() else int(part.any())
        if states[place] == 1:
            whole = np.zeros((rows, -(-columns // 32) * 32), bool)
            whole[: part.shape[0], : part.shape[1]] = part
            partial.append(whole)
    return states, partial


def unpacked(words):
    """Return the bits of words as booleans, lowest bit first."""
    shifted = get(words)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return shifted.reshape(*words.shape[:-1], words.shape[-1] * 32).astype(bool)


def check(mask, dense):
    """Assert that a mask holds a dense mask (batch, heads, q_len, kv_len), in the right form."""
    states, partial = blocks_of(dense, mask.block_size)
    assert mask.shape == dense.shape
    assert mask.states.dtype == np.uint8 and mask.bits.dtype == np.uint32
    assert np.array_equal(get(mask.states), states)
    assert mask.bits.shape == (len(partial), mask.block_size[0], -(-mask.block_size[1] // 32))
    assert all(np.array_equal(a, b) for a, b in zip(unpacked(mask.bits), partial, strict=True))
    assert np.array_equal(get(mask.to_dense()), dense)
    assert mask.density == pytest.approx((states > 0).mean() if states.size else 0)
    assert mask.sparsity == pytest.approx(1 - mask.density)


def some(shape=(2, 3, 100, 130), seed=0):
    """Return a dense mask with absent, full and partial blocks of many sizes."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 3, (*shape[:2], 20, 30)).repeat(17, 2).repeat(23, 3)
    coarse = coarse[..., : shape[2], : shape[3]]
    return (coarse == 2) | ((coarse == 1) & (rng.random(shape) < 0.5))
