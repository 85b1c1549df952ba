"""How wrong a result may be: never much more than plain code in the same dtype.

    max|got - truth| <= factor * max|plain - truth| + one ulp          factor 2, or 3 for gradients

The ulp is that of the result's dtype at max|truth|, plus four of the accumulator (float32, or
float64 for float64) at the size of the terms, which count where large terms cancel to zero.
In tensors of a few elements plain code may be exact by luck: those get one more ulp, that of the
input dtype at the size of the terms.
"""

import ml_dtypes
import numpy as np
import textbook
from arrays import get, put

import cuflash

FACTORS = {"out": 2, "lse": 2}  # gradients: 3
FEW = 400


def ulp(dtype, size):
    """Return the distance between neighbouring numbers of dtype at the magnitude `size`."""
    info = ml_dtypes.finfo(dtype)
    size = max(float(size), float(info.smallest_normal))
    return float(info.eps) * 2.0 ** np.floor(np.log2(size))


def largest(array):
    """Return the largest magnitude among the finite elements, 0 if there is none."""
    array = np.abs(array[np.isfinite(array)])
    return array.max() if array.size else 0


def allowance(name, dtype, input_dtype, right, rough, terms):
    """Return the largest error that one result may have."""
    accumulator = np.float64 if input_dtype == np.float64 else np.float32
    finite = np.isfinite(right)
    spread = largest(rough[finite] - right[finite])
    ulps = ulp(dtype, largest(right)) + 4 * ulp(accumulator, largest(terms))
    ulps += ulp(input_dtype, largest(terms)) if right.size < FEW else 0
    return FACTORS.get(name, 3) * spread + ulps


def check(name, got, input_dtype, right, rough, terms):
    """Assert that one result is within its budget; infinities must agree exactly."""
    got = get(got)
    assert got.shape == right.shape, f"{name}: shape {got.shape}, not {right.shape}"
    allowed = allowance(name, got.dtype, input_dtype, right, rough, terms)
    wide = got.astype(right.dtype)
    finite = np.isfinite(right)
    assert np.array_equal(wide[~finite], right[~finite]), f"{name}: infinities differ"
    error = abs(np.where(finite, wide, 0) - np.where(finite, right, 0))
    assert not np.isnan(error).any(), f"{name}: NaN"
    worst = error.max(initial=0)
    place = np.unravel_index(error.argmax(), error.shape) if error.size else ()
    assert worst <= allowed, f"{name}{list(map(int, place))}: error {worst:.3g} > {allowed:.3g}"


def check_all(results, inputs, options):
    """Assert that every result (a dict by name: out, lse, dq, ...) is within its budget."""
    right = textbook.truth(**inputs, **options)
    rough = textbook.plain(**inputs, **options)
    terms = textbook.magnitude(**inputs, **options)
    for name, got in results.items():
        check(name, got, inputs["q"].dtype, right[name], rough[name], terms[name])


def check_call(xp, inputs, options, place=put, **more):
    """Run attention and attention_backward on NumPy inputs placed into xp; check all results."""
    arrays = {name: place(xp, array) for name, array in inputs.items()}
    options_there = {name: place(xp, value) for name, value in options.items()}
    dout, dlse = arrays.pop("dout"), arrays.pop("dlse", None)
    out, lse = cuflash.attention(**arrays, **options_there, return_lse=True)
    got = cuflash.attention_backward(
        dout, *arrays.values(), out, lse, **options_there, dlse=dlse,
        bias_grad="bias" in options, **more,
    )  # fmt: skip
    results = {name: value for name, value in got._asdict().items() if value is not None}
    check_all({"out": out, "lse": lse} | results, inputs, options)
    return out, lse, got
