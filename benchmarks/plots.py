"""Plots of a file of results, as SVG."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from patterns import Random
from record import Record, workload_of
from suites import Quantity
from tables import by_workload, ordered, value
from workloads import inputs_label, length_label, mask_label, options_label

COLOURS = {
    "cuflash": "#c1121f", "cuflash-torch": "#f28482", "plain": "#8d99ae", "plain-torch": "#495057",
    "efficient": "#2a6f97", "cudnn": "#2a9d8f", "fa2": "#8338ec", "sdpa": "#e09f3e",
    "flex": "#2a6f97", "fa3": "#2a6f97", "fa4": "#e09f3e", "cuflash-graph": "#f4a261",
    "least": "#adb5bd", "model": "#2a9d8f",
}
LINES_FROM = 3  # so many lengths make a line; fewer make bars
MOST_NAMES = 4  # in the larger font below bars
WIDEST_SPAN = 100.0  # of the heights of bars, on a linear axis


def draw(records: list[Record], quantity: Quantity, path: Path, over: str = "length") -> bool:
    """Draw one quantity: a row of panels for each dtype and head_dim, a column for each direction.

    Over "density" there is a row for each length as well. Returns False if there is nothing to
    draw.
    """
    shown = [r for r in records if value(r, quantity) is not None]
    if not shown:
        return False
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cuflash"  # the same file from the same numbers
    from matplotlib import pyplot

    directions = ordered(r["direction"] for r in shown)
    keys = ("dtype", "head_dim", *(("kv_len",) if over == "density" else ()))
    kinds = ordered(tuple(r[key] for key in keys) for r in shown)
    draw_panel = _draw_over_density if over == "density" else _draw_panel
    size = (5.5 * len(directions), 0.6 + 3.2 * len(kinds))
    figure, axes = pyplot.subplots(
        len(kinds), len(directions), figsize=size, squeeze=False, layout="constrained"
    )
    figure.suptitle(shown[0]["gpu"], fontsize=11)
    for row, kind in zip(axes, kinds, strict=True):
        dtype, head_dim, *length = kind
        for axis, direction in zip(row, directions, strict=True):
            part = [r for r in shown if (*(r[key] for key in keys), r["direction"])
                    == (*kind, direction)]
            draw_panel(axis, part, quantity)
            title = [direction, dtype, f"head_dim {head_dim}", *map(length_label, length)]
            axis.set_title(", ".join(title), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _draw_panel(axis: Any, records: list[Record], quantity: Quantity) -> None:
    axis.set_ylabel(quantity.unit)
    axis.grid(axis="y", alpha=0.3)
    if not records:
        return
    single = [r for r in records if r["q_heads"] == r["kv_heads"]]  # grouped: no line for one point
    points = {(r["provider"], r["causal"], r["kv_len"]) for r in single}
    if len({r["kv_len"] for r in single}) >= LINES_FROM and len(points) == len(single):
        _draw_lines(axis, single, quantity)
    else:
        _draw_bars(axis, records, quantity)
    axis.legend(fontsize=8)


def _draw_lines(axis: Any, records: list[Record], quantity: Quantity) -> None:
    """Draw a line for each provider and mask over the length; causal beside full is dashed."""
    lengths = sorted({r["kv_len"] for r in records})
    masks = ordered(r["causal"] for r in records)
    for provider in ordered(r["provider"] for r in records):
        for causal in masks:
            found = {r["kv_len"]: value(r, quantity) for r in records
                     if (r["provider"], r["causal"]) == (provider, causal)}
            there = [length for length in lengths if length in found]
            label = f"{provider}, {mask_label(causal)}" if len(masks) > 1 else provider
            axis.plot(there, [found[length] for length in there],
                      "--" if causal and len(masks) > 1 else "-",
                      marker="o", markersize=3, color=COLOURS.get(provider), label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_label(length) for length in lengths])
    if not quantity.more_is_better:
        axis.set_yscale("log")
    axis.set_xlabel("keys")


def _draw_over_density(axis: Any, records: list[Record], quantity: Quantity) -> None:
    """Draw a line for each block size, and the time without a mask times the density."""
    lines: dict[int, dict[float, float]] = {}
    for record in records:
        mask, amount = workload_of(record).mask, value(record, quantity)
        if isinstance(mask, Random) and amount is not None:
            lines.setdefault(mask.block_size, {})[mask.density] = amount
    for block_size, found in sorted(lines.items()):
        axis.plot(*zip(*sorted(found.items())), marker="o", markersize=3,
                  label=f"blocks of {block_size}")
    densities = sorted({density for found in lines.values() for density in found})
    dense = next((value(r, quantity) for r in records if r["mask"] is None), None)
    if dense is not None:
        axis.plot(densities, [dense * density for density in densities], "--", color="#495057",
                  label="density x time without a mask")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(densities, [str(Fraction(density)) for density in densities])
    axis.set_xlabel("density")
    axis.set_ylabel(quantity.unit)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_bars(axis: Any, records: list[Record], quantity: Quantity) -> None:
    """Draw a group of bars for each workload."""
    groups = by_workload(records)
    providers = ordered(r["provider"] for r in records)
    width = 0.8 / len(providers)
    for n, provider in enumerate(providers):
        heights = [
            next((value(r, quantity) for r in rows if r["provider"] == provider), None) or 0.0
            for rows in groups.values()
        ]
        places = [i + (n - (len(providers) - 1) / 2) * width for i in range(len(groups))]
        axis.bar(places, heights, width, color=COLOURS.get(provider), label=provider)
    amounts = [value(r, quantity) or 0.0 for r in records]
    if max(amounts) > WIDEST_SPAN * min(amounts):
        axis.set_yscale("log")
    names = [_bar_name(rows[0]) for rows in groups.values()]
    axis.set_xticks(range(len(names)), names, fontsize=8 if len(names) <= MOST_NAMES else 6)


def _bar_name(record: Record) -> str:
    name = f"{length_label(record['kv_len'])} {mask_label(record['causal'])}"
    workload = workload_of(record)
    options = options_label(workload)
    if workload.outliers:
        options = f"{inputs_label(workload)} {options}"
    if record["q_heads"] != record["kv_heads"]:
        options = f"{record['q_heads']}/{record['kv_heads']} heads {options}"
    return f"{name}\n{options}"
