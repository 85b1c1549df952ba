"""Every refusal: TypeError or ValueError, "rule. Got value.", naming the argument."""

import numpy as np
import pytest
from arrays import get

import cuflash


def zeros(xp, *shape, dtype="float32"):
    return xp.zeros(shape, dtype)


def good(xp):
    return {"q": zeros(xp, 2, 5, 4, 16), "k": zeros(xp, 2, 7, 2, 16), "v": zeros(xp, 2, 7, 2, 16)}


# what is wrong, the exception, the arguments that replace the good ones, the name in the message
REFUSED = [
    ("rank", ValueError, lambda xp: {"q": zeros(xp, 5, 4)}, "q"),
    ("rank five", ValueError, lambda xp: {"k": zeros(xp, 1, 2, 7, 2, 16)}, "k"),
    ("mixed ranks", ValueError, lambda xp: {"q": zeros(xp, 5, 4, 16)}, "q|k"),
    ("batch", ValueError, lambda xp: {"k": zeros(xp, 3, 7, 2, 16)}, "k|batch"),
    ("batch of v", ValueError, lambda xp: {"v": zeros(xp, 1, 7, 2, 16)}, "v|batch"),
    ("head_dim", ValueError, lambda xp: {"k": zeros(xp, 2, 7, 2, 17)}, "head_dim|k"),
    ("B85 k longer", ValueError, lambda xp: {"k": zeros(xp, 2, 8, 2, 16)}, "k|v"),
    ("B85 v longer", ValueError, lambda xp: {"v": zeros(xp, 2, 8, 2, 16)}, "k|v"),
    ("heads of v", ValueError, lambda xp: {"v": zeros(xp, 2, 7, 4, 16)}, "v"),
    ("B50 heads", ValueError, lambda xp: {"q": zeros(xp, 2, 5, 3, 16)}, "heads"),
    ("head_dim 513", ValueError,
     lambda xp: {"q": zeros(xp, 2, 5, 4, 513), "k": zeros(xp, 2, 7, 2, 513)}, "head_dim|q"),
    ("values 513", ValueError, lambda xp: {"v": zeros(xp, 2, 7, 2, 513)}, "v"),
    ("B150 mixed dtypes", TypeError, lambda xp: {"k": zeros(xp, 2, 7, 2, 16, dtype="float16")},
     "dtype|k"),
    ("integers", TypeError,
     lambda xp: {name: a.astype("int32") for name, a in good(xp).items()}, "q"),
    ("complex", TypeError,
     lambda xp: {name: a.astype("complex64") for name, a in good(xp).items()}, "q"),
    ("a list", TypeError, lambda xp: {"q": [[1.0]]}, "q"),
    ("none", TypeError, lambda xp: {"v": None}, "v"),
    ("causal word", ValueError, lambda xp: {"causal": "middle"}, "causal"),
    ("causal kind", (TypeError, ValueError), lambda xp: {"causal": 2.5}, "causal"),
    ("window -1", ValueError, lambda xp: {"window": (-1, 0)}, "window"),
    ("window of arrays", (TypeError, ValueError), lambda xp: {"window": (xp.zeros(2), 1)},
     "window"),
    ("scale array", (TypeError, ValueError), lambda xp: {"scale": xp.ones(2)}, "scale"),
    ("softcap list", TypeError, lambda xp: {"softcap": [1.0]}, "softcap"),
    ("dropout list", TypeError, lambda xp: {"dropout": [0.5], "seed": 1}, "dropout"),
    ("seed array", TypeError, lambda xp: {"dropout": 0.5, "seed": xp.ones(2)}, "seed"),
    ("B40 window", ValueError, lambda xp: {"window": (-1, -3)}, "window"),
    ("window right", ValueError, lambda xp: {"window": (3, -2)}, "window"),
    ("window of one", (TypeError, ValueError), lambda xp: {"window": (3,)}, "window"),
    ("window number", (TypeError, ValueError), lambda xp: {"window": 3}, "window"),
    ("window float", (TypeError, ValueError), lambda xp: {"window": (1.5, 2)}, "window"),
    ("mask floats", TypeError, lambda xp: {"mask": zeros(xp, 5, 7)}, "mask"),
    ("mask bytes", TypeError, lambda xp: {"mask": zeros(xp, 5, 7, dtype="uint8")}, "mask"),
    ("mask shape", ValueError, lambda xp: {"mask": zeros(xp, 5, 6, dtype="bool")}, "mask"),
    ("mask rank", ValueError, lambda xp: {"mask": zeros(xp, 1, 1, 1, 5, 7, dtype="bool")}, "mask"),
    ("bias bool", TypeError, lambda xp: {"bias": zeros(xp, 5, 7, dtype="bool")}, "bias"),
    ("bias integers", TypeError, lambda xp: {"bias": zeros(xp, 5, 7, dtype="int32")}, "bias"),
    ("bias shape", ValueError, lambda xp: {"bias": zeros(xp, 2, 5, 7)}, "bias"),
    ("bias rank", ValueError, lambda xp: {"bias": zeros(xp, 1, 1, 1, 5, 7)}, "bias"),
    ("B48 slopes", ValueError, lambda xp: {"alibi_slopes": zeros(xp, 3)}, "alibi_slopes"),
    ("B48 slopes (H, B)", ValueError, lambda xp: {"alibi_slopes": zeros(xp, 4, 2)},
     "alibi_slopes"),
    ("slopes (1, H)", ValueError, lambda xp: {"alibi_slopes": zeros(xp, 1, 4)}, "alibi_slopes"),
    ("slopes dtype", TypeError, lambda xp: {"alibi_slopes": zeros(xp, 4, dtype="bool")},
     "alibi_slopes"),
    ("sinks shape", ValueError, lambda xp: {"sinks": zeros(xp, 2)}, "sinks"),
    ("sinks rank", ValueError, lambda xp: {"sinks": zeros(xp, 2, 4)}, "sinks"),
    ("sinks dtype", TypeError, lambda xp: {"sinks": zeros(xp, 4, dtype="int64")}, "sinks"),
    ("softcap zero", ValueError, lambda xp: {"softcap": 0.0}, "softcap"),
    ("softcap negative", ValueError, lambda xp: {"softcap": -5.0}, "softcap"),
    ("softcap nan", ValueError, lambda xp: {"softcap": float("nan")}, "softcap"),
    ("softcap word", TypeError, lambda xp: {"softcap": "5"}, "softcap"),
    ("softcap huge", ValueError, lambda xp: {"softcap": 1e300}, "softcap"),
    ("softcap tiny", ValueError, lambda xp: {"softcap": 1e-40}, "softcap"),
    ("scale huge", ValueError, lambda xp: {"scale": 1e39}, "scale"),
    ("scale integer", ValueError, lambda xp: {"scale": 10**400}, "scale"),
    ("window of flags", TypeError, lambda xp: {"window": (True, False)}, "window"),
    ("scale nan", ValueError, lambda xp: {"scale": float("nan")}, "scale"),
    ("scale infinite", ValueError, lambda xp: {"scale": float("inf")}, "scale"),
    ("scale word", TypeError, lambda xp: {"scale": "auto"}, "scale"),
    ("dropout one", ValueError, lambda xp: {"dropout": 1.0, "seed": 1}, "dropout"),
    ("dropout negative", ValueError, lambda xp: {"dropout": -0.1, "seed": 1}, "dropout"),
    ("dropout nan", ValueError, lambda xp: {"dropout": float("nan"), "seed": 1}, "dropout"),
    ("seed negative", ValueError, lambda xp: {"dropout": 0.5, "seed": -1}, "seed"),
    ("seed too large", ValueError, lambda xp: {"dropout": 0.5, "seed": 2**64}, "seed"),
    ("seed float", TypeError, lambda xp: {"dropout": 0.5, "seed": 1.5}, "seed"),
    ("out dtype", (TypeError, ValueError),
     lambda xp: {"out": zeros(xp, 2, 5, 4, 16, dtype="float16")}, "out"),
    ("out shape", ValueError, lambda xp: {"out": zeros(xp, 2, 5, 4, 17)}, "out"),
]  # fmt: skip


