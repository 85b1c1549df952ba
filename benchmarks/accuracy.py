"""The error of a whole result against float64, where `measure` samples a few rows."""

from __future__ import annotations

from functools import cached_property

import machine
import numpy as np
import plain
from inputs import Inputs, make_inputs, to_float64
from measure import Measurement
from provider import Provider
from workloads import Workload


class Accuracy:
    """One workload on one device, and its true output."""

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload, self._device = workload, device

    @cached_property
    def _inputs(self) -> Inputs:
        return make_inputs(self._workload, self._device)

    @cached_property
    def _truth(self) -> np.ndarray:
        """The output of shape (batch, heads, seq, head_dim), computed in float64."""
        xp, w, inputs = machine.array_library(self._device), self._workload, self._inputs
        arrays = (to_float64(x) for x in (inputs.q, inputs.k, inputs.v))
        q, k, v = (xp.asarray(x).swapaxes(1, 2) for x in arrays)
        k, v = (xp.repeat(x, w.q_heads // w.kv_heads, axis=1) for x in (k, v))
        added = plain.added_scores(xp, w, inputs.bias)
        return to_float64(plain.forward_by_head(xp, q, k, v, added))

    def measure(self, provider: Provider, direction: str) -> Measurement:
        """Find the largest and the root-mean-square error of the output.

        Raises
        ------
        Skipped
            The provider can't do this here.
        """
        inputs = self._inputs
        with provider.active():
            case = provider.prepare(inputs, provider.load(inputs), direction)
            error = np.abs(case.whole(case.call()) - self._truth)
        return Measurement(
            max_error=float(error.max()), rms_error=float(np.sqrt(np.mean(error**2))),
            kernel=case.kernel, tile=case.tile, note=case.note,
        )  # fmt: skip
