"""Turns of providers, on the CPU, and their clock where there is a GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import machine
import providers
import pytest
import run
import timing
import turns
from inputs import Inputs
from measure import Subject
from provider import Case, Provider, Skipped
from suites import SUITES
from workloads import SMOKE, square

SMALL = square("small", 1, 64, 2, 32, "float32", True)


class Unable(Provider):
    """Can't do anything."""

    name = "unable"

    def missing(self) -> str | None:
        return None

    def version(self, device: str) -> str:
        return "1"

    def load(self, inputs: Inputs) -> Any:
        return inputs

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        raise Skipped("unable")


class Breaking(Unable):
    """Works until its second turn."""

    name = "breaking"

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        plain = providers.ALL["plain"]
        case = plain.prepare(inputs, plain.load(inputs), direction)
        calls = 0

        def call() -> Any:
            nonlocal calls
            calls += 1
            if calls > 2 + turns.MOST_CALLS:  # the first result, the estimate, one turn
                raise ValueError("worn out")
            return case.call()

        return replace(case, call=call)


def test_who_fails_leaves_and_the_others_go_on() -> None:
    playing = [providers.ALL["plain"], Unable(), Breaking(), providers.ALL["cuflash"]]
    subject = Subject.of(SMALL, "cpu")
    found = turns.measure_in_turns(subject, playing, "forward")
    assert list(found) == ["plain", "unable", "breaking", "cuflash"]
    assert found["unable"].note == "skipped: unable"
    assert found["breaking"].note == "failed: ValueError: worn out"
    for name in ("plain", "cuflash"):
        assert found[name].device_ms and found[name].regime == turns.REGIME
        assert (found[name].max_error or 1) < 1e-5


def test_a_suite_in_turns_yields_every_case_in_its_order() -> None:
    suite = replace(SUITES["smoke"], method="turns", directions=("forward", "backward"))
    chosen = (providers.ALL["cuflash"], providers.ALL["plain"])
    words = run.Run(suite, "cpu", ("plain,cuflash-forward",), chosen)
    found = [(p.name, direction) for p, direction, _ in run.measure_workload(words, SMOKE[0])]
    assert found == [("cuflash", "forward"), ("plain", "forward"), ("plain", "backward")]


def test_the_host_is_not_timed() -> None:
    """A call that keeps the host for 1 ms and the GPU for a few µs."""
    reason = machine.missing("cuda")
    if reason:
        pytest.skip(reason)
    import cupy

    array = cupy.zeros(1)

    def call() -> None:
        time.sleep(1e-3)
        array.fill(1)

    _, host_ms = timing.queued_times(call, 4, 0.0)
    times, _ = timing.queued_times(call, 4, host_ms)
    assert host_ms > 5 and max(times) < 0.5


def test_a_graph_replays_the_call() -> None:
    reason = machine.missing("cuda")
    if reason:
        pytest.skip(reason)
    provider = providers.ALL["cuflash-graph"]
    subject = Subject.of(SMALL, "cuda")
    case = provider.prepare(subject.inputs, provider.load(subject.inputs), "call")
    error = subject.error(provider, case, case.call(), "call")
    assert error is not None and error < 1e-5
