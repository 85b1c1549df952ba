"""CUDA: outputs, workspaces, and kernel launches on CuPy's current stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from cuflash import _compile, _plan
from cuflash._counters import counter
from cuflash._device import device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._interop import aligned, cupy_module, device_index
from cuflash._params import Arrays, pack
from cuflash._plan import Plan
from cuflash._problem import Extras, Problem
from cuflash._sparse import with_lists
from cuflash._tensor_maps import with_maps

_HERE = nullcontext()


def on_device(index: int) -> Any:
    """Makes a device current, if it is not; -1 is the CPU."""
    if index < 0:
        return _HERE
    cuda = cupy_module().cuda
    return _HERE if cuda.runtime.getDevice() == index else cuda.Device(index)


def _launch(plan: Plan, parameters: Any, index: int) -> None:
    if plan.grid == 0:  # nothing to do; CUDA knows no empty grid
        return
    kernel = _compile.kernel(plan, index, device(index).arch)
    kernel((plan.grid,), (plan.threads,), (parameters,), shared_mem=plan.shared_bytes)


def _contiguous(array: Any, dtype: str | None = None) -> Any:
    return cupy_module().ascontiguousarray(aligned(array), dtype=dtype)


def _extra_arrays(problem: Problem, extras: Extras) -> dict[str, Any]:
    """The arrays of a call beside q, k and v, fit for kernels."""
    mask, bias, slopes, sinks = extras.mask, extras.bias, extras.alibi_slopes, extras.sinks
    compute = ELEMENT_TYPES[problem.dtype].compute
    if slopes is not None:
        shape = (problem.batch, problem.q_heads)
        slopes = _contiguous(cupy_module().broadcast_to(aligned(slopes), shape), compute)
    return {
        "mask": mask,
        "bias": None if bias is None else aligned(bias),
        "alibi_slopes": slopes,
        "sinks": None if sinks is None else _contiguous(sinks, compute),
    }


def attention(
    problem: Problem, q: Any, k: Any, v: Any, extras: Extras, out: Any | None, with_lse: bool
) -> tuple[Any, Any]:
    """Output and, if asked for, lse of one problem; all arrays have four axes."""
    empty = cupy_module().empty
    element, index = ELEMENT_TYPES[problem.dtype], device_index(q)
    with on_device(index):
        if out is None:
            out = empty(problem.out_shape, element.numpy)
        lse = empty(problem.lse_shape, element.compute) if with_lse else None
        extra = _extra_arrays(problem, extras)
        if problem.empty:
            out.fill(0)
            if lse is not None:
                lse.fill(-float("inf"))
                if problem.sinks:
                    lse[...] = extra["sinks"][:, None]
            return out, lse
        arrays = Arrays(q, k, v, out, lse=lse, **extra)
        packed = pack(problem, arrays, extras.seed)
        if packed.vector == 0:
            arrays = arrays._replace(q=aligned(q), k=aligned(k), v=aligned(v))
            packed = pack(problem, arrays, extras.seed)
        plan = _plan.forward(problem, device(index), packed.vector, packed.mapped)
        arrays, parameters = _with_words((plan,), problem, arrays, extras, packed.parameters)
        _run(plan, problem, arrays, extras, parameters)
    return out, lse


def _with_words(
    plans: tuple[Plan, ...], problem: Problem, arrays: Arrays, extras: Extras, parameters: Any
) -> tuple[Arrays, Any]:
    """Adds the mask as bits, if a kernel reads it so."""
    mask = arrays.mask
    if mask is None or not any(map(_plan.reads_words, plans)):
        return arrays, parameters
    axes = [n if stride else 1 for n, stride in zip(mask.shape[:3], mask.strides)]
    words = cupy_module().empty((*axes, -(-problem.kv_len // 128) * 4), "uint32")
    arrays = arrays._replace(mask_words=words)
    parameters = pack(problem, arrays, extras.seed).parameters
    _launch(_plan.pack_mask(problem, words.size), parameters, device_index(mask))
    return arrays, parameters


def _run(plan: Plan, problem: Problem, arrays: Arrays, extras: Extras, parameters: Any) -> None:
    """Launches a kernel; one that walks over a block mask with the lists of its tiles."""
    plans: tuple[Plan, ...] = (plan,)
    if extras.blocks is not None and plan.has_blocks:
        plans, arrays, counts = with_lists(problem, arrays, plan, extras.blocks)
        parameters = pack(problem, arrays, extras.seed, counts).parameters
    for each in plans:
        argument = parameters
        if each.for_hopper:
            argument = with_maps(each, arrays, counter(), parameters)
        _launch(each, argument, device_index(arrays.q))


def attention_backward(
    problem: Problem, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Extras,
    dlse: Any | None, bias_grad: bool, deterministic: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients (dq, dk, dv, dbias, dsinks) of one problem."""
    cupy = cupy_module()
    empty, element = cupy.empty, ELEMENT_TYPES[problem.dtype]
    with on_device(device_index(q)):
        if problem.empty:
            return _empty_gradients(problem, q, k, v, extras, lse, dlse, bias_grad)
        dout, q, k, v, out = (aligned(array) for array in (dout, q, k, v, out))
        extra, lse = _extra_arrays(problem, extras), _contiguous(lse)
        # Key tiles add their shares of dq to zeros, in the compute type.
        direct, sums = problem.sums_are_dq, None
        if not deterministic:
            sums = cupy.zeros(q.shape if direct else _sums_size(problem), element.compute)
        arrays = Arrays(
            q, k, v, out, dout,
            dq=sums if direct and not deterministic else empty(q.shape, element.numpy), sums=sums,
            dk=empty(k.shape, element.numpy), dv=empty(v.shape, element.numpy),
            lse=lse, delta=empty(lse.shape, element.compute),
            dlse=None if dlse is None else _contiguous(dlse),
            dbias=empty(extras.bias.shape, extras.bias.dtype) if bias_grad else None,
            dsinks=empty(problem.q_heads, element.compute) if problem.sinks else None,
            **extra,
        )  # fmt: skip
        _run_backward(problem, arrays, extras)
        dsinks = arrays.dsinks
        if dsinks is not None:
            dsinks = dsinks.astype(extras.sinks.dtype, copy=False)
    return arrays.dq, arrays.dk, arrays.dv, arrays.dbias, dsinks