def check_message(error, name):
    text = str(error.value)
    assert any(word in text for word in name.split("|")), text
    assert ". Got " in text and text.endswith("."), text


@pytest.mark.parametrize(("kind", "change", "name"), [row[1:] for row in REFUSED],
                         ids=[row[0].replace(" ", "_") for row in REFUSED])
def test_refused(xp, kind, change, name):
    with pytest.raises(kind) as error:
        cuflash.attention(**(good(xp) | change(xp)))
    check_message(error, name)


BACKWARD = [row for row in REFUSED if not row[0].startswith("out")]


@pytest.mark.parametrize(("kind", "change", "name"), [row[1:] for row in BACKWARD],
                         ids=[row[0].replace(" ", "_") for row in BACKWARD])
def test_refused_backward(xp, kind, change, name):
    arrays = {"dout": zeros(xp, 2, 5, 4, 16), "out": zeros(xp, 2, 5, 4, 16),
              "lse": zeros(xp, 2, 4, 5)}
    with pytest.raises(kind) as error:
        cuflash.attention_backward(**(good(xp) | arrays | change(xp)))
    assert ". Got " in str(error.value)


@pytest.mark.parametrize(("name", "kind", "change"), [
    ("dout", ValueError, lambda xp: zeros(xp, 2, 5, 4, 15)),
    ("dout", TypeError, lambda xp: zeros(xp, 2, 5, 4, 16, dtype="float16")),
    ("out", ValueError, lambda xp: zeros(xp, 2, 5, 2, 16)),
    ("out", TypeError, lambda xp: zeros(xp, 2, 5, 4, 16, dtype="float64")),
    ("lse", ValueError, lambda xp: zeros(xp, 2, 5, 4)),
    ("lse", TypeError, lambda xp: zeros(xp, 2, 4, 5, dtype="float16")),
    ("dlse", ValueError, lambda xp: zeros(xp, 2, 4, 6)),
    ("dlse", TypeError, lambda xp: zeros(xp, 2, 4, 5, dtype="int32")),
])  # fmt: skip
def test_backward_arguments(xp, name, kind, change):
    arrays = {"dout": zeros(xp, 2, 5, 4, 16), "out": zeros(xp, 2, 5, 4, 16),
              "lse": zeros(xp, 2, 4, 5)}
    with pytest.raises(kind) as error:
        cuflash.attention_backward(**(good(xp) | arrays | {name: change(xp)}))
    check_message(error, name)


