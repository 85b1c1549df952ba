"""Every named problem forward, in every dtype, within the budget of plain code."""

import budget
import pytest
from arrays import DTYPES, get, put
from problems import PROBLEMS, make, usual_on_gpu

import cuflash


def cases():
    """Return (problem, dtype, library)."""
    for name in PROBLEMS:
        for dtype in DTYPES:
            yield pytest.param(name, dtype, "numpy", id=f"{name}-{dtype}-numpy")
            slow = [] if usual_on_gpu(name, dtype) else [pytest.mark.slow]
            yield pytest.param(name, dtype, "cupy", id=f"{name}-{dtype}-cupy",
                               marks=[pytest.mark.gpu, *slow])


@pytest.mark.parametrize(("name", "dtype", "library"), list(cases()))
def test_problem(name, dtype, library):
    xp = pytest.importorskip(library)
    inputs, options, answers = make(name, dtype)
    q, k, v = (put(xp, inputs[key]) for key in ("q", "k", "v"))
    out, lse = cuflash.attention(q, k, v, **put(xp, options), return_lse=True)
    assert isinstance(out, xp.ndarray) and isinstance(lse, xp.ndarray)
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    for key, got in {"out": out, "lse": lse}.items():
        budget.check(key, got, DTYPES[dtype], *(answer[key] for answer in answers))


@pytest.mark.parametrize("name", ["odd_below_tile", "everything"])
def test_without_lse_the_same_bits(xp, name):
    inputs, options, _ = make(name, "float16")
    q, k, v = (put(xp, inputs[key]) for key in ("q", "k", "v"))
    options = put(xp, options)
    out, _ = cuflash.attention(q, k, v, **options, return_lse=True)
    alone = cuflash.attention(q, k, v, **options)
    assert get(alone).tobytes() == get(out).tobytes()


@pytest.mark.parametrize("name", ["one_query", "dropout"])
def test_three_axes_are_one_batch_element(xp, name):
    inputs, options, _ = make(name, "float32")
    q, k, v = (put(xp, inputs[key]) for key in ("q", "k", "v"))
    whole, whole_lse = cuflash.attention(q, k, v, **put(xp, options), return_lse=True)
    out, lse = cuflash.attention(q[0], k[0], v[0], **put(xp, options), return_lse=True)
    assert out.shape == whole.shape[1:]
    assert lse.shape == whole_lse.shape[1:]
    assert get(out).tobytes() == get(whole).tobytes()
    assert get(lse).tobytes() == get(whole_lse).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_sequence_does_not_depend_on_its_batch(xp, dtype):
    """Contract, section 5: the same bits whatever else is in the batch."""
    inputs, _, _ = make("head_dim_40", dtype)
    q, k, v = (put(xp, inputs[key]) for key in ("q", "k", "v"))
    whole = cuflash.attention(q, k, v)
    for b in range(2):
        alone = cuflash.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1])
        assert get(alone).tobytes() == get(whole[b : b + 1]).tobytes()
