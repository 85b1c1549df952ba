"""Records as Markdown tables: one row a workload, one column a provider, then the ratios."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from record import Record
from suites import Quantity
from workloads import length_label, mask_label

SUBJECT = "cuflash"
NOTHING = "–"
MOST_PLACES = 4  # named in a remark; more are counted
SHORT = {"forward": "fwd", "backward": "bwd"}
LABELS: dict[str, Any] = {
    "dtype": lambda r: r["dtype"],
    "head_dim": lambda r: str(r["head_dim"]),
    "mask": lambda r: mask_label(r["causal"]),
    "queries": lambda r: length_label(r["q_len"]),
    "keys": lambda r: length_label(r["kv_len"]),
    "length": lambda r: length_label(r["kv_len"]),
}


def suite_text(records: list[Record], quantities: Iterable[Quantity]) -> str:
    """Write all tables of a suite, with where they come from."""
    parts = [table(records, quantity) for quantity in quantities]
    return "\n\n".join([*parts, *_origin(records), *_remarks(records)]) + "\n"


def table(records: list[Record], quantity: Quantity) -> str:
    """Write one quantity of all records as a table, best peer and worst alike.

    Ratios are turned so that above 1 is good for cuflash.
    """
    providers = ordered(r["provider"] for r in records)
    providers.sort(key=lambda name: not name.startswith(SUBJECT))
    directions = ordered(r["direction"] for r in records)
    labels = _varying(records)
    contests = [(ours, peer) for ours in providers if ours.startswith(SUBJECT)
                for peer in providers if not peer.startswith(SUBJECT)]
    limited = quantity.key == "peak_bytes" and any(_is_limited(r) for r in records)
    head = [*labels, *providers, *(["allowed"] if limited else [])]
    head += [f"{ours} : {peer}" for ours, peer in contests]
    lines = [_line(head), _line(["---"] * len(head))]
    for rows in by_workload(records).values():
        found = {(r["provider"], r["direction"]): r for r in rows}
        cells = [LABELS[label](rows[0]) for label in labels]
        for provider in providers:
            cells.append(_cell([value(found.get((provider, d)), quantity) for d in directions]))
        if limited:
            cells.append(_cell([_allowed(rows, d, quantity) for d in directions]))
        for contest in contests:
            cells.append(_cell([ratio(found, contest, d, quantity) for d in directions]))
        lines.append(_line(cells))
    unit = quantity.unit + ", " + " / ".join(SHORT.get(d, d) for d in directions)
    if contests:
        unit += f"; ratios above 1 are in favour of {SUBJECT}"
    return f"{unit}:\n\n" + "\n".join(lines)


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
    """Group records by workload and dtype, sorted by head_dim, mask and length."""
    groups: dict[tuple[str, str], list[Record]] = {}
    sizes = ("head_dim", "causal", "kv_len", "q_len")
    for record in sorted(records, key=lambda r: tuple(r[size] for size in sizes)):
        groups.setdefault((record["workload"], record["dtype"]), []).append(record)
    return groups


def ordered(values: Iterable[Any]) -> list[Any]:
    """Drop repetitions and keep the order."""
    return list(dict.fromkeys(values))


def number(amount: float) -> str:
    """Write three digits, and all digits of what is 1000 or more."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def _varying(records: list[Record]) -> list[str]:
    """Choose the columns that tell the rows apart, and always the length."""
    names = [n for n in ("dtype", "head_dim", "mask")
             if len({LABELS[n](r) for r in records}) > 1]
    square = all(r["q_len"] == r["kv_len"] for r in records)
    return names + (["length"] if square else ["queries", "keys"])


def _is_limited(record: Record) -> bool:
    return record["provider"] == SUBJECT and record["allowed_bytes"] is not None


def _allowed(rows: list[Record], direction: str, quantity: Quantity) -> float | None:
    allowed = [r["allowed_bytes"] for r in rows if r["direction"] == direction]
    return next((a * quantity.factor for a in allowed if a is not None), None)


def _cell(amounts: list[float | None]) -> str:
    if all(a is None for a in amounts):
        return NOTHING
    return " / ".join(NOTHING if a is None else number(a) for a in amounts)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _origin(records: list[Record]) -> list[str]:
    """Name the hardware, the versions, the commits, the dates and the largest errors."""
    errors = []
    for provider in ordered(r["provider"] for r in records):
        for dtype in ordered(r["dtype"] for r in records):
            found = [r["max_error"] for r in records
                     if (r["provider"], r["dtype"]) == (provider, dtype) and r["max_error"]]
            if found:
                errors.append(f"{provider} {max(found):.2g} ({dtype})")
    measured = [r for r in records if r["device_ms"] or r["peak_bytes"]]
    joined = [", ".join(ordered(r[key] for r in measured))
              for key in ("gpu", "provider_version", "commit", "date")]
    text = "{}; {}; commit {}; {}.".format(*joined)
    if errors:
        text += " Largest error of the sampled rows: " + ", ".join(errors) + "."
    return [text]


def _remarks(records: list[Record]) -> list[str]:
    """List the notes, each once for a provider, with the workloads where it holds."""
    notes: dict[str, list[str]] = {}
    for r in records:
        if r["note"]:
            place = f"{r['workload']} {SHORT.get(r['direction'], r['direction'])}"
            notes.setdefault(f"{r['provider']}: {r['note']}", []).append(place)
    lines = []
    for note, places in notes.items():
        few = ", ".join(ordered(places)) if len(places) <= MOST_PLACES else f"{len(places)} cases"
        lines.append(f"* {note} ({few})")
    return ["\n".join(lines)] if lines else []
