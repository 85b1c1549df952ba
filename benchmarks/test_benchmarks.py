"""pytest-benchmark over the same providers, at sizes that are quick on a CPU.

    pytest benchmarks                       every provider that is here, NumPy or GPU
    pytest benchmarks -k "cuda and not plain"

The results that are committed come from `run.py`, whose clocks see the device's work alone; this
one keeps the providers honest, and compares versions through ``--benchmark-compare``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import inputs
import machine
import numpy as np
import page
import patterns
import plain
import plots
import providers
import pytest
import record
import report
import run
import summaries
import tables
from measure import Measurement, Subject
from patterns import Pattern
from provider import Provider, Skipped
from suites import MEMORY, MILLISECONDS, SPEED, SUITES
from torch_providers import flex_mask
from workloads import (
    BLOCK_LISTS,
    COMPILE,
    DENSITY,
    FLOAT32,
    HOPPER_ERRORS,
    HOPPER_FLOAT16,
    LONG_STEP,
    OPTIONS,
    PAPERS,
    SMOKE,
    SPARSE,
    Workload,
    from_fields,
    masked,
    optional,
    square,
)

ROUNDS = 5
LARGEST_ERROR = 1e-5  # float32, against rows in float64

PATTERNS = [
    patterns.Random(density=0.25, block_size=32), patterns.Butterfly(block_size=32),
    patterns.BigBird(heads=2, block_size=32), patterns.Documents(count=5, block_size=32),
    patterns.SlidingWindow(window=(40, 3), block_size=32),
    patterns.Longformer(window=(20, 4), global_tokens=3, block_size=32),
    patterns.HeadWindows(heads=2, step=16, block_size=32),
]  # fmt: skip
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
    if w.mask is not None:
        assert w.visible_share == pytest.approx(seen.mean())
        return
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


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_says_the_same_everywhere(pattern: Pattern) -> None:
    length = 200  # no multiple of the blocks
    h, i, j = np.ogrid[: pattern.heads, :length, :length]
    seen = pattern.visible(length)(h, i, j)
    np.testing.assert_array_equal(pattern.make(length, np).to_dense()[0], seen)
    assert pattern.share(length) == pytest.approx(seen.mean())


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_flex_sees_the_same_pattern(pattern: Pattern) -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import flex_attention

    subject = Subject.of(masked(square("x", 1, 192, 2, 32, "float32", False), pattern), "cpu")
    q, k, v = (torch.from_numpy(x).transpose(1, 2)
               for x in (subject.inputs.q, subject.inputs.k, subject.inputs.v))
    mask = flex_mask(subject.inputs.workload, "cpu")
    seen = pattern.visible(192)(*np.ogrid[: pattern.heads, :192, :192])
    present = seen.reshape(-1, 6, 32, 6, 32).any(axis=(2, 4))
    np.testing.assert_array_equal(mask.to_dense()[0].numpy() != 0, present)
    out = flex_attention(q, k, v, block_mask=mask)  # eager: it needs no compiler
    for (b, h, i), row in zip(subject.positions, subject.out_rows):
        np.testing.assert_allclose(out[b, h, i].numpy(), row, atol=LARGEST_ERROR)


def test_a_density_is_the_share_of_blocks() -> None:
    for workload in DENSITY:
        if workload.mask:
            assert isinstance(workload.mask, patterns.Random)
            assert workload.visible_share == pytest.approx(workload.mask.density)


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
    for workload in (*SMOKE, *OPTIONS, *SPARSE, *BLOCK_LISTS):
        assert from_fields(json.loads(json.dumps(asdict(workload)))) == workload
        found = json.loads(json.dumps(_record("cuflash", 1.0, workload=workload)))
        assert record.workload_of(found) == workload


def test_records_from_before_the_options_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a-gpu-float32.json"
    old = _record("cuflash", 2.0)
    for key in ("dropout", "bias", "window", "mask", "outliers", "tile", "rms_error",
                "kept_bytes", "moved_bytes", "read_bytes", "written_bytes", "regime"):
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


def test_the_best_peer_is_another_one_on_each_line() -> None:
    records = [_record(name, ms, workload=workload)
               for workload, times in zip(PAPERS[:2], ((1.0, 2.0, 3.0), (1.0, 5.0, 4.0)))
               for name, ms in zip(("cuflash", "cudnn", "fa3"), times)]
    text = summaries.means(tables.with_best_peer(records, SPEED), SPEED)
    assert text.splitlines()[-1].startswith("| cuflash : best peer | fwd | 2.83 | 2 |")


def test_dtypes_tell_both_ends() -> None:
    records = [_record("cuflash", ms, workload=workload)
               for workload, ms in zip(HOPPER_FLOAT16[:4], (1.0, 2.0, 1.0, 0.5))]
    first, second = PAPERS[0].name, PAPERS[1].name
    line = summaries.dtypes(records, SPEED).splitlines()[-1]
    assert line == f"| cuflash | fwd | 1 | 0.5 | {second} | 2 | {first} |"
    assert summaries.dtypes(records[1:2], SPEED) == ""


def test_one_table_holds_both_errors() -> None:
    records = [_record(name, None, workload=workload, rms_error=error)
               for workload in HOPPER_ERRORS[:2]
               for name, error in (("cuflash", 2e-7), ("fa3", 5e-7))]
    lines = page.suite_text(records, SUITES["hopper_errors"]).splitlines()
    assert "| normal | 2k | 0.2 / 1 | 0.5 / 1 | 2.5 / 1 |" in lines
    assert "| normal, 0.1% outliers | 2k | 0.2 / 1 | 0.5 / 1 | 2.5 / 1 |" in lines
    assert "sampled" not in lines[-1]


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


def test_densities_tell_the_worst_cell() -> None:
    """Dense takes 1 ms; all blocks 1% more, half of them as much as is allowed, a quarter 1 ms."""
    some = [w for w in DENSITY if w.name.startswith("density-d64-4k")][:4]
    records = [_record("cuflash", ms, workload=w) for w, ms in zip(some, (1, 1.01, 0.595, 1))]
    lines = summaries.densities(records, MILLISECONDS).splitlines()
    assert lines[2] == "| head_dim | length | block | dense, ms | 1 | 1/2 | 1/4 |"
    assert lines[4] == "| 64 | 4k | 128 | 1 | 1.01 | 1.19 | 4 |"
    assert "held by 2 of 3; the worst, density-d64-4k-b128-1/4 fwd, takes 3.25 of" in lines[-1]
    assert summaries.densities(records[:1], MILLISECONDS) == ""


def test_costs_of_a_mask_go_by_its_density() -> None:
    records = [_record("cuflash", ms, workload=w) for w, ms in zip(LONG_STEP, (10, 1))]
    share = 10 / 512  # each of 512 rows of blocks has its own and nine others
    line = summaries.costs(records, MILLISECONDS).splitlines()[-1]
    assert line.endswith(f"| 0.1 | {1.15 * share + 0.002:.3g} |")


def test_built_adds_both_lists() -> None:
    records = [_record("cuflash", ms, direction, BLOCK_LISTS[0], kept_bytes=10**6)
               for direction, ms in (("mask", 9.0), ("lists", 1.0), ("transposed", 1.5))]
    said = summaries.built(records, MILLISECONDS)
    assert said.endswith("wanted): bigbird, blocks of 128: 2.5 ms, 2 MB.")


def test_building_counts_shared_words_once() -> None:
    workload = replace(BLOCK_LISTS[1], q_len=1024, kv_len=1024)
    chosen = run.Run(SUITES["block_lists"], "cpu", (), (providers.ALL["cuflash"],))
    mask, lists, transposed = (found for *_, found in run.measure_workload(chosen, workload))
    assert all(found.device_ms for found in (mask, lists, transposed))
    assert mask.kept_bytes and lists.kept_bytes and transposed.kept_bytes
    words = lists.kept_bytes - transposed.kept_bytes  # the mask is symmetric, but for them
    assert words == mask.kept_bytes - 16 * 8 * 8


def test_building_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "architecture", lambda: 90)
    chosen = run.Run(SUITES["compile"], "cpu", (), (providers.ALL["cuflash"],))
    ((*_, found),) = run.measure_workload(chosen, COMPILE[0])
    if found.note:
        pytest.skip(found.note)
    assert found.device_ms and found.device_ms > 10
    assert found.kernel and found.kernel.startswith("attention_forward")


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
        _record(name, 1.0, direction, workload, peak_bytes=2**20, kept_bytes=2**20,
                moved_bytes=2**20, rms_error=1e-7)
        for workload in shown.workloads
        for name in shown.providers
        for direction in shown.directions
    ]
    assert "commit c0ffee" in page.suite_text(records, shown)
    assert plots.draw(records, shown.shown[0], tmp_path / "plot.svg", shown.over)
