"""How a GPU does a problem: kernel, tiles, grid and shared memory, as a pure function of integers.

Everything that is chosen is chosen here and, for each family of kernels, in ``_plan_generic`` and
``_plan_tensor``, tiles from the tables of ``_tiles``.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cuflash import _plan_generic, _plan_tensor
from cuflash._device import Device
from cuflash._plan_parts import Constants, Plan, features, grid, types
from cuflash._problem import Problem

__all__ = [
    "Constants", "Plan", "backward", "combine", "dropout_mask", "forward", "pack_mask",
    "partial_sizes", "reads_words",
]  # fmt: skip

# The kernels that walk over scores on tensor cores, and those that combine their partial results.
_ON_TENSOR_CORES = {
    "attention_forward": "combine_outputs", "attention_forward_sm90": "combine_outputs",
    "attention_backward": "combine_gradients",
    "attention_backward_query": "combine_gradients",
}  # fmt: skip


@lru_cache(maxsize=4096)
def forward(problem: Problem, device: Device, vector: int, mapped: bool = True) -> Plan:
    """The forward pass.

    Parameters
    ----------
    problem : Problem
    device : Device
    vector : int
        Elements that one memory access may take, as far as the arrays' alignment goes.
    mapped : bool
        Whether the copy engine takes the arrays' strides; see :class:`cuflash._params.Packed`.
    """
    return (
        (_plan_tensor.hopper(problem, device, vector) if mapped else None)
        or _plan_tensor.forward(problem, device, vector)
        or _plan_generic.forward(problem, device, vector)
    )


@lru_cache(maxsize=4096)
def backward(
    problem: Problem, device: Device, vector: int, deterministic: bool,
    bias_shape: tuple[int, ...] | None,
) -> tuple[Plan, ...]:  # fmt: skip
    """The launches of the backward pass, in order.

    Parameters
    ----------
    problem : Problem
    device : Device
    vector : int
        As in :func:`forward`.
    deterministic : bool
        Whether dq has a kernel of its own, with a fixed order of summation.
    bias_shape : tuple of four int, optional
        Shape of the bias, where its gradient is asked for.
    """
    given = problem, device, vector
    keys = _plan_tensor.backward(*given, not deterministic)
    keys = keys or _plan_generic.backward(*given, not deterministic)
    plans = [_prepare(problem, vector), keys]
    if deterministic:
        query = _plan_tensor.backward_query(*given) or _plan_generic.backward_query(*given)
        plans.append(query)
    elif keys.kernel == "attention_backward":
        plans.append(_convert_fragments(problem, keys))
    elif not problem.sums_are_dq:
        plans.append(_convert(problem))
    if bias_shape is not None:
        plans.append(_plan_generic.backward_bias(*given, bias_shape))
    if problem.sinks:
        plans.append(_flat("attention_backward_sinks", problem, problem.q_heads * 256, ()))
    return tuple(plans)


def _flat(kernel: str, problem: Problem, threads: int, constants: Constants) -> Plan:
    """A kernel of 256 threads a block without tiles, for so many threads."""
    named = (*types(problem), *constants, ("THREADS", 256))
    return Plan(kernel, named, grid(-(-threads // 256)), 256)


def _prepare(problem: Problem, vector: int) -> Plan:
    chunks = problem.value_dim // vector
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= min(chunks, 32))
    constants = (("VALUE_DIM", problem.value_dim), ("VECTOR", vector), ("LANES", lanes))
    threads = math.prod(problem.lse_shape) * lanes
    return _flat("attention_backward_prepare", problem, threads, constants)


def _convert(problem: Problem) -> Plan:
    values = problem.batch * problem.q_len * problem.q_heads * problem.head_dim
    return _flat("convert_dq", problem, values, (("HEAD_DIM", problem.head_dim),))


def _convert_fragments(problem: Problem, keys: Plan) -> Plan:
    warps = problem.batch * problem.q_heads * -(-problem.q_len // 16)
    tile = [(name, keys.constant(name)) for name in ("BLOCK_M", "BLOCK_N")]  # of block lists
    constants = (
        ("HEAD_DIM", problem.head_dim), ("VALUE_DIM", problem.value_dim), *tile, *features(problem)
    )
    return _flat("convert_dq_fragments", problem, warps * 32, constants)


def combine(plan: Plan, rows: int) -> Plan | None:
    """The kernel that puts partial results of so many split rows of tiles together."""
    kernel = _ON_TENSOR_CORES.get(plan.kernel)
    if kernel is None:
        return None
    by_keys = plan.kernel == "attention_backward"
    warps = rows * int(plan.constant("BLOCK_N" if by_keys else "BLOCK_M"))
    constants = (*plan.constants, ("OF_KEYS", by_keys))
    threads = 32 * int(plan.constant("WARPS"))
    return Plan(kernel, constants, grid(-(-warps * 32 // threads)), threads)


@lru_cache(maxsize=4096)
def pack_mask(problem: Problem, words: int) -> Plan:
    """The kernel that writes a mask as so many words of bits."""
    return _flat("pack_mask", problem, words, ())


def reads_words(plan: Plan) -> bool:
    """Whether the kernel reads a boolean mask as bits: those on tensor cores do."""
    return plan.kernel in _ON_TENSOR_CORES and ("HAS_MASK", True) in plan.constants


def partial_sizes(plan: Plan) -> tuple[int, int]:
    """Numbers in a partial result of a tensor-core kernel: values, and lse."""
    block_m, block_n, head_dim, value_dim = (
        int(plan.constant(name)) for name in ("BLOCK_M", "BLOCK_N", "HEAD_DIM", "VALUE_DIM")
    )
    if plan.kernel.startswith("attention_forward"):
        return block_m * value_dim, block_m
    if plan.kernel == "attention_backward":
        return block_n * (head_dim + value_dim), 0
    return block_m * head_dim, 0


def dropout_mask(problem: Problem) -> Plan:
    """The kernel that writes the keep mask."""
    return _flat("dropout_mask", problem, math.prod(problem.score_shape), ())
