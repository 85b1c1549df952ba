"""Errors of whole results, and the inputs they are measured with."""

from __future__ import annotations

import inputs
import numpy as np
import providers
import pytest
from accuracy import Accuracy
from workloads import HOPPER_ERRORS, SMOKE, Workload, optional, square


@pytest.mark.parametrize("name", ["plain", "cuflash"])
@pytest.mark.parametrize("workload", [w for w in SMOKE if not w.dropout], ids=lambda w: w.name)
def test_errors_of_the_whole_result(name: str, workload: Workload) -> None:
    found = Accuracy(workload, "cpu").measure(providers.ALL[name], "forward")
    assert found.rms_error is not None and found.max_error is not None
    assert 0 < found.rms_error < found.max_error < 1e-5


def test_outliers_are_few_and_large() -> None:
    base = square("x", 1, 2048, 8, 64, "float32", False)
    drawn = inputs.make_inputs(optional(base, outliers=0.001), "cpu")
    for array in (drawn.q, drawn.k, drawn.v):
        assert array.var() == pytest.approx(1.1, rel=0.05)
        assert np.mean(np.abs(array) > 6) == pytest.approx(0.001 * 0.55, rel=0.2)
    plain = inputs.make_inputs(base, "cpu")
    assert np.abs(plain.q).max() < 6


def test_every_error_is_measured_with_and_without_outliers() -> None:
    assert len(HOPPER_ERRORS) == 12
    for normal, outliers in zip(HOPPER_ERRORS[::2], HOPPER_ERRORS[1::2]):
        assert normal == optional(normal) and outliers == optional(normal, outliers=0.001)
