"""pytest-benchmark over the same providers, at sizes that are quick on a CPU.

    pytest benchmarks                       every provider that is here, NumPy or GPU
    pytest benchmarks -k "cuda and not plain"

The results that are committed come from `run.py`, whose clocks see the device's work alone; this
one keeps the providers honest, and compares versions through ``--benchmark-compare``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import machine
import providers
import pytest
import record
import report
import tables
from measure import Measurement, Subject
from provider import Provider, Skipped
from suites import SPEED, SUITES
from workloads import FLOAT32, SMOKE, Workload

ROUNDS = 5
LARGEST_ERROR = 1e-5  # float32, against rows in float64

PLACES = [
    pytest.param(device, provider, id=f"{device}-{provider.name}")
    for device in ("cpu", "cuda")
    for provider in providers.ALL.values()
    if device in provider.devices and "float32" in provider.dtypes
]


def _case(provider: Provider, subject: Subject, direction: str) -> Any:
    """Prepare a case, or skip the test where the provider can't be measured."""
    device = subject.inputs.device
    reason = provider.missing()
    if reason:
        pytest.skip(f"without {provider.name}: {reason}")
    try:
        return provider.prepare(subject.inputs, provider.load(subject.inputs), direction)
    except Skipped as skipped:
        pytest.skip(f"{provider.name} on {device}: {skipped}")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("workload", SMOKE, ids=lambda workload: workload.name)
@pytest.mark.parametrize(("device", "provider"), PLACES)
def test_attention(
    benchmark: Any, device: str, provider: Provider, workload: Workload, direction: str
) -> None:
    reason = machine.missing(device)
    if reason:
        pytest.skip(reason)
    subject = Subject.of(workload, device)

    with provider.active():
        case = _case(provider, subject, direction)

        def call() -> Any:
            result = case.call()
            machine.synchronize(device)
            return result

        result = benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["provider_version"] = provider.version(device)
    benchmark.extra_info["gpu"] = machine.machine_name(device)
    assert subject.error(case, result, direction) < LARGEST_ERROR


def test_papers_grid_has_the_papers_sizes() -> None:
    for workload in SUITES["papers"].workloads:
        assert workload.batch * workload.q_len == 16384
        assert workload.q_heads * workload.head_dim == 2048
    assert len(SUITES["papers"].workloads) == 36


def test_every_suite_names_known_providers_and_distinct_workloads() -> None:
    for suite in SUITES.values():
        assert set(suite.providers) <= set(providers.ALL)
        cases = [(workload.name, workload.dtype) for workload in suite.workloads]
        assert len(set(cases)) == len(cases)


def test_counts_of_a_workload() -> None:
    workload = FLOAT32[0]  # batch 8, length 2048, 32 heads of 64
    assert workload.flops("forward") == 4 * 8 * 32 * 2048 * 2048 * 64
    assert workload.flops("backward") == 2.5 * workload.flops("forward")
    matrix, lse = 16384 * 2048 * 4, 16384 * 32 * 4
    assert workload.bytes_moved("forward") == 4 * matrix + lse
    assert workload.bytes_moved("backward") == 8 * matrix + lse
    assert workload.allowed_bytes("forward") == matrix + lse
    assert workload.allowed_bytes("backward") == 5 * matrix + lse


def _record(provider: str, ms: float | None, direction: str = "forward") -> record.Record:
    origin = record.Origin("A GPU", "c0ffee", "2026-01-01")
    found = Measurement(device_ms=ms, max_error=1e-6)
    return record.make_record(FLOAT32[0], direction, provider, f"{provider} 1", found, origin)


def test_results_are_replaced_case_by_case(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a-gpu-float32.json"
    record.merge(path, [_record("cuflash", 2.0), _record("plain", 4.0)])
    record.merge(path, [_record("cuflash", 1.0)])
    found = record.load(path)
    assert [(r["provider"], r["device_ms"]) for r in found] == [("cuflash", 1.0), ("plain", 4.0)]
    assert all(tuple(r) == record.KEYS for r in found)


def test_table_shows_lost_and_failed_comparisons() -> None:
    records = [_record("cuflash", 2.0), _record("plain", 1.0), _record("cuflash", 1.0, "backward"),
               _record("plain", None, "backward")]
    text = tables.table(records, SPEED)
    assert text.splitlines()[-1].endswith("| 0.5 / – |")


def test_readme_is_changed_between_the_markers_only() -> None:
    text = "a <!-- benchmarks:x --> old <!-- /benchmarks:x --> b"
    changed = report.replace_between_markers(text, "x", r"new \1")
    assert changed == "a <!-- benchmarks:x -->\nnew \\1\n<!-- /benchmarks:x --> b"
    assert report.replace_between_markers(text, "y", "new") is None
