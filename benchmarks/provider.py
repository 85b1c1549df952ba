"""What a provider is: a plug-in that makes one implementation of attention measurable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from inputs import Inputs, to_float64
from workloads import ITEM_BYTES


class Skipped(Exception):
    """A provider can't do this workload here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes
    ----------
    call : callable
        Takes nothing, returns the result.
    primary : callable
        Takes the result, returns out (of a forward pass) or dq.
    heads_first : bool
        Layout (batch, heads, seq, head_dim) in place of (batch, seq, heads, head_dim).
    kernel : str or None
        What runs.
    tile : (queries, keys) or None
        Size of the tiles of scores that the kernel works on.
    note : str or None
        What a reader of the result must know.
    """

    call: Callable[[], Any]
    primary: Callable[[Any], Any]
    heads_first: bool
    kernel: str | None = None
    tile: tuple[int, int] | None = None
    note: str | None = None

    def rows(self, result: Any, positions: list[tuple[int, int, int]]) -> np.ndarray:
        """Read rows of the result, as float64 of shape (len(positions), head_dim).

        Raises
        ------
        RuntimeError
            They hold NaN or Inf.
        """
        array = self.primary(result)
        order = (lambda b, h, i: (b, h, i)) if self.heads_first else (lambda b, h, i: (b, i, h))
        return _finite(np.stack([to_float64(array[order(*position)]) for position in positions]))

    def whole(self, result: Any) -> np.ndarray:
        """Read all of the result, as float64 of shape (batch, heads, seq, head_dim).

        Raises
        ------
        RuntimeError
            It holds NaN or Inf.
        """
        array = _finite(to_float64(self.primary(result)))
        return array if self.heads_first else array.swapaxes(1, 2)


def _finite(array: np.ndarray) -> np.ndarray:
    if not np.isfinite(array).all():
        raise RuntimeError("the result holds NaN or Inf")
    return array


class Provider(ABC):
    """One implementation of attention.

    Attributes
    ----------
    name : str
        As in the records.
    devices : tuple of str
        Where it runs: "cuda", "cpu".
    dtypes : tuple of str
        What it takes.
    torch_memory : bool
        Its memory on the GPU comes from PyTorch's allocator, not from CuPy's pool.
    replays_dropout : bool
        Its dropout is that of `cuflash.dropout_mask`, so that its results can be checked.
    """

    name: str
    devices: tuple[str, ...] = ("cuda", "cpu")
    dtypes: tuple[str, ...] = tuple(ITEM_BYTES)
    torch_memory: bool = False
    replays_dropout: bool = False

    @abstractmethod
    def missing(self) -> str | None:
        """Say why this provider is absent, or None if it is present."""

    @abstractmethod
    def version(self, device: str) -> str:
        """Name the library and its version."""

    @abstractmethod
    def load(self, inputs: Inputs) -> Any:
        """Bring the inputs into the library and the layout that suit the provider, untimed."""

    @abstractmethod
    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        """Make the call to be timed. Raises `Skipped` for what the provider can't do."""

    def active(self) -> AbstractContextManager[Any]:
        """Enter the settings under which the provider's calls are made."""
        return nullcontext()