def test_bias_grad_without_a_bias(xp):
    """B38: a parameter that cannot take effect raises."""
    arrays = {"dout": zeros(xp, 2, 5, 4, 16), "out": zeros(xp, 2, 5, 4, 16),
              "lse": zeros(xp, 2, 4, 5)}
    with pytest.raises(ValueError) as error:
        cuflash.attention_backward(**(good(xp) | arrays), bias_grad=True)
    check_message(error, "bias_grad")


def test_a_float_in_a_window_is_refused_on_every_call(xp):
    """5.0 equals 5, also as the key of a cache."""
    for first in (5, 5.0, 5, 5.0):
        if isinstance(first, int):
            cuflash.attention(**good(xp), window=(first, None))
            continue
        with pytest.raises((TypeError, ValueError), match="window"):
            cuflash.attention(**good(xp), window=(first, None))


def test_unknown_options(xp):
    for name in ("window_size", "is_causal", "num_splits_"):
        with pytest.raises(TypeError, match=name):
            cuflash.attention(**good(xp), **{name: 1})
    q, k, v = good(xp).values()
    with pytest.raises(TypeError):
        cuflash.attention(q, k, v, True)


@pytest.mark.parametrize("change", [{"window": (-1, 2)}, {"dropout": 2.0}, {"softcap": -1.0}])
def test_nothing_is_written_before_an_error(xp, change):
    out = xp.full((2, 5, 4, 16), 7, "float32")
    with pytest.raises(ValueError):
        cuflash.attention(**good(xp), out=out, **change)
    assert (get(out) == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "out"])
def test_mixed_devices(cupy, name):
    for here, there in ((np, cupy), (cupy, np)):
        arrays = good(here)
        others = {"mask": there.ones((5, 7), "bool"), "bias": zeros(there, 5, 7),
                  "alibi_slopes": zeros(there, 4), "sinks": zeros(there, 4),
                  "out": zeros(there, 2, 5, 4, 16)}
        arrays[name] = good(there)[name] if name in arrays else others[name]
        with pytest.raises((TypeError, ValueError)) as error:
            cuflash.attention(**arrays)
        check_message(error, name)


@pytest.mark.parametrize(("kind", "arguments", "name"), [
    (ValueError, (1, 1, 2, 2, 1.0, 3), "dropout"),
    (ValueError, (1, 1, 2, 2, -0.5, 3), "dropout"),
    (ValueError, (1, 1, -2, 2, 0.5, 3), "q_len"),
    (TypeError, (1, 1, 2, 2.5, 0.5, 3), "kv_len"),
    (TypeError, (1, 1, 2, 2, 0.5, "a"), "seed"),
])  # fmt: skip
def test_dropout_mask_arguments(kind, arguments, name):
    with pytest.raises(kind) as error:
        cuflash.dropout_mask(*arguments)
    check_message(error, name)


def test_a_mask_like_nothing_known():
    """B38: a parameter that cannot take effect raises."""
    with pytest.raises((TypeError, ValueError), match="like"):
        cuflash.dropout_mask(1, 1, 2, 2, 0.5, 3, like="cuda")


def test_flags_must_be_booleans(xp):
    arrays = good(xp)
    with pytest.raises(TypeError, match="return_lse must be a boolean"):
        cuflash.attention(**arrays, return_lse="no")
    out, lse = cuflash.attention(**arrays, return_lse=True)
    for flag in ("deterministic", "bias_grad"):
        with pytest.raises(TypeError, match=f"{flag} must be a boolean"):
            cuflash.attention_backward(out, *arrays.values(), out, lse, **{flag: 1})
