"""What the numbers of a suite come to: said below its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from statistics import geometric_mean

from patterns import Random
from record import Record, workload_of
from suites import Quantity
from tables import (
    LABELS,
    NOTHING,
    SUBJECT,
    by_workload,
    cell,
    contests_of,
    labels_of,
    markdown,
    number,
    ordered,
    ratio,
    short,
    value,
)
from workloads import Workload, length_label, options_label

# How many times the time without the option it may take; a window, the time of its tiles; a block
# mask, so many times that of its density, and a launch's time more.
GOALS = {"dropout": 1.25, "bias": 1.5}
SPARSE_GOAL, SPARSE_GOAL_MS, ALL_BLOCKS_GOAL = 1.15, 0.02, 1.03
LISTS_GOAL_MS, LISTS_GOAL_MB = 5.0, 64.0

Rows = dict[tuple[str, str], Record]  # of one workload, by provider and direction


def means(records: list[Record], quantity: Quantity) -> str:
    """Write the geometric mean of the ratios to each peer, and the smallest of them."""
    head = ["ratio", "direction", "geometric mean", "smallest", "where", "cells"]
    lines = []
    for contest in contests_of(records):
        for direction in ordered(r["direction"] for r in records):
            found = {key: ratio(rows, contest, direction, quantity)
                     for key, rows in _rows(records).items()}
            cells = {key: one for key, one in found.items() if one is not None}
            if cells:
                where, smallest = min(cells.items(), key=lambda item: item[1])
                mean = geometric_mean(cells.values())
                lines.append([" : ".join(contest), short(direction), number(mean),
                              number(smallest), where[0], str(len(cells))])
    return f"Ratios over all lines:\n\n{markdown(head, lines)}" if lines else ""


def dtypes(records: list[Record], quantity: Quantity) -> str:
    """Write how each provider's float16 compares with its bfloat16 of the same sizes."""
    head = ["provider", "direction", "geometric mean", "smallest", "where", "largest", "where"]
    found = {(r["provider"], r["direction"], r["workload"], r["dtype"]): value(r, quantity)
             for r in records}
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for (provider, direction, name, dtype), half in found.items():
        other = found.get((provider, direction, name, "bfloat16"))
        if dtype == "float16" and half and other:
            ratios.setdefault((provider, direction), {})[name] = half / other
    lines = []
    for (provider, direction), cells in ratios.items():
        ends = (choose(cells.items(), key=lambda item: item[1]) for choose in (min, max))
        mean = number(geometric_mean(cells.values()))
        lines.append([provider, short(direction), mean,
                      *(text for name, one in ends for text in (number(one), name))])
    title = f"{quantity.unit}, float16 : bfloat16"
    return f"{title}:\n\n{markdown(head, lines)}" if lines else ""


def lead(records: list[Record], quantity: Quantity) -> str:
    """Write the length from which on cuflash is ahead of each peer at every length measured."""
    contests = contests_of(records)
    directions = ordered(r["direction"] for r in records)
    labels = [label for label in labels_of(records) if label not in ("length", "options")]
    groups: dict[tuple[str, ...], list[Rows]] = {}
    for rows in _rows(records).values():
        first = next(iter(rows.values()))
        groups.setdefault(tuple(LABELS[label](first) for label in labels), []).append(rows)
    lines = []
    for name, group in groups.items():
        cells = [
            " / ".join(_first_ahead(group, contest, d, quantity) for d in directions)
            for contest in contests
        ]
        lines.append([*name, *cells])
    head = [*labels, *(" : ".join(contest) for contest in contests)]
    title = f"Length from which on {SUBJECT} is ahead, {short(*directions)}"
    return f"{title}:\n\n{markdown(head, lines)}"


def _first_ahead(
    group: list[Rows], contest: tuple[str, str], direction: str, quantity: Quantity
) -> str:
    """Name the shortest length of those that end the group and are all won."""
    shortest = "none"
    for rows in reversed(group):  # sorted by length
        one = ratio(rows, contest, direction, quantity)
        if one is None:
            continue
        if one <= 1:
            break
        shortest = length_label(next(iter(rows.values()))["kv_len"])
    return shortest


def per_token(records: list[Record], quantity: Quantity) -> str:
    """Write cuflash's bytes per token, which are the same at every length if memory is linear."""
    parts = []
    for dtype in ordered(r["dtype"] for r in records):
        for direction in ordered(r["direction"] for r in records):
            found = {
                r["q_len"]: r[quantity.key] / (r["batch"] * r["q_len"]) for r in records
                if (r["provider"], r["dtype"], r["direction"]) == (SUBJECT, dtype, direction)
                and r[quantity.key] is not None
            }
            if found:
                span = f"{length_label(min(found))} to {length_label(max(found))}"
                amounts = ordered(f"{f(found.values()):,.0f}" for f in (min, max))
                parts.append(f"{dtype} {short(direction)} {' to '.join(amounts)} "
                             f"({span})")
    return f"Bytes per token of {SUBJECT}: {'; '.join(parts)}." if parts else ""


