"""Clocks and memory meters. Every time is a median, in milliseconds."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

Call = Callable[[], Any]

BUDGET_MS = 150.0
MOST_REPEATS = 100
WAIT_FACTOR = 1.25  # of the host's time of before, which varies
LONGEST_WAIT_MS = 10.0
WAIT = r"""
__device__ unsigned long long now()
{
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

extern "C" __global__ void wait(long long nanoseconds)
{
    const unsigned long long start = now();
    while (now() - start < nanoseconds) {}
}
"""


def repeats(estimate_ms: float, at_least: int) -> int:
    """Choose how often to repeat: as fits into the budget, within sensible bounds."""
    return max(at_least, min(MOST_REPEATS, int(BUDGET_MS / max(estimate_ms, 1e-6))))


def device_time(call: Call, at_least: int = 5) -> float:
    """Time a call on the GPU, by events on CuPy's current stream before and after it.

    The calls are enqueued without waiting, so that host time stays hidden as far as it can.
    PyTorch's default stream and CuPy's are the same one: the events see the work of both. The first
    call, which compiles, must have been made.
    """
    import cupy

    estimate = _event_times(cupy.cuda, call, 1)[0]
    return median(_event_times(cupy.cuda, call, repeats(estimate, at_least)))


def _event_times(cuda: Any, call: Call, count: int) -> list[float]:
    return _elapsed(cuda, _enqueue(cuda, call, count))


def _enqueue(cuda: Any, call: Call, count: int) -> list[tuple[Any, Any]]:
    marks = [(cuda.Event(), cuda.Event()) for _ in range(count)]
    for before, after in marks:
        before.record()
        call()
        after.record()
    return marks


def _elapsed(cuda: Any, marks: list[tuple[Any, Any]]) -> list[float]:
    marks[-1][1].synchronize()
    return [cuda.get_elapsed_time(before, after) for before, after in marks]


def queued_times(call: Call, count: int, host_ms: float) -> tuple[list[float], float]:
    """Time calls on the GPU by events, after one that is not timed.

    The GPU waits for as long as the host should need to enqueue them all: it would wait within the
    times else, wherever the host spends more on a call than the GPU does.

    Parameters
    ----------
    call : callable
    count : int
    host_ms : float
        What the host needed for as many calls, by an earlier measurement; 0 before the first one.

    Returns
    -------
    times : list of float
    host_ms : float
        What the host needed now.
    """
    import cupy

    wait_ms = min(WAIT_FACTOR * host_ms, LONGEST_WAIT_MS)
    _wait_kernel()((1,), (1,), (int(wait_ms * 1e6),))
    start = perf_counter()
    call()
    marks = _enqueue(cupy.cuda, call, count)
    host_ms = (perf_counter() - start) * 1e3
    return _elapsed(cupy.cuda, marks), host_ms


@cache
def _wait_kernel() -> Any:
    import cupy

    return cupy.RawKernel(WAIT, "wait")


def clock_time(call: Call, at_least: int = 3, patience_ms: float = 10_000.0) -> float:
    """Time a call that returns when its work is done, by the host's clock.

    The first call must have been made. A call slower than `patience_ms` is timed once only.
    """
    estimate = _clock(call)
    if estimate > patience_ms:
        return estimate
    return median(_clock(call) for _ in range(repeats(estimate, at_least)))


def clock_times(call: Call, count: int) -> list[float]:
    """Time calls that return when their work is done, by the host's clock."""
    return [_clock(call) for _ in range(count)]


def _clock(call: Call) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1e3


def host_time(call: Call, synchronize: Call, batches: int = 100, per_batch: int = 20) -> float:
    """Time what the host spends on one call: the device is waited for between batches only."""
    for _ in range(per_batch):
        call()
    times = []
    for _ in range(batches):
        synchronize()
        start = perf_counter()
        for _ in range(per_batch):
            call()
        times.append((perf_counter() - start) * 1e3 / per_batch)
    synchronize()
    return median(times)


def cupy_peak(call: Call) -> int:
    """Measure the most bytes that CuPy's memory pool hands out at once during a call.

    Sizes are those of the pool: multiples of 512 bytes.
    """
    hook = _counting_hook()
    with hook:
        result = call()
    del result
    return hook.peak


def _counting_hook() -> Any:
    import cupy

    class CountingHook(cupy.cuda.MemoryHook):
        """Follow what is in use: `malloc` and `free` are the pool's, cached blocks included."""

        name = "CountingHook"

        def __init__(self) -> None:
            self.used = 0
            self.peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            if event["mem_ptr"]:
                self.used += event["mem_size"]
                self.peak = max(self.peak, self.used)

        def free_postprocess(self, **event: Any) -> None:
            self.used -= event["mem_size"]

    return CountingHook()


def torch_peak(call: Call) -> int:
    """Measure the most bytes that PyTorch's allocator hands out at once during a call."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def process_peak(call: Call) -> tuple[int, Any]:
    """Measure by how much a call raises this process's peak of resident memory.

    The kernel is asked to forget the earlier peak. Where it can't, memory below that earlier peak
    stays unseen, so call this in a process that has done little else.

    Returns
    -------
    peak : int
        Bytes above what was resident before the call.
    result
        What the call returned.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS") or _highest_resident()
    result = call()
    return (_status_bytes("VmHWM") or _highest_resident()) - before, result


def _status_bytes(field: str) -> int | None:
    # ru_maxrss of a new process starts at its parent's peak; VmHWM is this process's own.
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text())
    return int(found.group(1)) * 1024 if found else None


def _highest_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
