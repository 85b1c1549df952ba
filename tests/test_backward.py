"""Every named problem backward, in every dtype, within three times the error of plain code."""

import budget
import pytest
from arrays import DTYPES, get, put
from problems import PROBLEMS, make, usual_on_gpu

import cuflash

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
DETERMINISTIC_ON_GPU = ("odd_above_tile", "head_dim_40", "head_dim_256", "grouped", "causal",
                        "window_empty_rows", "bias_per_head", "everything")


def cases():
    """Return (problem, dtype, deterministic, library)."""
    for number, name in enumerate(PROBLEMS):
        for dtype in DTYPES:
            for deterministic in (False, True):
                label = f"{name}-{dtype}-{'deterministic' if deterministic else 'free'}"
                # NumPy has one way to add, so one of the two is enough there
                if deterministic == bool(number % 2):
                    yield pytest.param(name, dtype, deterministic, "numpy", id=f"{label}-numpy")
                usual = usual_on_gpu(name, dtype)
                if deterministic:
                    usual = usual and name in DETERMINISTIC_ON_GPU
                slow = [] if usual else [pytest.mark.slow]
                yield pytest.param(name, dtype, deterministic, "cupy", id=f"{label}-cupy",
                                   marks=[pytest.mark.gpu, *slow])


def gradients(xp, inputs, options, **more):
    """Return out, lse and the Gradients of one problem, from arrays of the module xp."""
    arrays, options = put(xp, inputs), put(xp, options)
    dout, dlse = arrays.pop("dout"), arrays.pop("dlse")
    out, lse = cuflash.attention(**arrays, **options, return_lse=True)
    more.setdefault("dlse", dlse)
    result = cuflash.attention_backward(dout, *arrays.values(), out, lse, **options, **more)
    return out, lse, result


@pytest.mark.parametrize(("name", "dtype", "deterministic", "library"), list(cases()))
def test_problem(name, dtype, deterministic, library):
    xp = pytest.importorskip(library)
    inputs, options, answers = make(name, dtype)
    _, _, got = gradients(xp, inputs, options, bias_grad="bias" in options,
                          deterministic=deterministic)
    assert got._fields == GRADIENTS
    sources = inputs | options
    for key in GRADIENTS:
        gradient, source = getattr(got, key), sources.get(key[1:])
        if source is None:
            assert gradient is None
            continue
        assert isinstance(gradient, xp.ndarray)
        assert gradient.dtype == source.dtype and gradient.shape == source.shape
        budget.check(key, gradient, DTYPES[dtype], *(answer[key] for answer in answers))


def test_bias_gradient_only_on_request(xp):
    inputs, options, _ = make("bias_per_head", "float32")
    assert gradients(xp, inputs, options)[2].dbias is None


@pytest.mark.parametrize("name", ["grouped", "empty_rows_sinks"])
def test_no_dlse_is_a_dlse_of_zero(xp, name):
    inputs, options, _ = make(name, "float32")
    left = gradients(xp, inputs, options, dlse=None)[2]
    zero = xp.zeros(inputs["dlse"].shape, "float32")
    right = gradients(xp, inputs, options, dlse=zero)[2]
    for one, other in zip(left, right, strict=True):
        if one is not None:
            assert abs(get(one) - get(other)).max() <= 1e-5


def test_three_axes_are_one_batch_element(xp):
    inputs, options, _ = make("grouped_causal_sinks", "float32")
    whole = gradients(xp, inputs, options, deterministic=True)[2]
    single = {key: array[0] for key, array in inputs.items()}
    got = gradients(xp, single, options, deterministic=True)[2]
    for key in ("dq", "dk", "dv"):
        one, other = get(getattr(got, key)), get(getattr(whole, key))
        assert one.shape == other.shape[1:] and one.tobytes() == other.tobytes()
