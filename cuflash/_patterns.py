"""Block masks of known patterns.

Which blocks are surely absent or full follows from the ranges of their queries and keys; only the
others are looked at, element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from cuflash._blocks import FULL, Blocks, bits_of_function, no_bits, resolve
from cuflash._draws import distinct
from cuflash._errors import integer, reject
from cuflash._grid import Grid
from cuflash._interop import native, place, to_host
from cuflash._problem import checked_seed, checked_window
from cuflash._ranges import Ranges, Rule

Mask = TypeVar("Mask", bound="Patterns")
Size = int | tuple[int, int]


class Patterns(Blocks):
    """The constructors of named patterns; what they share is told by :class:`cuflash.BlockMask`."""

    @classmethod
    def _ruled(cls: type[Mask], ranges: Ranges, rule: Rule) -> Mask:
        xp, grid = ranges.xp, ranges.grid
        guess = xp.broadcast_to(rule.possible.astype(xp.uint8) + rule.certain, grid.counts)
        return cls(grid, *resolve(grid, guess, bits_of_function(grid, rule.visible)))

    @classmethod
    def _whole(cls: type[Mask], xp: Any, grid: Grid, present: Any) -> Mask:
        """A mask without partial blocks."""
        states = xp.empty(grid.counts, xp.uint8)
        states[...] = present
        states *= FULL
        return cls(grid, states, no_bits(xp, grid))

    @classmethod
    def causal(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *,
        alignment: str = "bottom-right", block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """The query that stands at key p sees keys ``j <= p``.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.causal(48, block_size=16).states[0, 0].tolist()
        [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
        """
        grid = Grid.of(q_len, kv_len, block_size)
        with place(like) as xp:
            ranges = Ranges(xp, grid, alignment)
            return cls._ruled(ranges, ranges.band(None, 0))

    @classmethod
    def sliding_window(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *,
        window: tuple[int | None, int | None], alignment: str = "bottom-right",
        block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """The query that stands at key p sees keys from ``p - left`` to ``p + right``, inclusive.

        Parameters
        ----------
        window : (left, right)
            None leaves an end open; the same as `window` of attention.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.sliding_window(64, window=(16, 0), block_size=16).states[0, 0, 3]
        array([0, 0, 1, 1], dtype=uint8)
        """
        grid, sides = Grid.of(q_len, kv_len, block_size), checked_window(window)
        with place(like) as xp:
            ranges = Ranges(xp, grid, alignment)
            return cls._ruled(ranges, ranges.band(*sides))

    @classmethod
    def prefix_lm(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *, prefix: Any,
        alignment: str = "bottom-right", block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """Causal, but all queries see the keys of the prefix: ``j <= p`` or ``j < prefix``.

        Parameters
        ----------
        prefix : int or (batch,) int array
            One length for all batch elements, or one for each.
        """
        lengths = np.atleast_1d(_not_negative("prefix", _integers("prefix", prefix, (0, 1))))
        grid = Grid.of(q_len, kv_len, block_size, batch=len(lengths))
        with place(_home(like, prefix)) as xp:
            ranges = Ranges(xp, grid, alignment)
            keys = xp.arange(grid.shape[3]) < xp.asarray(lengths)[:, None]
            queries = xp.zeros((grid.shape[0], grid.shape[2]), xp.bool_)
            return cls._ruled(ranges, ranges.either(ranges.band(None, 0), queries, keys))

    @classmethod
    def longformer(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *,
        window: tuple[int | None, int | None], global_tokens: int | Sequence[int] = 1,
        alignment: str = "bottom-right", block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """A sliding window, and global tokens, which see all keys and are seen by all queries.

        Parameters
        ----------
        window : (left, right)
            As of :meth:`sliding_window`.
        global_tokens : int or sequence of int
            That many at the beginning, or their positions, counted as keys are.

        Notes
        -----
        Source: Beltagy et al., "Longformer: the long-document transformer", 2020.
        """
        grid, sides = Grid.of(q_len, kv_len, block_size), checked_window(window)
        tokens = _integers("global_tokens", global_tokens, (0, 1))
        if tokens.ndim == 0:
            tokens = np.arange(int(_not_negative("global_tokens", tokens)))
        with place(like) as xp:
            ranges = Ranges(xp, grid, alignment)
            queries = np.isin(np.arange(grid.shape[2]) + ranges.offset, tokens)
            keys = np.isin(np.arange(grid.shape[3]), tokens)
            flags = (xp.asarray(found[None]) for found in (queries, keys))
            return cls._ruled(ranges, ranges.either(ranges.band(*sides), *flags))

    @classmethod
    def strided(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *, stride: int,
        unit: int | None = None, alignment: str = "bottom-right", block_size: Size = 128,
        like: Any = None,
    ) -> Mask:  # fmt: skip
        """Causal: the last `stride` positions, and before them every `stride`-th one.

        Parameters
        ----------
        stride : int
            In units.
        unit : int, optional
            How many tokens are one position of the pattern. The larger side of a block if None, as
            in block-sparse kernels; with 1, the definition of the paper, most blocks are partial.

        Notes
        -----
        Key j of unit ``v = j // unit`` is visible to a query at p, of unit ``u = p // unit``, if
        ``j <= p`` and (``u - v < stride`` or ``(u - v) % stride == 0``). Source: Child et al.,
        "Generating long sequences with sparse transformers", 2019, both heads in one.
        """
        grid, stride = Grid.of(q_len, kv_len, block_size), integer("stride", stride, 1)
        unit = max(grid.block_size) if unit is None else integer("unit", unit, 1)
        with place(like) as xp:
            ranges = Ranges(xp, grid, alignment)
            band, offset = ranges.band(None, 0), ranges.offset

            def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
                apart = (i + offset) // unit - j // unit
                return (i + offset >= j) & ((apart < stride) | (apart % stride == 0))

            least = ranges.top // unit - ranges.right // unit
            most = ranges.bottom // unit - ranges.left // unit
            some = (least < stride) | (most // stride * stride >= least)
            every = (most < stride) | ((least == most) & (least % stride == 0))
            return cls._ruled(ranges, Rule(visible, band.possible & some, band.certain & every))

    @classmethod
    def fixed(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *, stride: int, summary: int = 1,
        unit: int | None = None, alignment: str = "bottom-right", block_size: Size = 128,
        like: Any = None,
    ) -> Mask:  # fmt: skip
        """Causal: groups of `stride` positions, and the last `summary` ones of all groups.

        Parameters
        ----------
        stride, summary : int
            In units.
        unit : int, optional
            As of :meth:`strided`.

        Notes
        -----
        With u and v as there, ``j <= p`` and (``u // stride == v // stride`` or
        ``v % stride >= stride - summary``). Source: as there.
        """
        grid, stride = Grid.of(q_len, kv_len, block_size), integer("stride", stride, 1)
        unit = max(grid.block_size) if unit is None else integer("unit", unit, 1)
        kept, group = stride - integer("summary", summary), stride * unit
        with place(like) as xp:
            ranges = Ranges(xp, grid, alignment)
            band, offset = ranges.band(None, 0), ranges.offset

            def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
                same = (i + offset) // group == j // group
                return (i + offset >= j) & (same | (j // unit % stride >= kept))

            top, bottom = ranges.top // group, ranges.bottom // group
            left, right = ranges.left // group, ranges.right // group
            columns = ranges.columns(xp.arange(grid.shape[3]) // unit % stride >= kept)
            some = ((top <= right) & (left <= bottom)) | columns.any(axis=-1)
            every = ((top == right) & (left == bottom) & (top == left)) | columns.all(axis=-1)
            return cls._ruled(ranges, Rule(visible, band.possible & some, band.certain & every))

    @classmethod
    def bigbird(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *, window_blocks: int = 3,
        global_blocks: int = 2, random_blocks: int = 3, seed: int = 0, batch: int = 1,
        heads: int = 1, alignment: str = "bottom-right", block_size: Size = 64, like: Any = None,
    ) -> Mask:  # fmt: skip
        """Whole blocks: a window around the diagonal, global ones, and random ones.

        Parameters
        ----------
        window_blocks : int
            Key blocks of the window, odd: those with the keys where a row of blocks stands, and
            ``window_blocks // 2`` on either side.
        global_blocks : int
            So many first rows and columns of blocks.
        random_blocks : int
            For each row, drawn from the blocks not yet taken.
        seed : int
            In [0, 2^64). Equal seeds give equal blocks, by NumPy and on every GPU.
        batch, heads : int
            For how many to draw; 1 for all alike.

        Notes
        -----
        Source: Zaheer et al., "Big Bird: transformers for longer sequences", 2020.
        """
        grid = Grid.of(q_len, kv_len, block_size, batch, heads)
        (_, columns), (batch, heads, rows, across) = grid.block_size, grid.counts
        wide = integer("window_blocks", window_blocks)
        if wide % 2 == 0:
            raise reject(ValueError, "window_blocks must be odd", window_blocks)
        edge = min(integer("global_blocks", global_blocks), across)
        ranges = Ranges(np, grid, alignment)
        first = np.clip(ranges.top[:, 0] // columns - wide // 2, edge, across)
        stop = np.clip(ranges.bottom[:, 0] // columns + wide // 2 + 1, first, across)
        available, count = across - edge - (stop - first), integer("random_blocks", random_blocks)
        drawn = distinct(checked_seed(seed), batch, heads, available, count)
        column = drawn + edge + np.where(drawn + edge >= first, stop - first, 0)
        line = np.arange(batch * heads * rows).reshape(batch, heads, rows) * across
        with place(like) as xp:
            row, key = xp.arange(rows)[:, None], xp.arange(across)
            low, high = (xp.asarray(bound)[:, None] for bound in (first, stop))
            present = xp.empty(grid.counts, xp.bool_)
            present[...] = (row < edge) | (key < edge) | ((key >= low) & (key < high))
            present.ravel()[xp.asarray((line + column)[drawn >= 0])] = True
            return cls._whole(xp, grid, present)

    @classmethod
    def butterfly(
        cls: type[Mask], q_len: int, kv_len: int | None = None, *,
        block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """Whole blocks: I and J where they are equal or differ in one binary digit.

        Notes
        -----
        The sum of all butterfly factors, flat, as the FlashAttention paper used it; if rows and
        columns of blocks are not equally many, the longer side is stretched over the shorter.
        Source: Dao et al., "Pixelated butterfly", 2021.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.butterfly(64, block_size=16).states[0, 0].tolist()
        [[2, 2, 2, 0], [2, 2, 0, 2], [2, 0, 2, 2], [0, 2, 2, 2]]
        """
        grid = Grid.of(q_len, kv_len, block_size)
        _, _, rows, columns = grid.counts
        fewer = min(rows, columns)
        with place(like) as xp:
            row = xp.arange(rows)[:, None] * fewer // max(1, rows)
            differ = row ^ xp.arange(columns) * fewer // max(1, columns)
            return cls._whole(xp, grid, differ & (differ - 1) == 0)

    @classmethod
    def documents(
        cls: type[Mask], lengths: Any, kv_lengths: Any = None, *,
        block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """Queries see the keys of their own document; documents lie one after the other.

        Parameters
        ----------
        lengths : sequence of int
            Of the documents' queries.
        kv_lengths : sequence of int, optional
            Of their keys, if not the same.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.documents([20, 12, 16], block_size=16).states[0, 0].tolist()
        [[2, 1, 0], [1, 1, 0], [0, 0, 2]]
        """
        ids, kv_ids = _numbers("lengths", lengths), None
        if kv_lengths is not None:
            kv_ids = _numbers("kv_lengths", kv_lengths)
            if len(lengths) != len(kv_lengths):
                counts = f"{len(lengths)} and {len(kv_lengths)}"
                raise reject(ValueError, "lengths and kv_lengths must be equally many", counts)
        return cls.segments(ids, kv_ids, block_size=block_size, like=_home(like, lengths))

    @classmethod
    def segments(
        cls: type[Mask], ids: Any, kv_ids: Any = None, *,
        block_size: Size = 128, like: Any = None,
    ) -> Mask:  # fmt: skip
        """Queries see the keys with the same number, of a document or the like.

        Parameters
        ----------
        ids : (q_len,) or (batch, q_len) int array
            Of the queries, in any order; blocks are classified best where they ascend.
        kv_ids : (kv_len,) or (batch, kv_len) int array, optional
            Of the keys, if not the same.
        """
        q_ids = np.atleast_2d(_integers("ids", ids, (1, 2)))
        keys = q_ids if kv_ids is None else np.atleast_2d(_integers("kv_ids", kv_ids, (1, 2)))
        if len(keys) != len(q_ids) and 1 not in (len(keys), len(q_ids)):
            shapes = f"{q_ids.shape} and {keys.shape}"
            raise reject(ValueError, "ids and kv_ids must have the same batch", shapes)
        batch = max(len(q_ids), len(keys))
        grid = Grid.of(q_ids.shape[1], keys.shape[1], block_size, batch)
        with place(_home(like, ids)) as xp:
            queries, keys = (
                xp.asarray(np.broadcast_to(side, (batch, side.shape[1]))) for side in (q_ids, keys)
            )
            ranges = Ranges(xp, grid)
            rows = ranges.rows(queries)[:, None, :, None]
            columns = ranges.columns(keys)[:, None, None]
            low, high = rows.min(axis=-1), rows.max(axis=-1)
            least, most = columns.min(axis=-1), columns.max(axis=-1)
            rule = Rule(
                lambda b, h, i, j: queries[b, i] == keys[b, j],
                (low <= most) & (least <= high),
                (low == high) & (least == most) & (low == least),
            )
            return cls._ruled(ranges, rule)


def _integers(name: str, values: Any, axes: tuple[int, ...]) -> np.ndarray:
    """Integers, a number or an array of any library, for the host to read."""
    if isinstance(values, (list, tuple, range, int, np.integer)):
        array = np.asarray(values)
        array = array.astype(np.int64) if array.size == 0 else array
    else:
        array = to_host(native(name, values))
    if array.dtype.kind not in "iu":
        raise reject(TypeError, f"{name} must be integers", array.dtype.name)
    if array.ndim not in axes:
        rule = f"{name} must have {' or '.join(map(str, axes))} axes"
        raise reject(ValueError, rule, array.shape)
    return array.astype(np.int64)


def _not_negative(name: str, values: np.ndarray) -> np.ndarray:
    if (values < 0).any():
        raise reject(ValueError, f"{name} must not be negative", values.tolist())
    return values


def _numbers(name: str, lengths: Any) -> np.ndarray:
    """The number of its document for each token, of the documents' lengths."""
    counts = _not_negative(name, _integers(name, lengths, (1,)))
    return np.repeat(np.arange(len(counts)), counts)


def _home(like: Any, given: Any) -> Any:
    """Where a mask belongs: as the caller says, else with the array that it is made of."""
    return given if like is None and hasattr(given, "__dlpack__") else like
