"""Booleans as bits: 16 keys in a uint16, 32 in a word (uint32), the first key in the lowest bit."""

from __future__ import annotations

from typing import Any

from cuflash._interop import module_of

KEYS = 16  # of one uint16; every block holds a whole number of them


def pack(seen: Any) -> Any:
    """Booleans (..., 16 n) as bits (..., n), uint16."""
    xp = module_of(seen)
    octets = xp.packbits(seen, bitorder="little")
    return octets.view(xp.uint16).reshape(*seen.shape[:-1], seen.shape[-1] // KEYS)


def unpack(halves: Any) -> Any:
    """Bits (..., n), uint16, as booleans (..., 16 n)."""
    xp = module_of(halves)
    octets = xp.unpackbits(halves.ravel().view(xp.uint8), bitorder="little")
    return octets.view(xp.bool_).reshape(*halves.shape[:-1], halves.shape[-1] * KEYS)


def words(halves: Any) -> Any:
    """Bits (..., n), uint16, as words (..., n / 2 rounded up), uint32."""
    xp = module_of(halves)
    if halves.shape[-1] % 2:
        halves = xp.concatenate([halves, xp.zeros_like(halves[..., :1])], axis=-1)
    shape = (*halves.shape[:-1], halves.shape[-1] // 2)
    return xp.ascontiguousarray(halves).ravel().view(xp.uint32).reshape(shape)
