"""What README.md shows of a suite: tables, what they come to, and where they come from."""

from __future__ import annotations

import summaries
from record import Record
from suites import Quantity, Suite
from tables import ordered, short, table, with_best_peer

MOST_PLACES = 4  # named in a remark; more are counted


def suite_text(records: list[Record], suite: Suite) -> str:
    """Write all tables of a suite, with their summaries and where they come from."""
    first = suite.shown[0]
    compared = with_best_peer(records, first) if suite.best_peer else records
    arranged: dict[str, list[tuple[Quantity, ...]]] = {
        "each": [(quantity,) for quantity in suite.shown], "one": [suite.shown], "none": [],
    }  # fmt: skip
    parts = [suite.about]
    parts += [table(compared, *quantities) for quantities in arranged[suite.tables]]
    parts += [summaries.ALL[name](compared, first) for name in suite.summaries]
    parts += [*_origin(records), *_remarks(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(records: list[Record]) -> list[str]:
    """Name the hardware, the versions, the commits, the dates and the largest errors."""
    errors = []
    sampled = [r for r in records if r["max_error"] and r["rms_error"] is None]
    for provider in ordered(r["provider"] for r in sampled):
        for dtype in ordered(r["dtype"] for r in sampled):
            found = [r["max_error"] for r in sampled
                     if (r["provider"], r["dtype"]) == (provider, dtype)]
            if found:
                errors.append(f"{provider} {max(found):.2g} ({dtype})")
    amounts = ("device_ms", "rms_error", "peak_bytes", "kept_bytes", "moved_bytes")
    measured = [r for r in records if any(r[key] for key in amounts)]
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
            place = f"{r['workload']} {short(r['direction'])}"
            notes.setdefault(f"{r['provider']}: {r['note']}", []).append(place)
    lines = []
    for note, places in notes.items():
        few = ", ".join(ordered(places)) if len(places) <= MOST_PLACES else f"{len(places)} cases"
        lines.append(f"* {note} ({few})")
    return ["\n".join(lines)] if lines else []
