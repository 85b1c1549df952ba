"""Block masks that are measured: a description of each, small enough for a record.

Every pattern says twice what is visible: by a predicate in array code, which FlexAttention and the
true rows take, and as a `cuflash.BlockMask`. The error of a measurement compares the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

Visible = Callable[[Any, Any, Any], Any]
"""Booleans of heads, queries and keys: numbers, or index arrays that broadcast."""


@dataclass(frozen=True, kw_only=True)
class Pattern(ABC):
    """A mask of as many queries as keys, at any length, the same for all batch elements.

    Attributes
    ----------
    name : str
        A key of `ALL`.
    block_size : int
    heads : int
        For how many it differs; 1 if for none.
    """

    name: str
    block_size: int = 128
    heads = 1  # a field of those patterns that differ

    @property
    def label(self) -> str:
        """Name the pattern and what it leaves open, but for its blocks."""
        return self.name

    @abstractmethod
    def visible(self, length: int, asarray: Callable[[np.ndarray], Any] = np.asarray) -> Visible:
        """Make the predicate; `asarray` brings its tables into the library of the indices."""

    @abstractmethod
    def share(self, length: int) -> float:
        """Share of the pairs that are visible."""

    @abstractmethod
    def make(self, length: int, like: Any) -> Any:
        """Make the `cuflash.BlockMask`, where `like` lies."""


class WholeBlocks(Pattern):
    """A pattern without partial blocks."""

    @abstractmethod
    def blocks(self, length: int) -> np.ndarray:
        """Which blocks are present: booleans of shape (heads, rows, columns)."""

    def visible(self, length: int, asarray: Callable[[np.ndarray], Any] = np.asarray) -> Visible:
        blocks, size, heads = asarray(self.blocks(length)), self.block_size, self.heads
        return lambda h, i, j: blocks[h % heads, i // size, j // size]

    def share(self, length: int) -> float:
        blocks = self.blocks(length)
        sizes = np.minimum(self.block_size, length - np.arange(blocks.shape[1]) * self.block_size)
        return float((sizes @ blocks @ sizes).mean()) / length**2

    def _count(self, length: int) -> int:
        return -(-length // self.block_size)


@dataclass(frozen=True, kw_only=True)
class Random(WholeBlocks):
    """Blocks drawn among all: as many as the density says, and one at the least."""

    name: str = "random"
    density: float
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} {Fraction(self.density)}"

    def blocks(self, length: int) -> np.ndarray:
        count = self._count(length)
        order = np.random.default_rng(self.seed).permutation(count**2)
        return (order < max(1, round(self.density * count**2))).reshape(1, count, count)

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        blocks = self.blocks(length)
        return cuflash.BlockMask.from_blocks(blocks, length, block_size=self.block_size, like=like)


@dataclass(frozen=True, kw_only=True)
class Butterfly(WholeBlocks):
    """Blocks whose row and column are equal or differ in one binary digit."""

    name: str = "butterfly"

    def blocks(self, length: int) -> np.ndarray:
        differ = np.bitwise_xor.outer(*(np.arange(self._count(length)),) * 2)
        return (differ & (differ - 1) == 0)[None]

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        return cuflash.BlockMask.butterfly(length, block_size=self.block_size, like=like)


@dataclass(frozen=True, kw_only=True)
class BigBird(WholeBlocks):
    """A window, global and random blocks, as many as cuflash takes if not told; drawn per head."""

    name: str = "bigbird"
    heads: int = 1

    def blocks(self, length: int) -> np.ndarray:
        return self.make(length, np).states[0] != 0  # drawn by cuflash: there is no other source

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        return cuflash.BlockMask.bigbird(
            length, heads=self.heads, block_size=self.block_size, like=like
        )


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Pattern):
    """Keys from `left` before a query to `right` behind it."""

    name: str = "sliding_window"
    window: tuple[int, int]

    @property
    def label(self) -> str:
        return f"{self.name} {self.window}"

    def visible(self, length: int, asarray: Callable[[np.ndarray], Any] = np.asarray) -> Visible:
        left, right = self.window
        return lambda h, i, j: (j >= i - left) & (j <= i + right)

    def share(self, length: int) -> float:
        return count_band(length, *self.window) / length**2

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        return cuflash.BlockMask.sliding_window(
            length, window=self.window, block_size=self.block_size, like=like
        )


@dataclass(frozen=True, kw_only=True)
class Longformer(SlidingWindow):
    """The same, and first tokens that see all keys and are seen by all queries."""

    name: str = "longformer"
    global_tokens: int

    @property
    def label(self) -> str:
        return f"{super().label}, {self.global_tokens} global"

    def visible(self, length: int, asarray: Callable[[np.ndarray], Any] = np.asarray) -> Visible:
        band, tokens = super().visible(length), self.global_tokens
        return lambda h, i, j: band(h, i, j) | (i < tokens) | (j < tokens)

    def share(self, length: int) -> float:
        tokens = min(self.global_tokens, length)
        # Of the queries and the keys behind the global tokens only the band is visible.
        inner = length - tokens
        return 1.0 - (inner**2 - count_band(inner, *self.window)) / length**2

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        return cuflash.BlockMask.longformer(
            length, window=self.window, global_tokens=self.global_tokens,
            block_size=self.block_size, like=like,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadWindows(Pattern):
    """A window on both sides, by `step` wider with each head; made of a function."""

    name: str = "head_windows"
    heads: int = 1
    step: int

    def visible(self, length: int, asarray: Callable[[np.ndarray], Any] = np.asarray) -> Visible:
        step = self.step
        return lambda h, i, j: (j >= i - (h + 1) * step) & (j <= i + (h + 1) * step)

    def share(self, length: int) -> float:
        sides = (self.step * (h + 1) for h in range(self.heads))
        return sum(count_band(length, side, side) for side in sides) / self.heads / length**2

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        visible = self.visible(length)
        return cuflash.BlockMask.from_function(
            lambda b, h, i, j: visible(h, i, j), length, heads=self.heads,
            block_size=self.block_size, like=like,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Documents(Pattern):
    """Documents one after the other, of drawn lengths; each sees itself alone."""

    name: str = "documents"
    count: int
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.count} {self.name}"

    def lengths(self, length: int) -> np.ndarray:
        """Draw the lengths of the documents: from all ways to cut, each as likely."""
        cuts = np.random.default_rng(self.seed).permutation(np.arange(1, length))[: self.count - 1]
        return np.diff(np.sort(cuts), prepend=0, append=length)

    def visible(self, length: int, asarray: Callable[[np.ndarray], Any] = np.asarray) -> Visible:
        lengths = self.lengths(length)
        number = asarray(np.repeat(np.arange(len(lengths)), lengths))
        return lambda h, i, j: number[i] == number[j]

    def share(self, length: int) -> float:
        return float((self.lengths(length) ** 2).sum()) / length**2

    def make(self, length: int, like: Any) -> Any:
        import cuflash

        lengths = self.lengths(length).tolist()
        return cuflash.BlockMask.documents(lengths, block_size=self.block_size, like=like)


ALL: dict[str, Callable[..., Pattern]] = {
    "random": Random, "butterfly": Butterfly, "bigbird": BigBird, "sliding_window": SlidingWindow,
    "longformer": Longformer, "head_windows": HeadWindows, "documents": Documents,
}  # fmt: skip


def count_band(length: int, left: int, right: int) -> int:
    """Count the pairs of a query i and a key from i - left to i + right."""
    i = np.arange(length)
    return int((np.minimum(i + right, length - 1) - np.maximum(i - left, 0) + 1).sum())


def from_fields(fields: Mapping[str, Any] | None) -> Pattern | None:
    """Make a pattern of its fields as JSON gives them back; None of none."""
    if fields is None:
        return None
    given = {key: tuple(one) if isinstance(one, list) else one for key, one in fields.items()}
    return ALL[fields["name"]](**given)