def costs(records: list[Record], quantity: Quantity) -> str:
    """Write what each option costs: the time with it over the time without it."""
    providers = ordered(r["provider"] for r in records)
    directions = ordered(r["direction"] for r in records)
    labels = labels_of(records)
    groups = _rows(records).values()
    by_sizes = {_bare(rows): rows for rows in groups if not _has_options(rows)}
    lines = []
    for rows in groups:
        base = by_sizes.get(_bare(rows))
        if base is None or not _has_options(rows):
            continue
        first = next(iter(rows.values()))
        cells = [cell([_share(rows, base, p, d, quantity) for d in directions]) for p in providers]
        goals = cell([_goal(rows, base, d) for d in directions])
        lines.append([*(LABELS[label](first) for label in labels), *cells, goals])
    head = [*labels, *providers, "at most"]
    title = f"Time with the option over time without it, {short(*directions)}"
    return f"{title}:\n\n{markdown(head, lines)}"


def _rows(records: list[Record]) -> dict[tuple[str, str], Rows]:
    return {key: {(r["provider"], r["direction"]): r for r in rows}
            for key, rows in by_workload(records).items()}


def _workload(rows: Rows) -> Workload:
    return workload_of(next(iter(rows.values())))


def _has_options(rows: Rows) -> bool:
    return bool(options_label(_workload(rows)))


def _bare(rows: Rows) -> Workload:
    """Take the options and the name away: what is left tells which workloads to compare."""
    return replace(_workload(rows), name="", dropout=0.0, bias=False, window=None, mask=None)


def _share(
    rows: Rows, base: Rows, provider: str, direction: str, quantity: Quantity
) -> float | None:
    with_it, without = (value(part.get((provider, direction)), quantity) for part in (rows, base))
    return with_it / without if with_it and without else None


def _goal(rows: Rows, base: Rows, direction: str) -> float | None:
    """Find what an option may cost; a window, by the tiles of cuflash's kernel."""
    workload = _workload(rows)
    if workload.mask:
        return _most_of_dense(workload.visible_share, base.get((SUBJECT, direction)))
    if not workload.window:
        return GOALS["dropout" if workload.dropout else "bias"]
    counts = []
    for part in (rows, base):
        tile = part.get((SUBJECT, direction), {}).get("tile")
        if tile is None:
            return None
        counts.append(_workload(part).visible_tiles(*tile))
    return counts[0] / counts[1]


def _most_of_dense(share: float, dense: Record | None) -> float | None:
    """Find the share of the dense time that a block mask may take."""
    if dense is None or not dense["device_ms"]:
        return None
    if share == 1:
        return ALL_BLOCKS_GOAL
    return SPARSE_GOAL * share + SPARSE_GOAL_MS / dense["device_ms"]


def densities(records: list[Record], quantity: Quantity) -> str:
    """Write the time of drawn blocks over that of the density, how many hold the aim, the worst."""
    directions = ordered(r["direction"] for r in records)
    groups = _rows(records).values()
    dense = {_bare(rows): rows for rows in groups if not _has_options(rows)}
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    excess: dict[str, float] = {}  # of the time over the aim
    for rows in groups:
        workload, base = _workload(rows), dense.get(_bare(rows))
        if not isinstance(workload.mask, Random) or base is None:
            continue
        share, cells = workload.visible_share, []
        for direction in directions:
            taken = _share(rows, base, SUBJECT, direction, quantity)
            most = _goal(rows, base, direction)
            cells.append(None if taken is None else taken / share)
            if taken is not None and most is not None:
                excess[f"{workload.name} {short(direction)}"] = taken / most
        name = (str(workload.head_dim), length_label(workload.q_len), str(workload.mask.block_size))
        density = str(Fraction(workload.mask.density))
        whole = [value(base.get((SUBJECT, each)), quantity) for each in directions]
        lines.setdefault(name, {f"dense, {quantity.unit}": cell(whole)})[density] = cell(cells)
    if not excess:
        return ""
    columns = ordered(density for cells_of in lines.values() for density in cells_of)
    head = ["head_dim", "length", "block", *columns]
    body = [[*name, *(found.get(one, NOTHING) for one in columns)] for name, found in lines.items()]
    worst = max(excess, key=lambda name: excess[name])
    held = sum(one <= 1 for one in excess.values())
    return (
        f"Time over density times the time without a mask, {short(*directions)}:\n\n"
        f"{markdown(head, body)}\n\n"
        f"At most {SPARSE_GOAL} of density times dense and {SPARSE_GOAL_MS * 1e3:.0f} µs, and "
        f"{ALL_BLOCKS_GOAL} of dense at density 1: held by {held} of {len(excess)}; the worst, "
        f"{worst}, takes {number(excess[worst])} of that."
    )


def built(records: list[Record], quantity: Quantity) -> str:
    """Write what the lists of both directions take together."""
    parts = []
    for rows in by_workload(records).values():
        found = [r for r in rows if r["direction"] != "mask" and r["device_ms"] is not None]
        if found:
            time, size = (sum(r[key] for r in found) for key in ("device_ms", "kept_bytes"))
            label = options_label(workload_of(rows[0]))
            parts.append(f"{label}: {number(time)} ms, {number(size * 1e-6)} MB")
    aim = f"at most {LISTS_GOAL_MS:g} ms and {LISTS_GOAL_MB:g} MB wanted"
    return f"The lists of both directions together ({aim}): {'; '.join(parts)}." if parts else ""


ALL: dict[str, Callable[[list[Record], Quantity], str]] = {
    "means": means, "dtypes": dtypes, "lead": lead, "per_token": per_token, "costs": costs,
    "densities": densities, "built": built,
}
