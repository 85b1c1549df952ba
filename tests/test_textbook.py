"""The textbook's own gradients against central differences of its forward pass, in float64."""

import numpy as np
import pytest
import textbook
from problems import Problem, make_inputs, make_options

STEP = 1e-6
SMALL = {
    problem.name: problem
    for problem in (
        Problem("small_causal", 4, 6, 3, 2, batch=2, q_heads=4, kv_heads=2, causal=True),
        Problem("small_empty_rows", 6, 4, 3, causal=True, sinks=True, bias="1h1k"),
        Problem("small_softcap", 3, 5, 2, softcap=1.5, bias="qk", scale=-0.7, batch=2),
        Problem("small_everything", 5, 7, 3, 2, batch=2, q_heads=4, kv_heads=2, causal="top-left",
                window=(3, 2), mask="b11k", bias="b1q1", alibi_slopes="bh", softcap=2.0,
                sinks=True, scale=0.6, dropout=0.3),
    )
}  # fmt: skip


def loss(inputs, options):
    """Return a number that depends on every output: <out, dout> + <lse, dlse>."""
    answer = textbook.truth(inputs["q"], inputs["k"], inputs["v"], **options)
    lse = np.where(answer["lse"] == -np.inf, 0, answer["lse"])
    return (answer["out"] * inputs["dout"]).sum() + (lse * inputs["dlse"]).sum()


def differences(array, value):
    """Return the central differences of value() as each element of array moves in place."""
    result = np.zeros(array.shape)
    for place in np.ndindex(array.shape):
        kept = array[place]
        array[place] = kept + STEP
        above = value()
        array[place] = kept - STEP
        result[place] = (above - value()) / (2 * STEP)
        array[place] = kept
    return result


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_the_differences(name):
    inputs = make_inputs(SMALL[name], np.float64)
    options = make_options(SMALL[name], np.float64)
    if "sinks" in options:
        options["sinks"] = options["sinks"].astype(np.float64)
    answer = textbook.truth(**inputs, **options)
    for key in ("q", "k", "v", "bias", "sinks"):
        array = (inputs | options).get(key)
        if array is not None:
            expected = differences(array, lambda: loss(inputs, options))
            assert np.abs(answer[f"d{key}"] - expected).max() < 1e-7, key


def test_plain_is_less_exact_than_the_truth():
    problem = Problem("rounding", 17, 33, 16)
    inputs = make_inputs(problem, np.float16)
    right, rough = textbook.truth(**inputs), textbook.plain(**inputs)
    error = np.abs(right["out"] - rough["out"]).max()
    assert 1e-5 < error < 1e-2
