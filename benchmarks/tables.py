"""Records as Markdown tables: one row a workload, one column a provider, then the ratios."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from record import Record, workload_of
from suites import MEMORY, Quantity
from workloads import inputs_label, length_label, mask_label, options_label

SUBJECT = "cuflash"
BEST_PEER = "best peer"
NOTHING = "–"
LABELS: dict[str, Any] = {
    "dtype": lambda r: r["dtype"],
    "head_dim": lambda r: str(r["head_dim"]),
    "mask": lambda r: mask_label(r["causal"]),
    "inputs": lambda r: inputs_label(workload_of(r)),
    "heads per key head": lambda r: str(r["q_heads"] // r["kv_heads"]),
    "options": lambda r: options_label(workload_of(r)) or NOTHING,
    "queries": lambda r: length_label(r["q_len"]),
    "keys": lambda r: length_label(r["kv_len"]),
    "length": lambda r: length_label(r["kv_len"]),
}


def table(records: list[Record], *quantities: Quantity) -> str:
    """Write quantities of all records as a table, best peer and worst alike.

    Ratios are turned so that above 1 is good for cuflash.
    """
    providers = ordered(r["provider"] for r in records)
    providers.sort(key=lambda name: not name.startswith(SUBJECT))
    directions = ordered(r["direction"] for r in records)
    labels = labels_of(records)
    contests = contests_of(records)
    limited = quantities == (MEMORY,) and any(_is_limited(r) for r in records)
    head = [*labels, *providers, *(["allowed"] if limited else [])]
    head += [f"{ours} : {peer}" for ours, peer in contests]
    lines = []
    for rows in by_workload(records).values():
        found = {(r["provider"], r["direction"]): r for r in rows}
        cells = [LABELS[label](rows[0]) for label in labels]
        for provider in providers:
            cells.append(cell([value(found.get((provider, d)), q)
                               for q in quantities for d in directions]))
        if limited:
            cells.append(cell([_allowed(rows, d, MEMORY) for d in directions]))
        for contest in contests:
            cells.append(cell([ratio(found, contest, d, q)
                               for q in quantities for d in directions]))
        lines.append(cells)
    unit = f"{' / '.join(q.unit for q in quantities)}, {short(*directions)}"
    if contests:
        unit += f"; ratios above 1 are in favour of {SUBJECT}"
    return f"{unit}:\n\n{markdown(head, lines)}"


def with_best_peer(records: list[Record], quantity: Quantity) -> list[Record]:
    """Add the record of the best peer of each case once more, as of a provider of its own."""
    cases: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if not record["provider"].startswith(SUBJECT) and value(record, quantity) is not None:
            case = tuple(record[key] for key in ("workload", "dtype", "direction"))
            cases.setdefault(case, []).append(record)
    choose = max if quantity.more_is_better else min
    best = [choose(found, key=lambda r: r[quantity.key]) for found in cases.values()]
    return [*records, *({**record, "provider": BEST_PEER} for record in best)]


def markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    """Write a table of Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def contests_of(records: list[Record]) -> list[tuple[str, str]]:
    """Pair cuflash, in each of its forms, with every peer."""
    providers = ordered(r["provider"] for r in records)
    return [(ours, peer) for ours in providers if ours.startswith(SUBJECT)
            for peer in providers if not peer.startswith(SUBJECT)]


def value(record: Record | None, quantity: Quantity) -> float | None:
    """Read a quantity in the unit that is shown."""
    if record is None or record[quantity.key] is None:
        return None
    return record[quantity.key] * quantity.factor


def ratio(
    found: dict[tuple[str, str], Record],
    contest: tuple[str, str],
    direction: str,
    quantity: Quantity,
) -> float | None:
    """Compare two providers: above 1, the first is faster or smaller."""
    ours, theirs = (value(found.get((name, direction)), quantity) for name in contest)
    if not ours or not theirs:
        return None
    return ours / theirs if quantity.more_is_better else theirs / ours


def by_workload(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group records by workload and dtype, sorted by dtype, head_dim, mask and length."""
    groups: dict[tuple[str, str], list[Record]] = {}
    sizes = ("dtype", "head_dim", "causal", "kv_len", "q_len")
    for record in sorted(records, key=lambda r: tuple(r[size] for size in sizes)):
        groups.setdefault((record["workload"], record["dtype"]), []).append(record)
    return groups


def ordered(values: Iterable[Any]) -> list[Any]:
    """Drop repetitions and keep the order."""
    return list(dict.fromkeys(values))


def short(*directions: str) -> str:
    """Name directions as a cell holds their numbers: fwd / bwd."""
    return " / ".join({"forward": "fwd", "backward": "bwd"}.get(d, d) for d in directions)


def number(amount: float) -> str:
    """Write three digits, and all digits of what is 1000 or more."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def labels_of(records: list[Record]) -> list[str]:
    """Choose the columns that tell the rows apart, and always the length."""
    names = [n for n in ("dtype", "head_dim", "mask", "inputs", "heads per key head")
             if len({LABELS[n](r) for r in records}) > 1]
    options = ["options"] if any(LABELS["options"](r) != NOTHING for r in records) else []
    square = all(r["q_len"] == r["kv_len"] for r in records)
    return [*names, *(["length"] if square else ["queries", "keys"]), *options]


def _is_limited(record: Record) -> bool:
    return record["provider"] == SUBJECT and record["allowed_bytes"] is not None


def _allowed(rows: list[Record], direction: str, quantity: Quantity) -> float | None:
    allowed = [r["allowed_bytes"] for r in rows if r["direction"] == direction]
    return next((a * quantity.factor for a in allowed if a is not None), None)


def cell(amounts: list[float | None]) -> str:
    """Write the numbers of all directions into one cell."""
    if all(a is None for a in amounts):
        return NOTHING
    return " / ".join(NOTHING if a is None else number(a) for a in amounts)
