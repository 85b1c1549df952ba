"""A picture of a block mask."""

from __future__ import annotations

from typing import Any

from cuflash._blocks import Blocks
from cuflash._errors import integer, reject
from cuflash._interop import to_host

_COLOURS = {"absent": "#ffffff", "partial": "#9ecae1", "full": "#08519c"}  # in the order of states


def plot(blocks: Blocks, batch: int, head: int, ax: Any) -> Any:
    """Draws the blocks of one batch element and head; see :meth:`cuflash.BlockMask.plot`."""
    _, _, q_len, kv_len = blocks.grid.shape
    (rows, columns), counts = blocks.grid.block_size, blocks.grid.counts
    for name, number, count in (("batch", batch, counts[0]), ("head", head, counts[1])):
        if integer(name, number) >= count:
            raise reject(ValueError, f"{name} must be below {count}", number)
    try:
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib.") from error
    if ax is None:
        _, ax = pyplot.subplots()
    ax.imshow(
        to_host(blocks.states[batch, head]), colors.ListedColormap(list(_COLOURS.values())),
        vmin=0, vmax=2, interpolation="nearest", aspect="equal",
        extent=(0, counts[3] * columns, counts[2] * rows, 0),
    )  # fmt: skip
    ax.set(xlabel="key", ylabel="query", xlim=(0, max(1, kv_len)), ylim=(max(1, q_len), 0))
    shown = [patches.Patch(facecolor=colour, edgecolor="black", label=name)
             for name, colour in _COLOURS.items()]  # fmt: skip
    ax.legend(handles=shown, loc="upper left", bbox_to_anchor=(1.02, 1))
    return ax
