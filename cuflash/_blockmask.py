"""The public class of block masks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np

from cuflash._blocks import FULL, PARTIAL, Blocks, bits_of_function, resolve
from cuflash._errors import integer, reject
from cuflash._grid import Grid, checked_size
from cuflash._interop import device_index, native, place, same_place, to_host, wait_for
from cuflash._lists import Lists, lists
from cuflash._patterns import Patterns, Size
from cuflash._picture import plot

_AT_A_TIME = 2**22  # booleans of a dense mask
_TILES = (8, 16, 32, 64, 128, 256)  # the first one for queries only


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Patterns):
    """Which pairs of a query and a key are visible, by blocks: for ``mask=`` in attention.

    What lies in absent blocks costs neither time nor memory traffic. Full blocks need no mask;
    partial ones keep one bit for each pair. A mask lies on the CPU or on a GPU, where the arrays
    must be with which it is used: `like` in all constructors, and :meth:`to`.

    Make one by :meth:`from_function`, :meth:`from_blocks`, :meth:`from_dense`, or by a pattern:
    :meth:`causal`, :meth:`sliding_window`, :meth:`prefix_lm`, :meth:`documents`, :meth:`segments`,
    :meth:`longformer`, :meth:`bigbird`, :meth:`strided`, :meth:`fixed`, :meth:`butterfly`. Combine
    masks by ``&``, ``|`` and ``~``.

    Patterns take `q_len`, `kv_len`, `block_size` and `like` as :meth:`from_function` does. In them
    query i stands at key ``p = i + kv_len - q_len``, as in causal attention, or at ``p = i`` where
    `alignment` is "top-left" and not "bottom-right".

    Attributes
    ----------
    grid : Grid
        `shape` and `block_size`.
    states : (batch, heads, block rows, block columns) uint8 array
        0: absent, 1: partial, 2: full.
    bits : (partial blocks, rows, columns / 32 rounded up) uint32 array
        In the order of `states`. Bit k of word w is key 32 w + k of the block, 0 beyond the ends.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> near = cuflash.BlockMask.sliding_window(1000, window=(200, 0))
    >>> first = cuflash.BlockMask.from_function(lambda b, h, i, j: j < 128, 1000, 1000)
    >>> mask = near | first
    >>> mask
    BlockMask((1, 1, 1000, 1000), blocks of 128 x 128: 12.5% full, 28.1% partial, on the CPU)
    >>> q = np.ones((2, 1000, 4, 64), np.float32)
    >>> cuflash.attention(q, q, q, mask=mask, causal=True).shape
    (2, 1000, 4, 64)
    """

    _kept: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        wait_for(self.states)  # any stream may read it from now on

    @classmethod
    def from_function(
        cls, visible: Callable[[Any, Any, Any, Any], Any], q_len: int, kv_len: int | None = None,
        *, batch: int = 1, heads: int = 1, block_size: Size = 128, like: Any = None,
    ) -> BlockMask:  # fmt: skip
        """A mask from a function in array code, which is asked for a few blocks at a time.

        Parameters
        ----------
        visible : function of (b, h, i, j)
            Batch elements, heads, queries and keys, int64 arrays that broadcast: returns booleans
            for them.
        q_len : int
        kv_len : int, optional
            `q_len` if None.
        batch, heads : int
            1 if all batch elements or heads have the same mask.
        block_size : int or (rows, columns)
            Multiples of 16 up to 256.
        like : array or module, optional
            An array of any library: the mask is made on its device, by NumPy or CuPy. Or the
            module ``cupy``. Else by NumPy.

        Returns
        -------
        BlockMask

        Raises
        ------
        TypeError, ValueError
            If an argument breaks a rule.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.from_function(lambda b, h, i, j: i >= j, 96, block_size=32)
        BlockMask((1, 1, 96, 96), blocks of 32 x 32: 33.3% full, 33.3% partial, on the CPU)
        """
        grid = Grid.of(q_len, kv_len, block_size, batch, heads)
        if not callable(visible):
            raise reject(TypeError, "visible must be a function of (b, h, i, j)", visible)
        with place(like) as xp:
            guess = xp.full(grid.counts, PARTIAL, xp.uint8)
            return cls(grid, *resolve(grid, guess, bits_of_function(grid, visible)))

    @classmethod
    def from_blocks(
        cls, blocks: Any, q_len: int, kv_len: int | None = None, *, block_size: Size = 128,
        like: Any = None,
    ) -> BlockMask:  # fmt: skip
        """A mask of whole blocks.

        Parameters
        ----------
        blocks : (block rows, block columns) bool array
            True where all of a block is visible; or (heads, ...), or (batch, heads, ...), each 1 or
            the number of all.
        q_len, kv_len, block_size, like
            As of :meth:`from_function`; `like` is `blocks` if None.
        """
        blocks = _booleans("blocks", blocks)
        grid = Grid.of(q_len, kv_len, block_size, *blocks.shape[:2])
        if blocks.shape != grid.counts:
            rule = f"blocks must have {grid.counts[2]} rows and {grid.counts[3]} columns"
            raise reject(ValueError, rule, blocks.shape)
        with place(blocks if like is None else like) as xp:
            return cls._whole(xp, grid, to_host(blocks) if xp is np else xp.asarray(blocks))

    @classmethod
    def from_dense(cls, mask: Any, *, block_size: Size = 128) -> BlockMask:
        """A mask from a boolean array, on its device.

        Parameters
        ----------
        mask : (q_len, kv_len) bool array
            True where visible; or (heads, ...), or (batch, heads, ...), each 1 or the number of
            all.
        block_size : int or (rows, columns)
        """
        mask = _booleans("mask", mask)
        batch, heads, q_len, kv_len = mask.shape
        return cls.from_function(
            lambda b, h, i, j: mask[b, h, i, j], q_len, kv_len, batch=batch, heads=heads,
            block_size=block_size, like=mask,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len); batch and heads of 1 stand for all."""
        return self.grid.shape

    @property
    def block_size(self) -> tuple[int, int]:
        """(rows, columns) of a block."""
        return self.grid.block_size

    @property
    def signature(self) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
        """Shape and block size: what launches depend on beside the blocks themselves."""
        return self.shape, self.block_size

    @property
    def sparsity(self) -> float:
        """Share of the blocks that are absent. Waits for the GPU, once."""
        full, partial = self._shares
        return 1.0 - full - partial

    @property
    def density(self) -> float:
        """Share of the blocks that are present, full or partial."""
        return 1.0 - self.sparsity

    @property
    def hides_nothing(self) -> bool:
        """Whether all blocks are full. Waits for the GPU, once."""
        return self._shares[0] == 1

    @property
    def _shares(self) -> tuple[float, float]:
        """Of full and of partial blocks."""
        if "shares" not in self._kept:
            count = max(1, self.states.size)
            with place(self.states):
                self._kept["shares"] = tuple(
                    int((self.states == state).sum()) / count for state in (FULL, PARTIAL)
                )
        return self._kept["shares"]

    def __repr__(self) -> str:
        index, (rows, columns), (full, partial) = (
            device_index(self.states), self.block_size, self._shares
        )
        where = f"CUDA device {index}" if index >= 0 else "the CPU"
        return (
            f"BlockMask({self.shape}, blocks of {rows} x {columns}: {full:.1%} full, "
            f"{partial:.1%} partial, on {where})"
        )

    def __and__(self, other: object) -> BlockMask:
        """What both masks show."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._with(other, "minimum", operator.and_)

    def __or__(self, other: object) -> BlockMask:
        """What one of the masks shows."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._with(other, "maximum", operator.or_)

    def __invert__(self) -> BlockMask:
        """What the mask does not show."""
        with place(self.states):
            bits = resolve(self.grid, FULL - self.states, lambda *where: ~self.halves(*where))
            return BlockMask(self.grid, *bits)

    def _with(
        self, other: BlockMask, of_states: str, of_bits: Callable[[Any, Any], Any]
    ) -> BlockMask:
        """A combination, with blocks of a size that divides those of both."""
        planes, lengths = zip(*((mask.shape[:2], mask.shape[2:]) for mask in (self, other)))
        if lengths[0] != lengths[1] or any(1 not in pair and pair[0] != pair[1]
                                           for pair in zip(*planes)):  # fmt: skip
            raise reject(ValueError, "masks must have the same shape", (self.shape, other.shape))
        same_place("the right mask", other.states, self.states, "the left one")
        rows, columns = map(gcd, self.block_size, other.block_size)
        grid = Grid((*map(max, *planes), *lengths[0]), (rows, columns))
        with place(self.states) as xp:
            sides = [mask.retiled((rows, columns)) for mask in (self, other)]
            states = (xp.broadcast_to(side.states, grid.counts) for side in sides)
            own = [
                xp.broadcast_to(xp.arange(b * h).reshape(b, h), grid.shape[:2]).ravel()
                for b, h in planes
            ]

            def bits_of(plane: Any, i: Any, u: Any) -> Any:
                return of_bits(*(
                    side.halves(xp.take(numbers, plane), i, u) for side, numbers in zip(sides, own)
                ))  # fmt: skip

            return BlockMask(grid, *resolve(grid, getattr(xp, of_states)(*states), bits_of))

    def reblocked(self, block_size: Size) -> BlockMask:
        """The same mask in blocks of another size, with which the bits are made anew."""
        size = checked_size(block_size)
        with place(self.states):
            blocks = self.retiled(size)
            return BlockMask(blocks.grid, blocks.states, blocks.bits)

    def to(self, like: Any) -> BlockMask:
        """The mask where `like` lies: an array of any library, or the module numpy or cupy."""
        with place(like) as xp:
            index = -1 if xp is np else xp.cuda.Device().id
            if index == device_index(self.states):
                return self
            move = to_host if xp is np else xp.array
            return BlockMask(self.grid, move(self.states), move(self.bits))

    def to_dense(self) -> Any:
        """The mask as a (batch, heads, q_len, kv_len) bool array."""
        batch, heads, q_len, kv_len = self.shape
        with place(self.states) as xp:
            dense = xp.empty((batch * heads * q_len, kv_len), xp.bool_)
            step = max(1, _AT_A_TIME // max(1, kv_len))
            for start in range(0, len(dense), step):
                part = dense[start : start + step]
                line = xp.arange(start, start + len(part))[:, None]
                part[...] = self.visible(line // q_len, line % q_len, range(kv_len))
            return dense.reshape(self.shape)

    def lists(
        self, tile_m: int, tile_n: int, transposed: bool = False, *, split: bool = True
    ) -> Lists:
        """What kernels walk with tiles of `tile_m` queries and `tile_n` keys: made once, and kept.

        Parameters
        ----------
        tile_m, tile_n : int
            Powers of two up to 256, whatever the block size: from 8 on, and from 16 on.
        transposed : bool
            False: the key tiles of each query tile. True: the query tiles of each key tile, with
            the same `words`.
        split : bool
            Whether several blocks of threads may share a long list.

        Returns
        -------
        Lists
            ``(offsets, blocks, words, work, cuts, splits)``; see there.

        Examples
        --------
        >>> import cuflash
        >>> lists = cuflash.BlockMask.causal(96, block_size=32).lists(32, 32)
        >>> lists.offsets.tolist(), lists.blocks[:, 0].tolist()
        ([0, 1, 3, 6], [0, 0, 1, 0, 1, 2])
        >>> lists.blocks[:, 1].tolist(), lists.words.shape
        ([0, -1, 1, -1, -1, 2], (3, 32, 1))
        >>> lists.work.tolist()
        [[[2, 3, 6, -1], [1, 1, 3, -1], [0, 0, 1, -1]]]
        """
        key = tile_m, tile_n, transposed, split
        found: Lists | None = self._kept.get(key)
        return self._listed(*key) if found is None else found

    def _listed(self, tile_m: int, tile_n: int, transposed: bool, split: bool) -> Lists:
        for name, size, known in (("tile_m", tile_m, _TILES), ("tile_n", tile_n, _TILES[1:])):
            if integer(name, size) not in known:
                raise reject(ValueError, f"{name} must be one of {known}", size)
        with place(self.states):
            tiles: Blocks = self._kept.get((tile_m, tile_n)) or self.retiled((tile_m, tile_n))
            found = lists(tiles, transposed, split)
            wait_for(found.work)  # any stream of any thread may read them from now on
        if tiles is not self:  # a mask that held itself would outlive its last user
            self._kept[tile_m, tile_n] = tiles
        self._kept[tile_m, tile_n, transposed, split] = found
        return found

    def plot(self, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draws the blocks of one head with matplotlib.

        Parameters
        ----------
        batch, head : int
        ax : matplotlib Axes, optional
            Where to draw; on a new figure if None.

        Returns
        -------
        matplotlib Axes
        """
        return plot(self, batch, head, ax)


def _booleans(name: str, array: Any) -> Any:
    """A boolean array of two to four axes, with four."""
    array = native(name, array)
    if array.dtype != np.bool_:
        raise reject(TypeError, f"{name} must be boolean, True where visible", array.dtype.name)
    if not 2 <= array.ndim <= 4:
        rule = f"{name} must have axes (batch, heads, rows, columns), the first two optional"
        raise reject(ValueError, rule, array.shape)
    return array[(None,) * (4 - array.ndim)]
