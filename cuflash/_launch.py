"""CUDA: outputs, workspaces, and kernel launches on CuPy's current stream."""

from __future__ import annotations

from typing import Any

from cuflash import _compile, _params, _plan
from cuflash._device import device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._interop import aligned, cupy_module
from cuflash._problem import Extras, Problem

_SIXTEEN = 16  # bytes of the widest memory access


def _vector(problem: Problem, arrays: tuple[Any, ...]) -> int:
    """Elements that one access may take in all arrays: their rows are contiguous and aligned."""
    size = ELEMENT_TYPES[problem.dtype].size
    bits = _SIXTEEN | problem.head_dim * size | problem.value_dim * size
    for array in arrays:
        *strides, channel = array.strides
        if channel != size and array.shape[-1] > 1:
            return 1
        bits |= array.data.ptr
        for stride, length in zip(strides, array.shape):
            if length > 1:
                bits |= stride
    return max(1, (bits & -bits) // size)


def _launch(plan: _plan.Plan, arguments: Any, index: int) -> None:
    if plan.grid == 0:  # nothing to do; CUDA knows no empty grid
        return
    kernel = _compile.kernel(plan, index, device(index).arch)
    kernel((plan.grid,), (plan.threads,), (arguments,), shared_mem=plan.shared_bytes)


def _aligned_extras(extras: Extras) -> Extras:
    return extras if extras.bias is None else extras._replace(bias=aligned(extras.bias))


def attention(
    problem: Problem, q: Any, k: Any, v: Any, extras: Extras, out: Any | None
) -> tuple[Any, Any]:
    """Output and lse of one problem; all arrays have four axes and lie on one device."""
    cupy = cupy_module()
    element = ELEMENT_TYPES[problem.dtype]
    with q.device:
        if out is None:
            shape = (problem.batch, problem.q_len, problem.q_heads, problem.value_dim)
            out = cupy.empty(shape, element.numpy)
        lse = cupy.empty((problem.batch, problem.q_heads, problem.q_len), element.compute)
        q, k, v, extras = aligned(q), aligned(k), aligned(v), _aligned_extras(extras)
        index = q.device.id
        plan = _plan.forward(problem, device(index), _vector(problem, (q, k, v, out)))
        arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **extras._asdict()}
        _launch(plan, _params.pack(problem, arrays, extras.seed), index)
    return out, lse


def attention_backward(
    problem: Problem, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Extras,
    dlse: Any | None, bias_grad: bool, deterministic: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients (dq, dk, dv, dbias, dsinks) of one problem."""
    cupy = cupy_module()
    element = ELEMENT_TYPES[problem.dtype]
    with q.device:
        dout, q, k, v, out = (aligned(array) for array in (dout, q, k, v, out))
        extras, lse = _aligned_extras(extras), cupy.ascontiguousarray(lse)
        # Key tiles add their shares of dq to zeros, in the compute type.
        summed = not deterministic
        sums = cupy.zeros(q.shape, element.compute) if summed else None
        direct = sums is not None and sums.dtype == q.dtype
        arrays: dict[str, Any] = {
            "q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse,
            "delta": cupy.empty(lse.shape, element.compute),
            "dlse": None if dlse is None else cupy.ascontiguousarray(dlse),
            "dq": sums if direct else cupy.empty(q.shape, element.numpy),
            "dk": cupy.empty(k.shape, element.numpy), "dv": cupy.empty(v.shape, element.numpy),
            "dbias": cupy.empty(extras.bias.shape, extras.bias.dtype) if bias_grad else None,
            "dsinks": cupy.empty(problem.q_heads, element.compute) if problem.sinks else None,
            **extras._asdict(),
        }  # fmt: skip
        _run_backward(problem, arrays, sums, extras.seed)
    return tuple(arrays[name] for name in ("dq", "dk", "dv", "dbias", "dsinks"))


def _run_backward(problem: Problem, arrays: dict[str, Any], sums: Any | None, seed: int) -> None:
    strided = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
    vector = _vector(problem, tuple(arrays[name] for name in strided))
    dbias, index = arrays["dbias"], arrays["q"].device.id
    shape = None if dbias is None else dbias.shape
    plans = _plan.backward(problem, device(index), vector, sums is None, shape)
    dq = arrays["dq"]
    packed = _params.pack(problem, {**arrays, "dq": dq if sums is None else sums}, seed)
    for plan in plans:
        if plan.kernel == "convert_dq":
            _launch(plan, _params.pack(problem, {"delta": sums, "dq": dq}), index)
        else:
            _launch(plan, packed, index)


def dropout_mask(problem: Problem, seed: int, index: int) -> Any:
    """The keep mask of a problem, a boolean array on a device."""
    cupy = cupy_module()
    with cupy.cuda.Device(index):
        shape = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
        mask = cupy.empty(shape, bool)
        _launch(_plan.dropout_mask(problem), _params.pack(problem, {"dq": mask}, seed), index)
    return mask
