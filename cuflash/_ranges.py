"""What is known of whole blocks, from the ranges of their queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cuflash._errors import reject
from cuflash._grid import Grid

Visible = Callable[[Any, Any, Any, Any], Any]
_FAR = 2**62  # an open end of a window


class Rule(NamedTuple):
    """A pattern: element by element, and what each block possibly and certainly shows."""

    visible: Visible
    possible: Any
    certain: Any


class Ranges:
    """First and last query and key of each block, as (block rows, 1) and (1, block columns).

    Queries are counted as keys are: query i stands at ``i + offset``.
    """

    def __init__(self, xp: Any, grid: Grid, alignment: str = "bottom-right") -> None:
        _, _, q_len, kv_len = grid.shape
        if alignment not in ("bottom-right", "top-left"):
            rule = 'alignment must be "bottom-right" or "top-left"'
            raise reject(ValueError, rule, alignment)
        self.xp, self.grid = xp, grid
        self.offset = 0 if alignment == "top-left" else kv_len - q_len
        i, j = self.rows(xp.arange(q_len) + self.offset), self.columns(xp.arange(kv_len))
        self.top, self.bottom = i[:, :1], i[:, -1:]
        self.left, self.right = j[None, :, 0], j[None, :, -1]

    def rows(self, values: Any) -> Any:
        """Values of all queries (..., q_len) as (..., block rows, rows), the last one repeated."""
        return self._by_block(values, 0)

    def columns(self, values: Any) -> Any:
        """Values of all keys (..., kv_len) as (..., block columns, columns)."""
        return self._by_block(values, 1)

    def _by_block(self, values: Any, axis: int) -> Any:
        xp, size, count = self.xp, self.grid.block_size[axis], self.grid.counts[2 + axis]
        index = xp.minimum(xp.arange(count * size), values.shape[-1] - 1)
        return xp.take(values, index.reshape(count, size), axis=-1)

    def band(self, left: int | None, right: int | None) -> Rule:
        """Keys from ``i + offset - left`` to ``i + offset + right``."""
        most_left, most_right = (_FAR if side is None else side for side in (left, right))
        least, most = self.top - self.right, self.bottom - self.left

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            distance = i + self.offset - j
            return (distance <= most_left) & (distance >= -most_right)

        possible = (least <= most_left) & (most >= -most_right)
        return Rule(visible, possible, (most <= most_left) & (least >= -most_right))

    def either(self, rule: Rule, rows: Any, columns: Any) -> Rule:
        """What a rule shows, and all of some queries (batch, q_len) and keys (batch, kv_len)."""
        i, j = self.rows(rows)[:, None, :, None], self.columns(columns)[:, None, None]

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return rule.visible(b, h, i, j) | rows[b, i] | columns[b, j]

        return Rule(
            visible,
            rule.possible | i.any(axis=-1) | j.any(axis=-1),
            rule.certain | i.all(axis=-1) | j.all(axis=-1),
        )
