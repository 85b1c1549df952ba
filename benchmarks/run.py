"""Measure a suite and keep its results.

    python benchmarks/run.py float32
    python benchmarks/run.py cpu --output /tmp/results --only sdpa,plain 1k

The file is ``<gpu>-<suite>.json`` in the output folder. It is written after every case, and a case
that was measured before is replaced. The table of this run is printed last. The exit status is 1
if cuflash is absent or failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import machine
import page
import providers
import record
import tables
import traffic
from accuracy import Accuracy
from building import Building
from measure import BrokenDevice, Measurement, Subject, attempt, measure, measure_in_process
from provider import Provider
from record import Origin, Record
from suites import SUITES, Suite
from turns import measure_in_turns
from workloads import Workload

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Finding:
    """A measurement, and what was measured."""

    workload: Workload
    provider: str
    version: str
    direction: str
    found: Measurement


@dataclass(frozen=True)
class Run:
    """A suite on one machine, with the words that select its cases."""

    suite: Suite
    device: str
    only: tuple[str, ...]
    providers: tuple[Provider, ...]

    def directions(self, workload: Workload, provider: Provider) -> list[str]:
        """Choose the directions of a workload that are wanted of a provider."""
        names = {d: f"{workload.name}-{workload.dtype}-{provider.name}-{d}"
                 for d in self.suite.directions}
        return [d for d, name in names.items() if all(
            any(choice in name for choice in word.split(",")) for word in self.only)]


def present(suite: Suite, device: str) -> tuple[Provider, ...]:
    """Choose the providers that are here, and say why the others are not."""
    found = []
    for name in suite.providers:
        provider = providers.ALL[name]
        reason = provider.missing()
        if device not in provider.devices:
            reason = f"not on {device}"
        if reason:
            print(f"without {name}: {reason}", flush=True)
        else:
            found.append(provider)
    return tuple(found)


def measure_all(run: Run) -> Iterator[Finding]:
    """Measure all workloads, one after the other."""
    if run.suite.method == "traffic":
        yield from measure_traffic(run)
        return
    for workload in run.suite.workloads:
        for provider, direction, found in measure_workload(run, workload):
            version = provider.version(run.device)
            yield Finding(workload, provider.name, version, direction, found)


def measure_traffic(run: Run) -> Iterator[Finding]:
    """Measure the bytes that cuflash moves, in one process, and count those of others beside it."""
    for provider in run.providers:
        chosen = [w for w in run.suite.workloads if run.directions(w, provider)]
        version = provider.version(run.device)
        for workload, found in zip(chosen, traffic.measure(chosen) if chosen else []):
            beside = traffic.count(workload, machine.architecture())
            for name, one in {provider.name: found, **beside}.items():
                yield Finding(workload, name, version, "forward", one)


def measure_workload(
    run: Run, workload: Workload
) -> Iterator[tuple[Provider, str, Measurement]]:
    """Measure one workload by every provider, one after the other."""
    wanted = [(p, run.directions(workload, p)) for p in run.providers]
    cases = [(provider, direction) for provider, chosen in wanted for direction in chosen]
    if run.suite.method == "build":
        building = Building(workload, run.device)
        for provider, direction in cases:
            yield provider, direction, attempt(run.device, building.measure, direction)
    elif run.suite.method == "error":
        accuracy = Accuracy(workload, run.device)
        for provider, direction in cases:
            yield provider, direction, attempt(run.device, accuracy.measure, provider, direction)
    elif run.suite.method == "process":
        for provider, direction in cases:
            yield provider, direction, attempt(
                run.device, measure_in_process, provider.name, workload, direction)
    elif run.suite.method == "turns" and cases:
        yield from _measure_in_turns(run, workload, cases)
    elif cases:
        subject = Subject.of(workload, run.device)
        for provider, directions in wanted:
            if directions:
                yield from _measure_provider(run, provider, subject, directions)
            machine.release_memory(run.device)


def _measure_in_turns(
    run: Run, workload: Workload, cases: list[tuple[Provider, str]]
) -> Iterator[tuple[Provider, str, Measurement]]:
    subject = Subject.of(workload, run.device)
    for direction in tables.ordered(direction for _, direction in cases):
        together = [provider for provider, each in cases if each == direction]
        found = measure_in_turns(subject, together, direction)
        for provider in together:
            yield provider, direction, found[provider.name]
        machine.release_memory(run.device)


def _measure_provider(
    run: Run, provider: Provider, subject: Subject, directions: list[str]
) -> Iterator[tuple[Provider, str, Measurement]]:
    loaded: list[Any] = []  # by the first case, so that a failure there is a finding too

    def one(direction: str) -> Measurement:
        if not loaded:
            loaded.append(provider.load(subject.inputs))
        return measure(run.suite.method, provider, subject, loaded[0], direction)

    with provider.active():
        for direction in directions:
            yield provider, direction, attempt(run.device, one, direction)
            machine.release_memory(run.device)


def case_line(found: Record) -> str:
    """Write one record as a line of the log."""
    words = [f"{found['workload']} {found['dtype']} {found['provider']} {found['direction']}:"]
    for key, form in (("device_ms", "{:.4g} ms"), ("tflops", "{:.3g} TFLOP/s"),
                      ("peak_bytes", "{:,} bytes"), ("kept_bytes", "{:,} bytes kept"),
                      ("moved_bytes", "{:,} bytes moved"),
                      ("max_error", "error {:.2g}"), ("rms_error", "RMS error {:.2g}"),
                      ("kernel", "{}"), ("regime", "{}"), ("note", "{}")):
        if found[key] is not None:
            words.append(form.format(found[key]))
    return " ".join(words)


def measure_suite(run: Run, origin: Origin, path: Path) -> tuple[list[Record], bool]:
    """Measure all cases, writing each into the file. Returns the records, and whether all is well.

    A failure of a peer is no failure of the run; a failure of cuflash is.
    """
    records: list[Record] = []
    well = True
    try:
        for one in measure_all(run):
            made = record.make_record(
                one.workload, one.direction, one.provider, one.version, one.found, origin)
            records.append(made)
            record.merge(path, [made])
            print(case_line(made), flush=True)
            failed = (one.found.note or "").startswith("failed")
            well &= not (failed and one.provider.startswith("cuflash"))
    except (BrokenDevice, traffic.NoCounters) as failure:
        print(f"the run ends here: {failure}", flush=True)
        well = False
    return records, well


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD",
                        help="cases whose workload-dtype-provider-direction holds every word; "
                             "commas inside a word mean or")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="instead of the suite's own")
    parser.add_argument("--commit", help="for the records, where there is no git")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; see the head of this file."""
    options = parse(arguments)
    suite = SUITES[options.suite]
    device = options.device or suite.device
    reason = machine.missing(device)
    if reason:
        print(reason, file=sys.stderr)
        return 1
    if machine.load_warning():
        print(machine.load_warning(), flush=True)
    start = perf_counter()
    name = machine.machine_name(device)
    today = datetime.now(timezone.utc).date().isoformat()
    origin = Origin(name, options.commit or machine.commit(), today)
    run = Run(suite, device, tuple(options.only), present(suite, device))
    path = options.output / f"{machine.file_label(name)}-{options.suite}.json"
    records, well = measure_suite(run, origin, path)
    if records:
        print("\n" + page.suite_text(records, suite))
    print(f"{len(records)} cases in {perf_counter() - start:.0f} s, written to {path}")
    return 0 if well and any(p.name == "cuflash" for p in run.providers) else 1


if __name__ == "__main__":
    sys.exit(main())
