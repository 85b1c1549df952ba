"""``python -m cuflash compile``: a variant of each kind, built without a GPU, and judged."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from cuflash import _compile, _plan
from cuflash._tiles import spill_allowance
from cuflash._variants import variants

ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Report:
    """One variant compiled for one architecture: `seconds` it took and what came out."""

    arch: int
    plan: _plan.Plan
    seconds: float
    built: _compile.Build

    @property
    def faults(self) -> list[str]:
        """What must not be: spills beyond the allowance, messages of the assembler."""
        found = list(self.built.complaints)
        if self.built.spill_bytes > spill_allowance(self.plan.kernel):
            found.append(f"spills {self.built.spill_bytes} bytes")
        return found

    def __str__(self) -> str:
        names = dict(self.plan.constants)
        shape = f"{names['Element']} {names.get('HEAD_DIM', ''):>3}"
        features = "+".join(
            name[4:].lower() for name, value in names.items() if value is True and "HAS_" in name
        )
        return (
            f"sm_{self.arch} {self.plan.kernel:34} {shape:13} {self.seconds:5.2f} s  "
            f"{self.built.registers:3} registers  {self.built.spill_bytes:3} spilled  "
            f"{self.plan.shared_bytes / 1024:5.1f} KiB  {features}"
        )


def _build(job: tuple[int, _plan.Plan]) -> Report:
    arch, plan = job
    start = time.perf_counter()
    built = _compile.fill_cache(plan, arch)
    return Report(arch, plan, time.perf_counter() - start, built)


def reports(archs: list[int], kernel: str = "", jobs: int | None = None) -> Iterator[Report]:
    """Compiles the variants of all kernels whose name holds `kernel`, into the cache."""
    work = [(arch, plan) for arch in archs for plan in variants(arch) if kernel in plan.kernel]
    with ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        yield from pool.map(_build, work, chunksize=4)


def default_archs() -> list[int]:
    """The architectures of the supported ones that the installed NVRTC knows."""
    known = _compile.supported_archs()
    return [arch for arch in ARCHS if arch in known]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    text = "architectures to compile for, e.g. 90 for sm_90 (default: all that NVRTC knows)"
    parser.add_argument("--arch", type=int, nargs="+", help=text)
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument("--quiet", action="store_true", help="print faults and totals only")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 if a variant spills too much, or nothing can be compiled."""
    try:
        return _run(arguments)
    except (ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    done, faulty, start = [], 0, time.perf_counter()
    for report in reports(arguments.arch or default_archs(), arguments.kernel, arguments.jobs):
        done.append(report)
        faulty += bool(report.faults)
        if report.faults or not arguments.quiet:
            print(report, *report.faults, sep="  ", flush=True)
    if not done:
        print(f"No kernel's name holds {arguments.kernel!r}.", file=sys.stderr)
        return 1
    seconds = [report.seconds for report in done]
    spilled = sum(report.built.spill_bytes > 0 for report in done)
    print(
        f"{len(done)} variants for {len({report.arch for report in done})} architectures in "
        f"{time.perf_counter() - start:.0f} s: {sum(seconds) / len(seconds):.2f} s each (longest "
        f"{max(seconds):.2f} s), {spilled} spill, {faulty} faulty. "
        f"Kept in {_compile.cache_folder()}."
    )
    return int(faulty > 0)
