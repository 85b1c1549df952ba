"""A call explained: which kernels, in what shape, and what they move through memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from cuflash import _compile, _plan
from cuflash._device import Device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._params import row_bits
from cuflash._problem import Problem

_MIB = 2**20


@dataclass(frozen=True)
class Explanation:
    """How a call runs. ``print`` it; the parts are there as attributes.

    Attributes
    ----------
    problem : Problem
        What is asked.
    device : Device or None
        The GPU; None on the CPU.
    plans : tuple of Plan
        The launches, the forward pass first, then the backward pass.
    density : float
        Share of the blocks of a block mask that are present; 1 without one.
    """

    problem: Problem
    device: Device | None
    plans: tuple[_plan.Plan, ...] = ()
    density: float = 1.0

    @cached_property
    def builds(self) -> tuple[_compile.Build, ...]:
        """Registers and spills of each plan; empty where no compiler is installed."""
        if self.device is None:
            return ()
        try:
            return tuple(_compile.build(plan, self.device.arch) for plan in self.plans)
        except (ImportError, RuntimeError):  # no compiler, or none for this architecture
            return ()

    @property
    def kernel(self) -> str:
        """Name of the forward kernel; "reference" is NumPy's."""
        return self.plans[0].kernel if self.plans else "reference"

    @property
    def plain_bytes(self) -> int:
        """Bytes between chip and memory in plain attention, which writes the scores down.

        Scores and softmax are written and read once each: the model of Dao et al. (2022).
        """
        rows, keys = _rows_and_keys(self.problem)
        return 4 * _score_bytes(self.problem) + rows + keys

    @property
    def forward_bytes(self) -> int:
        """Bytes between chip and memory in the forward pass: keys once for each tile of queries."""
        rows, keys = _rows_and_keys(self.problem)
        block_m = int(self.plans[0].constant("BLOCK_M")) if self.plans else 256
        seen = min(self.density, _visible_share(self.problem))
        passes = max(1.0, self.problem.q_len / block_m * seen)
        return round(rows + keys * passes)

    def __str__(self) -> str:
        lines = [("problem", _sentence(self.problem))]
        if self.problem.blocks:
            lines.append(("mask", f"block mask, {self.density:.1%} of the blocks present"))
        if self.device is None:
            lines.append(("device", "CPU: cuflash.reference, tile by tile in NumPy"))
        else:
            lines.append(("device", f"{self.device.name}, sm_{self.device.arch}"))
        for number, plan in enumerate(self.plans):
            direction = {0: "forward", 1: "backward"}.get(number, "")
            build = self.builds[number] if self.builds else None
            lines += [(direction, plan.kernel), *(("", text) for text in _details(plan, build))]
        lines += [("memory", text) for text in _traffic(self)]
        return "\n".join(f"{label:9}{text}" for label, text in lines)


def explain(problem: Problem, device: Device | None, density: float = 1.0) -> Explanation:
    """Plans a problem for arrays with aligned, contiguous rows."""
    if device is None:
        return Explanation(problem, None, density=density)
    bits = row_bits(problem)
    vector = (bits & -bits) // ELEMENT_TYPES[problem.dtype].size
    forward = _plan.forward(problem, device, vector)
    plans = (forward, *_plan.backward(problem, device, vector, False, None))
    return Explanation(problem, device, plans, density)


def _sentence(problem: Problem) -> str:
    sizes = (
        f"batch {problem.batch}, queries {problem.q_len}, keys {problem.kv_len}, "
        f"heads {problem.q_heads}/{problem.kv_heads}, head_dim {problem.head_dim}"
    )
    if problem.value_dim != problem.head_dim:
        sizes += f"/{problem.value_dim}"
    features = [f"causal {problem.causal}"] if problem.causal else []
    if problem.window != (None, None):
        features.append(f"window {problem.window}")
    features += [name for name in ("mask", "alibi", "sinks") if getattr(problem, name)]
    features += ["bias"] if problem.bias else []
    features += [problem.precision] if problem.precision != "ieee" else []
    features += [f"softcap {problem.softcap:g}"] if problem.softcap else []
    features += [f"dropout {problem.dropout:g}"] if problem.dropout else []
    return ", ".join([sizes, problem.dtype, *features])


def _details(plan: _plan.Plan, build: _compile.Build | None) -> list[str]:
    names = dict(plan.constants)
    launch = f"  grid {plan.grid:,} blocks of {plan.threads} threads"
    if plan.shared_bytes:
        launch += f", {plan.shared_bytes / 1024:.1f} KiB shared memory"
    if build is not None and build.registers:  # PTX has none yet
        spills = f"{build.spill_bytes} bytes spilled" if build.spill_bytes else "no spills"
        launch += f", {build.registers} registers, {spills}"
    if not names.keys() & {"MIN_BLOCKS", "STAGES"}:  # no tiles
        return [launch]
    tile = f"  tile {names['BLOCK_M']} queries x {names['BLOCK_N']} keys"
    if "VECTOR" in names:
        return [f"{tile}, {names['VECTOR']} elements per access", launch]
    return [f"{tile}, {names['WARPS']} warps on tensor cores, {names['STAGES']} stages", launch]


def _visible_share(problem: Problem) -> float:
    """Share of the scores that causal masking and windows leave, estimated at 64 rows."""
    if not problem.q_len or not problem.kv_len:
        return 0.0
    left, right = problem.band
    seen, count = 0, min(64, problem.q_len)
    for sample in range(count):
        i = (2 * sample + 1) * problem.q_len // (2 * count) + problem.offset
        first = 0 if left is None else max(0, i - left)
        last = problem.kv_len - 1 if right is None else min(problem.kv_len - 1, i + right)
        seen += max(0, last - first + 1)
    return seen / (count * problem.kv_len)


def _score_bytes(problem: Problem) -> int:
    return math.prod(problem.score_shape) * ELEMENT_TYPES[problem.dtype].size


def _lse_bytes(problem: Problem) -> int:
    return math.prod(problem.lse_shape) * ELEMENT_TYPES[problem.dtype].compute_size


def _rows_and_keys(problem: Problem) -> tuple[int, int]:
    """Bytes of q, out and lse, and of k and v for each query head."""
    width = (problem.head_dim + problem.value_dim) * ELEMENT_TYPES[problem.dtype].size
    heads = problem.batch * problem.q_heads
    return heads * problem.q_len * width + _lse_bytes(problem), heads * problem.kv_len * width


def _traffic(explained: Explanation) -> list[str]:
    plain, tiled = explained.plain_bytes, explained.forward_bytes
    problem = explained.problem
    return [
        f"forward moves {tiled / _MIB:,.1f} MiB (keys and values once per query tile); plain "
        f"attention {plain / _MIB:,.1f} MiB, {plain / max(1, tiled):.1f} times as much",
        f"beside its output it keeps {_lse_bytes(problem) / _MIB:,.2f} MiB (lse); plain attention "
        f"{_score_bytes(problem) / _MIB:,.1f} MiB",
    ]
