"""The counting of memory traffic, with a stand-in for ncu."""

from __future__ import annotations

import sys
from pathlib import Path

import providers
import pytest
import record
import run
import traffic
from suites import SUITES
from workloads import square

NCU_OUTPUT = '''==PROF== Connected to process 7
==PROF== Profiling "attention_forward": 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Block Size","Metric Name","Metric Unit","Metric Value"
"0","7","attention_forward","(128, 1, 1)","dram__bytes_read.sum","byte","1,048,576"
"0","7","attention_forward","(128, 1, 1)","dram__bytes_write.sum","Kbyte","2.5"
"1","7","attention_forward_generic","(128, 1, 1)","dram__bytes_read.sum","byte","3"
"1","7","attention_forward_generic","(128, 1, 1)","dram__bytes_write.sum","byte","4"
"2","7","attention_forward","(128, 1, 1)","dram__bytes_read.sum","byte","5"
==PROF== Disconnected from process 7
'''


def test_traffic_reads_what_ncu_writes() -> None:
    found = traffic.parse(NCU_OUTPUT)
    assert [launch["kernel"] for launch in found] == [
        "attention_forward", "attention_forward_generic"]
    assert [(launch[traffic.READ], launch[traffic.WRITTEN]) for launch in found] == [
        (1048576, 2500), (3, 4)]
    assert traffic.parse("==ERROR== no permission\n") == []


def test_traffic_runs_under_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = tmp_path / "ncu"
    log = "sys.argv[sys.argv.index('--log-file') + 1]"
    ncu.write_text(f"#!{sys.executable}\nimport sys\nopen({log}, 'w').write({NCU_OUTPUT!r})\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    workloads = SUITES["traffic"].workloads
    found = traffic.measure(workloads[:2])
    assert [one.moved_bytes for one in found] == [1048576 + 2500, 7]
    with pytest.raises(traffic.NoCounters, match="2 of 3 launches"):
        traffic.measure(workloads[:3])


def test_traffic_without_ncu_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    started = run.Run(SUITES["traffic"], "cuda", (), (providers.ALL["cuflash"],))
    origin = record.Origin("A GPU", "c0ffee", "2026-01-01")
    assert run.measure_suite(started, origin, tmp_path / "x.json") == ([], False)
    assert "ncu (Nsight Compute)" in capsys.readouterr().out


def test_traffic_is_least_with_every_byte_once() -> None:
    workload = square("x", 1, 1024, 2, 64, "bfloat16", False)
    counts = {name: one.moved_bytes or 0 for name, one in traffic.count(workload, 90).items()}
    assert counts["least"] == workload.bytes_moved("forward")
    assert counts["least"] < counts["model"] < counts["plain"]