def _empty_gradients(
    problem: Problem, q: Any, k: Any, v: Any, extras: Extras, lse: Any, dlse: Any | None,
    bias_grad: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Zeros; but where there are sinks and no keys, lse is the sink, and dlse its gradient."""
    cupy = cupy_module()
    dq, dk, dv = (cupy.zeros(tensor.shape, tensor.dtype) for tensor in (q, k, v))
    dbias = cupy.zeros(extras.bias.shape, extras.bias.dtype) if bias_grad else None
    dsinks = cupy.zeros(problem.q_heads, extras.sinks.dtype) if problem.sinks else None
    if dsinks is not None and dlse is not None:
        shares = cupy.where(aligned(lse) == -float("inf"), 0, aligned(dlse))
        dsinks += shares.sum(axis=(0, 2)).astype(dsinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _sums_size(problem: Problem) -> int:
    """Values of dq's sums, room for whole tiles of 16 rows included."""
    rows = -(-problem.q_len // 16) * 16
    return problem.batch * problem.q_heads * rows * problem.head_dim


def _run_backward(problem: Problem, arrays: Arrays, extras: Extras) -> None:
    index = device_index(arrays.q)
    parameters, vector, _ = pack(problem, arrays, extras.seed)
    deterministic = arrays.sums is None
    shape = None if arrays.dbias is None else arrays.dbias.shape
    plans = _plan.backward(problem, device(index), vector, deterministic, shape)
    arrays, parameters = _with_words(plans, problem, arrays, extras, parameters)
    for plan in plans:
        _run(plan, problem, arrays, extras, parameters)


def dropout_mask(problem: Problem, seed: int, index: int) -> Any:
    """The keep mask of a problem, a boolean array on a device."""
    with on_device(index):
        mask = cupy_module().empty(problem.score_shape, bool)
        parameters = pack(problem, Arrays(kept=mask), seed).parameters
        _launch(_plan.dropout_mask(problem), parameters, index)
    return mask
