"""What it takes to make a block mask, the lists that kernels walk, and the kernels themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import machine
import timing
from inputs import explained
from measure import Measurement
from provider import Skipped
from workloads import Workload

TILE = (128, 128)
PATIENCE_MS = 1000.0


class Building:
    """The block mask or the kernel of one workload, on one device.

    Times are those of the host until the device is done: a user waits for them once. Every mask is
    a new one, and every kernel is compiled anew, so that nothing is kept from the call before.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload, self._device = workload, device

    @cached_property
    def _mask(self) -> Any:
        return self._make()

    def _make(self) -> Any:
        w = self._workload
        assert w.mask is not None
        return w.mask.make(w.q_len, machine.array_library(self._device))

    def measure(self, direction: str) -> Measurement:
        """Measure one step.

        Parameters
        ----------
        direction : str
            "mask": made as the pattern says. "lists": those of forward, with the words of partial
            blocks. "transposed": those of backward, which share these words. "compile": the kernel
            of forward, for the GPU that is here.

        Raises
        ------
        Skipped
            There is no compiler.
        """
        if direction == "compile":
            return self._compile()
        mask = self._mask  # what CuPy compiles for it is compiled by now
        if direction == "mask":
            whole = _bytes((mask.states, mask.bits))
            return Measurement(self._time(self._make), kept_bytes=whole)
        transposed = direction == "transposed"

        def listed() -> Any:
            return type(mask)(mask.grid, mask.states, mask.bits).lists(*TILE, transposed)

        made = listed()
        left_out = ("splits", "words") if transposed else ("splits",)  # no array; as in "lists"
        kept = [each for name, each in made._asdict().items() if name not in left_out]
        return Measurement(self._time(listed), kept_bytes=_bytes(kept), tile=TILE)

    def _compile(self) -> Measurement:
        found = explained(self._workload, machine.architecture())
        numbers = itertools.count()

        def builds() -> Any:
            """Compile a text that no cache has, that of NVRTC itself included."""
            plan = found.plans[0]
            anew = replace(plan, constants=(*plan.constants, ("NUMBER", next(numbers))))
            return replace(found, plans=(anew,)).builds

        if not builds():
            raise Skipped("no compiler is installed")
        time = timing.clock_time(builds, patience_ms=PATIENCE_MS)
        return Measurement(time, kernel=found.kernel)

    def _time(self, call: timing.Call) -> float:
        def done() -> None:
            call()
            machine.synchronize(self._device)

        return timing.clock_time(done, patience_ms=PATIENCE_MS)


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(array.nbytes for array in arrays)
