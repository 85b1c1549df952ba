"""pytest-benchmark over the same providers, at sizes that are quick on a CPU.

    pytest benchmarks                       every provider that is here, NumPy or GPU
    pytest benchmarks -k "cuda and not plain"

The results that are committed come from `run.py`, whose clocks see the device's work alone; this
one keeps the providers honest, and compares versions through ``--benchmark-compare``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import inputs
import machine
import numpy as np
import page
import plain
import plots
import providers
import pytest
import record
import report
import summaries
import tables
from measure import Measurement, Subject
from provider import Provider, Skipped
from suites import MEMORY, MILLISECONDS, SPEED, SUITES
from workloads import FLOAT32, OPTIONS, PAPERS, SMOKE, Workload, from_fields, optional, square

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


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
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
    error = subject.error(provider, case, result, direction)
    assert error is None or error < LARGEST_ERROR
    assert (error is None) == (workload.dropout > 0 and not provider.replays_dropout)


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


@pytest.mark.parametrize("workload", SMOKE, ids=lambda workload: workload.name)
def test_visible_keys_agree_with_the_matrix(workload: Workload) -> None:
    w = workload
    seen = plain.visible(np, w)
    seen = np.ones((w.q_len, w.kv_len), bool) if seen is None else seen
    for i in range(w.q_len):
        assert np.flatnonzero(seen[i]).tolist() == list(w.visible_keys(i))
    tiles = [seen[m : m + 48, n : n + 32].any()
             for m in range(0, w.q_len, 48) for n in range(0, w.kv_len, 32)]
    assert w.visible_tiles(48, 32) == sum(tiles)


def test_options_count() -> None:
    base = square("x", 2, 1024, 4, 64, "bfloat16", True)
    window, bias = optional(base, window=(256, 0)), optional(base, bias=True)
    assert window.name == "x-window"
    seen = sum(min(i + 1, 257) for i in range(1024)) * 2 * 4
    assert window.flops("forward") == pytest.approx(4 * seen * 64)
    assert bias.bytes_moved("both") == base.bytes_moved("both") + 2 * 4 * 1024 * 1024
    assert bias.flops("both") == 3.5 * base.flops("forward")


def test_plain_with_cuflash_dropout_is_the_truth() -> None:
    import cuflash

    workload = next(w for w in SMOKE if w.dropout)
    subject = Subject.of(workload, "cpu")
    w = workload
    keep = cuflash.dropout_mask(w.batch, w.q_heads, w.q_len, w.kv_len, w.dropout, inputs.SEED)
    q, k, v, dout = providers.ALL["plain"].load(subject.inputs)
    added = plain.added_scores(np, w, None)
    weights = keep.astype(np.float32) / np.float32(1 - w.dropout)
    kept = plain.forward(np, q, k, v, added, lambda shape: weights)
    dq = plain.backward(np, dout, q, k, v, kept)[0]
    for n, (b, h, i) in enumerate(subject.positions):
        np.testing.assert_allclose(kept.out[b, h, i], subject.out_rows[n], atol=LARGEST_ERROR)
        np.testing.assert_allclose(dq[b, h, i], subject.dq_rows[n], atol=LARGEST_ERROR)


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [("fa2", {"bias": True}, "fa2 takes no bias"), ("fa2", {"window": (8, 0)}, "no window"),
     ("cudnn", {"window": (8, 0)}, "no window")],
)
def test_what_a_provider_can_not_do_is_skipped(
    name: str, option: dict[str, Any], reason: str
) -> None:
    pytest.importorskip("torch")
    workload = optional(square("x", 1, 64, 2, 32, "bfloat16", True), **option)
    with pytest.raises(Skipped, match=reason):
        providers.ALL[name].prepare(inputs.make_inputs(workload, "cpu"), (None,) * 4, "forward")


def _record(
    provider: str,
    ms: float | None,
    direction: str = "forward",
    workload: Workload = FLOAT32[0],
    **found: Any,
) -> record.Record:
    origin = record.Origin("A GPU", "c0ffee", "2026-01-01")
    measured = Measurement(device_ms=ms, max_error=1e-6, **found)
    return record.make_record(workload, direction, provider, f"{provider} 1", measured, origin)


def test_a_workload_survives_json() -> None:
    for workload in (*SMOKE, *OPTIONS):
        assert from_fields(json.loads(json.dumps(asdict(workload)))) == workload
        found = json.loads(json.dumps(_record("cuflash", 1.0, workload=workload)))
        assert record.workload_of(found) == workload


def test_records_from_before_the_options_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a-gpu-float32.json"
    old = _record("cuflash", 2.0)
    for key in ("dropout", "bias", "window", "tile", "moved_bytes", "read_bytes", "written_bytes"):
        del old[key]
    path.write_text(json.dumps([old]))
    assert record.load(path) == [_record("cuflash", 2.0)]
    assert record.workload_of(record.load(path)[0]) == FLOAT32[0]


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


def test_means_tell_the_worst_cell() -> None:
    records = [_record(name, ms * factor, workload=workload)
               for workload, factor in zip(PAPERS[:2], (1.0, 2.0))
               for name, ms in (("cuflash", 1.0), ("fa2", 2.0 * factor))]
    line = summaries.means(records, SPEED).splitlines()[-1]
    assert line == f"| cuflash : fa2 | fwd | 2.83 | 2 | {PAPERS[0].name} | 2 |"


@pytest.mark.parametrize(
    ("peer", "said"),
    [((9, 9, 9), "512"), ((0.5, 9, 9), "1k"), ((9, 0.5, 9), "2k"), ((9, 9, 0.5), "none")],
)
def test_lead_is_at_every_greater_length(peer: tuple[float, ...], said: str) -> None:
    records = [_record(name, ms, workload=workload)
               for workload, theirs in zip(PAPERS, peer)
               for name, ms in (("cuflash", 1.0), ("plain", theirs))]
    assert summaries.lead(records, SPEED).splitlines()[-1] == f"| {said} |"


def test_costs_compare_with_the_same_without_the_option() -> None:
    tile = (128, 64)
    records = [_record("cuflash", 1.2 if w.dropout else 0.05 if w.window else 1.0, workload=w,
                       tile=tile) for w in OPTIONS]
    lines = summaries.costs(records, MILLISECONDS).splitlines()[4:]
    assert len(lines) == sum(bool(w.dropout or w.bias or w.window) for w in OPTIONS)
    assert sum(line.endswith("| dropout 0.1 | 1.2 | 1.25 |") for line in lines) == 4
    assert sum(line.endswith("| bias | 1 | 1.5 |") for line in lines) == 4
    assert sum(line.endswith("| window (256, 0) | 0.05 | 0.0461 |") for line in lines) == 2


def test_memory_per_token() -> None:
    records = [_record("cuflash", None, workload=w, peak_bytes=100 * w.q_len + extra)
               for w, extra in zip(SUITES["memory"].workloads[:2], (0, 2048))]
    text = summaries.per_token(records, MEMORY)
    assert text == "Bytes per token of cuflash: float32 fwd 100 to 101 (1k to 2k)."


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_text_and_plots(suite: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = SUITES[suite]
    records = [
        _record(name, 1.0, direction, workload, peak_bytes=2**20, moved_bytes=2**20)
        for workload in shown.workloads
        for name in shown.providers
        for direction in shown.directions
    ]
    assert "commit c0ffee" in page.suite_text(records, shown)
    assert plots.draw(records, shown.shown[0], tmp_path / "plot.svg")
