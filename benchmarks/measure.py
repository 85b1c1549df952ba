"""Measure one provider on one workload and one direction."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import timing
from inputs import Inputs, make_inputs, sample_positions, true_rows
from provider import Case, Provider, Skipped
from workloads import GRADIENTS, Workload, from_fields

WARM_UP_LENGTH = 64
PROCESS_LIMIT_S = 1800


@dataclass(frozen=True)
class Measurement:
    """What was found; None where it was not measured.

    Attributes
    ----------
    device_ms : float
        Milliseconds of the device, or of the host.
    max_error : float
        Largest absolute error of the sampled rows; of all, where `rms_error` is there too.
    rms_error : float
        Root mean square of all errors.
    peak_bytes, allowed_bytes : int
        Memory beyond the inputs, and how much of it there may be.
    kept_bytes : int
        Memory of the arrays of what was made.
    moved_bytes : int
        Bytes between the chip and its memory.
    read_bytes, written_bytes : int
        The two parts of them, where counters told.
    kernel, tile, note
        As in `provider.Case`.
    regime : str
        How the time was taken, where it was not of the provider alone.
    """

    device_ms: float | None = None
    max_error: float | None = None
    rms_error: float | None = None
    peak_bytes: int | None = None
    allowed_bytes: int | None = None
    kept_bytes: int | None = None
    moved_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    kernel: str | None = None
    tile: tuple[int, int] | None = None
    note: str | None = None
    regime: str | None = None


@dataclass(frozen=True)
class Subject:
    """Inputs with the true rows of their results."""

    inputs: Inputs
    positions: list[tuple[int, int, int]]
    out_rows: np.ndarray
    dq_rows: np.ndarray

    @classmethod
    def of(cls, workload: Workload, device: str) -> Subject:
        """Draw the inputs of a workload."""
        inputs = make_inputs(workload, device)
        positions = sample_positions(workload)
        return cls(inputs, positions, *true_rows(inputs, positions))

    def error(
        self, provider: Provider, case: Case, result: Any, direction: str
    ) -> float | None:
        """Find the largest absolute error in the sampled rows of out, or of dq.

        None where the provider drops what it likes.
        """
        rows = case.rows(result, self.positions)
        if self.inputs.workload.dropout and not provider.replays_dropout:
            return None
        truth = self.dq_rows if direction in GRADIENTS else self.out_rows
        return float(np.abs(rows - truth).max())


class BrokenDevice(Exception):
    """The GPU answers no more calls of this process."""


def attempt(device: str, task: Callable[..., Measurement], *arguments: Any) -> Measurement:
    """Measure; what is skipped or fails is a finding with a note.

    Raises
    ------
    BrokenDevice
        The failure left the GPU unusable, and would be blamed on whoever comes next.
    """
    try:
        return task(*arguments)
    except Skipped as reason:
        return Measurement(note=f"skipped: {reason}")
    except Exception as error:  # whatever a provider raises must not end the run
        lines = str(error).strip().splitlines() or [""]
        failure = f"failed: {type(error).__name__}: {lines[0][:200]}"
    try:
        machine.synchronize(device)
    except Exception as error:
        raise BrokenDevice(f"the GPU is unusable after this: {failure}") from error
    return Measurement(note=failure)


def measure(
    method: str, provider: Provider, subject: Subject, loaded: Any, direction: str
) -> Measurement:
    """Measure by one of the methods "time", "call" and "peak".

    Parameters
    ----------
    method : str
        See `suites.Suite`.
    loaded
        What `provider.load` made of the inputs.
    direction : str
        "forward", "backward", "both" or "call".

    Raises
    ------
    Skipped
        The provider can't do this here.
    """
    inputs, device = subject.inputs, subject.inputs.device
    peak = _device_peak(provider, inputs, loaded, direction) if method == "peak" else None
    case = provider.prepare(inputs, loaded, direction)
    error = subject.error(provider, case, case.call(), direction)
    time: float | None = None
    if method == "call":
        time = timing.host_time(case.call, lambda: machine.synchronize(device))
    elif method == "time":
        time = timing.device_time(case.call) if device == "cuda" else timing.clock_time(case.call)
    allowed = None if peak is None else inputs.workload.allowed_bytes(direction)
    return Measurement(time, error, peak, allowed, kernel=case.kernel, tile=case.tile,
                       note=case.note)


def _device_peak(provider: Provider, inputs: Inputs, loaded: Any, direction: str) -> int:
    """Measure memory beyond the inputs; a backward counts together with its forward."""
    warm_up(provider, inputs.workload, inputs.device, direction)
    machine.release_memory(inputs.device)

    def both() -> Any:
        case = provider.prepare(inputs, loaded, direction)
        return case, case.call()

    return timing.torch_peak(both) if provider.torch_memory else timing.cupy_peak(both)


def warm_up(provider: Provider, workload: Workload, device: str, direction: str) -> None:
    """Make one small call, so that what a library sets up once is not counted."""
    small = replace(workload, q_len=WARM_UP_LENGTH, kv_len=WARM_UP_LENGTH)
    inputs = make_inputs(small, device)
    provider.prepare(inputs, provider.load(inputs), direction).call()


def measure_here(provider: Provider, workload: Workload, direction: str) -> Measurement:
    """Measure time and peak memory on the CPU; for a process that does nothing else."""
    subject = Subject.of(workload, "cpu")
    with provider.active():
        warm_up(provider, workload, "cpu", direction)
        loaded = provider.load(subject.inputs)

        def both() -> Any:
            case = provider.prepare(subject.inputs, loaded, direction)
            return case, case.call()

        peak, (case, result) = timing.process_peak(both)
        error = subject.error(provider, case, result, direction)
        del result
        time = timing.clock_time(case.call)
    return Measurement(time, error, peak, kernel=case.kernel, tile=case.tile, note=case.note)


def measure_in_process(provider: str, workload: Workload, direction: str) -> Measurement:
    """Run `measure_here` in a process of its own."""
    asked = json.dumps({"provider": provider, "workload": asdict(workload), "direction": direction})
    command = [sys.executable, str(Path(__file__).resolve()), asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Answer `measure_in_process`."""
    import providers

    asked = json.loads(sys.argv[1])
    found = measure_here(
        providers.ALL[asked["provider"]], from_fields(asked["workload"]), asked["direction"]
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
