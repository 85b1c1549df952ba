"""From arrays of any library to a checked problem, and on to NumPy or CUDA: decided once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import _explain, _interop, _launch, reference
from cuflash._blockmask import BlockMask
from cuflash._device import Device, device
from cuflash._dropout import new_seed
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._errors import reject
from cuflash._problem import Extras, Problem, check_flag, checked_seed, describe, describe_scores


class Gradients(NamedTuple):
    """Gradients of one attention call; dbias and dsinks are None where not asked for or given.

    Attributes
    ----------
    dq, dk, dv : array
        Shape and dtype of q, k and v: dk and dv have `kv_heads` heads.
    dbias : array or None
        Shape and dtype of the bias, summed over the axes that were broadcast.
    dsinks : array or None
        Shape and dtype of the sinks.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


class _Call(NamedTuple):
    """A checked call: its problem, and its arrays with four axes, all on one device."""

    problem: Problem
    q: Any
    k: Any
    v: Any
    extras: Extras
    given: Mapping[str, Any]
    three_axes: bool
    like: Any

    @property
    def on_gpu(self) -> bool:
        return not isinstance(self.q, np.ndarray)

    def taken(self, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Another array that belongs to the problem, checked, with its batch axis."""
        array = _interop.same_place(name, _interop.native(name, array), self.q)
        if self.three_axes:
            array = array[None]
        if array.shape != shape:
            wanted = shape[1:] if self.three_axes else shape
            got = array.shape[1:] if self.three_axes else array.shape
            raise reject(ValueError, f"{name} must have shape {wanted}", got)
        if array.dtype != dtype:
            raise reject(TypeError, f"{name} must have dtype {dtype.name}", str(array.dtype))
        return array

    def answer(self, array: Any) -> Any:
        """The array as the caller expects it: in the library of q, with the axes of q."""
        return _interop.answer(array[0] if self.three_axes else array, self.like)


def _signature(array: Any) -> tuple[tuple[int, ...], np.dtype]:
    return array.shape, array.dtype


def _prepare(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> _Call:
    like, q = q, _interop.native("q", q)
    k = _interop.same_place("k", _interop.native("k", k), q)
    v = _interop.same_place("v", _interop.native("v", v), q)
    three_axes = q.ndim == 3
    if three_axes:
        if k.ndim != 3 or v.ndim != 3:
            shapes = (q.shape, k.shape, v.shape)
            raise reject(ValueError, "q, k and v must have the same number of axes", shapes)
        q, k, v = q[None], k[None], v[None]

    arrays, blocks = {}, None
    if isinstance(options["mask"], BlockMask):
        blocks = options["mask"]
        _interop.same_place("mask", blocks.states, q, "q (mask.to(q) moves it)")
    for name in ("mask", "bias", "alibi_slopes", "sinks"):
        array = options[name]
        if array is not None and array is not blocks:
            arrays[name] = _interop.same_place(name, _interop.native(name, array), q)
    problem = describe(
        _signature(q), _signature(k), _signature(v),
        causal=options["causal"], window=options["window"],
        softcap=options["softcap"], scale=options["scale"], dropout=options["dropout"],
        precision=options["precision"], blocks=None if blocks is None else blocks.signature,
        **{name: _signature(array) for name, array in arrays.items()},
    )  # fmt: skip
    if blocks is not None and blocks.hides_nothing:
        problem, blocks = replace(problem, blocks=None), None
    extras = _extras(problem, arrays, blocks, options["seed"])
    return _Call(problem, q, k, v, extras, arrays, three_axes, like)


def _extras(
    problem: Problem, arrays: dict[str, Any], blocks: BlockMask | None, seed: Any
) -> Extras:
    if seed is not None:
        seed = checked_seed(seed)
    elif problem.dropout:
        seed = new_seed()
    if not arrays:
        return Extras(seed=seed or 0, blocks=blocks)
    found = {
        name: array[(None,) * (4 - array.ndim)] if name in ("mask", "bias") else array
        for name, array in arrays.items()
    }
    return Extras(**found, seed=seed or 0, blocks=blocks)


def attention(
    q: Any, k: Any, v: Any, options: Mapping[str, Any], return_lse: bool, out: Any
) -> Any:
    """The forward pass; `options` holds the keywords that both directions share."""
    check_flag("return_lse", return_lse)
    call = _prepare(q, k, v, options)
    target = None if out is None else _checked_out(call, out)
    tensors = (call.problem, call.q, call.k, call.v, call.extras, target)
    if call.on_gpu:
        result, lse = _launch.attention(*tensors, return_lse)
    else:
        result, lse = reference.attention(*tensors)
    answer = call.answer(result)  # orders the streams of q's library, where `out` is given too
    answer = answer if out is None else out
    return (answer, call.answer(lse)) if return_lse else answer


def _checked_out(call: _Call, out: Any) -> Any:
    if _interop.library(out) in ("jax", "jaxlib", "tensorflow"):
        raise reject(TypeError, "out must be an array that may change", type(out).__name__)
    problem = call.problem
    target = call.taken("out", out, problem.out_shape, ELEMENT_TYPES[problem.dtype].numpy)
    if isinstance(target, np.ndarray) and not target.flags.writeable:
        raise ValueError("out must be writeable. Got a read-only array.")
    if not _interop.is_aligned(target):
        raise ValueError("out must be aligned to its elements. Got an unaligned array.")
    if _interop.repeats(target):
        raise reject(ValueError, "out must not hold an element twice", target.strides)
    inputs = {"q": call.q, "k": call.k, "v": call.v, **call.given}
    for name, array in inputs.items():
        if _interop.overlap(target, array):
            raise reject(ValueError, "out must not share memory with an input", name)
    return target


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, options: Mapping[str, Any],
    dlse: Any, bias_grad: bool, deterministic: bool,
) -> Gradients:  # fmt: skip
    """The backward pass; `options` as in the forward pass."""
    check_flag("bias_grad", bias_grad)
    check_flag("deterministic", deterministic)
    call = _prepare(q, k, v, options)
    problem, bias = call.problem, call.extras.bias
    if problem.dropout and options["seed"] is None:
        raise reject(ValueError, "seed must be the forward pass's where dropout is not 0", None)
    if bias_grad and bias is None:
        raise reject(ValueError, "bias must be given where bias_grad is asked for", None)
    element = ELEMENT_TYPES[problem.dtype]
    rows = (problem.lse_shape, np.dtype(element.compute))
    dout = call.taken("dout", dout, problem.out_shape, element.numpy)
    out = call.taken("out", out, problem.out_shape, element.numpy)
    lse = call.taken("lse", lse, *rows)
    dlse = None if dlse is None else call.taken("dlse", dlse, *rows)

    run = _launch.attention_backward if call.on_gpu else reference.attention_backward
    dq, dk, dv, dbias, dsinks = run(
        problem, dout, call.q, call.k, call.v, out, lse, call.extras, dlse, bias_grad, deterministic
    )
    if dbias is not None:
        dbias = _interop.answer(dbias.reshape(call.given["bias"].shape), call.like)
    dsinks = _interop.answer(dsinks, call.like)
    return Gradients(call.answer(dq), call.answer(dk), call.answer(dv), dbias, dsinks)


def dropout_mask(sizes: tuple[int, int, int, int], dropout: float, seed: Any, like: Any) -> Any:
    """The keep mask, by NumPy or on the GPU of `like`."""
    problem, seed = describe_scores(sizes, dropout), checked_seed(seed)
    with _interop.place(like) as xp:
        if xp is np:
            mask = reference.dropout_mask(problem, seed)
        else:
            mask = _launch.dropout_mask(problem, seed, xp.cuda.Device().id)
    return _interop.answer(mask, like)


def explain(
    q: Any, k: Any, v: Any, options: Mapping[str, Any], arch: int | None
) -> _explain.Explanation:
    """How a call would run, here or on a GPU of another architecture."""
    call = _prepare(q, k, v, options)
    density = call.extras.blocks.density if call.problem.blocks else 1.0
    if arch is not None:
        return _explain.explain(call.problem, Device.of_arch(arch), density)
    found = device(_interop.device_index(call.q)) if call.on_gpu else None
    return _explain.explain(call.problem, found, density)
