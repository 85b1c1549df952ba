"""Bytes between the GPU and its memory in cuflash's forward kernel, counted by Nsight Compute.

    ncu ... python benchmarks/traffic.py WORKLOADS    started by `measure`: one launch for each

Caches are flushed before each launch (``--cache-control all``), so that every byte of the inputs
comes from memory. What is written and still in the L2 cache when the kernel ends is not counted, at
most the size of that cache. Clocks are left alone (``--clock-control none``): counts don't need
them.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inputs import explained, make_inputs
from measure import PROCESS_LIMIT_S, Measurement
from workloads import Workload, from_fields

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}
NCU = (
    "ncu", "--csv", "--print-units", "base", "--metrics", f"{READ},{WRITTEN}",
    "--kernel-name", "regex:^attention_forward", "--cache-control", "all",
    "--clock-control", "none", "--target-processes", "all",
)  # fmt: skip
NOTE = "counted by ncu, with cold caches"


class NoCounters(Exception):
    """There is no ncu, or it does not count."""


def measure(workloads: list[Workload]) -> list[Measurement]:
    """Count what each forward kernel reads and writes, all in one process under ncu.

    Raises
    ------
    NoCounters
        There is nothing to count with.
    """
    if shutil.which("ncu") is None:
        raise NoCounters("no traffic without ncu (Nsight Compute): it is not on the PATH")
    asked = json.dumps([asdict(workload) for workload in workloads])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [*NCU, "--log-file", str(log), sys.executable, str(Path(__file__).resolve())]
        done = subprocess.run([*command, asked], capture_output=True, text=True,
                              timeout=PROCESS_LIMIT_S, env={**os.environ, "LC_ALL": "C"})
        text = log.read_text(encoding="utf-8") if log.exists() else ""
    launches = parse(text)
    if done.returncode or len(launches) != len(workloads):
        words = [line for line in f"{text}\n{done.stderr}".splitlines() if line.strip()]
        reason = next((line for line in words if "==ERROR==" in line), (words or ["no output"])[-1])
        raise NoCounters(f"ncu saw {len(launches)} of {len(workloads)} launches: {reason}")
    return [
        Measurement(moved_bytes=found[READ] + found[WRITTEN], read_bytes=found[READ],
                    written_bytes=found[WRITTEN], kernel=found["kernel"], note=NOTE)
        for found in launches
    ]


def parse(text: str) -> list[dict[str, Any]]:
    """Read ncu's CSV, one row for each launch and metric, with lines of its own around it.

    Returns
    -------
    list of dict
        For each launch, in order: the bytes of both metrics, and "kernel". A launch without both
        is left out.
    """
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines[first:] if line.startswith('"')):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        name, unit = row["Metric Name"], row["Metric Unit"]
        if name in (READ, WRITTEN) and unit in UNITS:
            launch[name] = round(float(row["Metric Value"].replace(",", "")) * UNITS[unit])
    return [launch for launch in launches.values() if {READ, WRITTEN} <= launch.keys()]


def count(workload: Workload, arch: int) -> dict[str, Measurement]:
    """Count without measuring.

    Returns
    -------
    dict
        "least": every input read and every output written once. "model" and "plain": what
        `cuflash.explain` gives for this architecture, by the model of Dao et al. (2022): keys and
        values read once for each tile of queries; and plain attention, which writes and reads the
        scores and their softmax.
    """
    found = explained(workload, arch)
    counts = {"least": workload.bytes_moved("forward"), "model": found.forward_bytes,
              "plain": found.plain_bytes}
    return {name: Measurement(moved_bytes=moved) for name, moved in counts.items()}


def launch(workloads: Iterable[Workload]) -> None:
    """Run each forward pass once, for ncu to see."""
    import cupy
    import providers

    cuflash = providers.ALL["cuflash"]
    for workload in workloads:
        inputs = make_inputs(workload, "cuda")
        cuflash.prepare(inputs, cuflash.load(inputs), "forward").call()
        cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    launch(from_fields(fields) for fields in json.loads(sys.argv[1]))
