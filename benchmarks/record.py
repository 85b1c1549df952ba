"""The records of results, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from measure import Measurement
from workloads import PASSES, Workload, from_fields

Record = dict[str, Any]
KEYS = (
    "provider", "provider_version", "kernel", "workload", "direction", "dtype", "batch", "q_len",
    "kv_len", "q_heads", "kv_heads", "head_dim", "causal", "dropout", "bias", "window", "mask",
    "outliers", "tile", "device_ms", "tflops", "gbps", "max_error", "rms_error", "peak_bytes",
    "allowed_bytes", "kept_bytes", "moved_bytes", "read_bytes", "written_bytes", "note", "regime",
    "gpu", "commit", "date",
)
# What records hold that were made before the key was.
MISSING: Record = {**dict.fromkeys(KEYS), "dropout": 0.0, "bias": False, "outliers": 0.0}


@dataclass(frozen=True)
class Origin:
    """Where and when a record was made.

    Attributes
    ----------
    gpu : str
        The GPU, or the processor with its number of cores.
    commit : str
    date : str
        ISO format, UTC.
    """

    gpu: str
    commit: str
    date: str


def make_record(
    workload: Workload,
    direction: str,
    provider: str,
    version: str,
    found: Measurement,
    origin: Origin,
) -> Record:
    """Bring a measurement into the form of the result files, with exactly the keys of `KEYS`."""
    record: Record = {"provider": provider, "provider_version": version, "direction": direction}
    record |= asdict(workload) | asdict(found) | asdict(origin)
    record["workload"] = record.pop("name")
    record["device_ms"] = _rounded(found.device_ms, 5)
    for key in ("max_error", "rms_error"):
        record[key] = _rounded(record[key], 3)
    record["tflops"] = record["gbps"] = None
    if found.device_ms and direction in PASSES:
        seconds = found.device_ms * 1e-3
        record["tflops"] = _rounded(workload.flops(direction) / seconds * 1e-12, 4)
        record["gbps"] = _rounded(workload.bytes_moved(direction) / seconds * 1e-9, 4)
    return {key: record[key] for key in KEYS}


def workload_of(record: Record) -> Workload:
    """Make the workload of a record again."""
    keys = {"name": "workload"}
    return from_fields({f.name: record[keys.get(f.name, f.name)] for f in fields(Workload)})


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def load(path: Path) -> list[Record]:
    """Read a file of results; a missing file has none."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [MISSING | record for record in found]


def merge(path: Path, records: Iterable[Record]) -> None:
    """Write records into a file, one a line; each replaces the earlier one of the same case."""
    merged = {_case(record): record for record in [*load(path), *records]}
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in merged.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    unfinished.replace(path)


def _case(record: Record) -> tuple[str, ...]:
    return tuple(record[key] for key in ("provider", "workload", "direction", "dtype"))
