"""Who is measured: every provider is a plug-in that says whether it is present.

A provider takes the inputs in (`load`) and makes a `Case` of them (`prepare`): a call without
arguments, and what is needed to read its result. To add one, write a class and name it in `ALL`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import machine
import plain
from flash_providers import FlashPackage
from inputs import SEED, Inputs
from provider import Case, Provider, Skipped
from torch_providers import HALVES, Flex, PlainTorch, TorchSdpa, to_torch, torch_missing
from workloads import GRADIENTS, Workload

# A checkout that is not installed is measured as it stands.
sys.path.insert(0, str(machine.ROOT))


class Cuflash(Provider):
    """The library of this checkout, on the arrays as they come (NumPy or CuPy)."""

    name = "cuflash"
    replays_dropout = True
    precision = "ieee"

    def __init__(self) -> None:
        self._explained: dict[tuple[Workload, str], Any] = {}

    def missing(self) -> str | None:
        try:
            import cuflash
        except ImportError as error:
            return str(error)
        return None if hasattr(cuflash, "attention") else "cuflash has no attention here"

    def version(self, device: str) -> str:
        import cuflash

        return f"cuflash {getattr(cuflash, '__version__', 'unknown')}"

    def load(self, inputs: Inputs) -> Any:
        w = inputs.workload
        mask = None if w.mask is None else w.mask.make(w.q_len, inputs.q)
        return inputs.q, inputs.k, inputs.v, inputs.dout, inputs.bias, mask

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        import cuflash

        w = inputs.workload
        q, k, v, dout, bias, mask = loaded
        options = {"causal": w.causal, "window": w.window, "bias": bias, "mask": mask,
                   "precision": self.precision,
                   "dropout": w.dropout, "seed": SEED if w.dropout else None}
        kernel, tile = self._plan(inputs, loaded, options, direction)

        def forward() -> Any:
            return cuflash.attention(q, k, v, **options, return_lse=True)

        def both() -> Any:
            return cuflash.attention_backward(dout, q, k, v, *forward(), **options)

        if direction == "call":
            return Case(lambda: cuflash.attention(q, k, v, **options),
                        lambda out: out, False, kernel, tile)
        if direction == "forward":
            return Case(forward, lambda result: result[0], False, kernel, tile)
        if direction == "both":
            return Case(both, lambda grads: grads[0], False, kernel, tile)
        kept = forward()
        return Case(lambda: cuflash.attention_backward(dout, q, k, v, *kept, **options),
                    lambda grads: grads[0], False, kernel, tile)

    def _plan(
        self, inputs: Inputs, loaded: Any, options: dict[str, Any], direction: str
    ) -> tuple[str | None, tuple[int, int] | None]:
        """Name what runs, and its tile, by `explain`; its failure is worth no lost measurement."""
        import cuflash

        case = (inputs.workload, inputs.device)
        if case not in self._explained:  # it may compile: once for all directions
            try:
                self._explained[case] = cuflash.explain(*loaded[:3], **options)
            except Exception:
                self._explained[case] = None
        found = self._explained[case]
        plans = getattr(found, "plans", ())
        if not plans:
            return getattr(found, "kernel", None), None
        plans = {"backward": plans[1:], "both": plans}.get(direction, plans[:1])
        tiled = [dict(plan.constants) for plan in plans if "BLOCK_M" in dict(plan.constants)]
        tile = (tiled[0]["BLOCK_M"], tiled[0]["BLOCK_N"]) if tiled else None
        return " + ".join(plan.kernel for plan in plans), tile


class CuflashTf32(Cuflash):
    """The same, with float32 factors rounded to TF32 for the tensor cores."""

    name = "cuflash-tf32"
    precision = "tf32"


class CuflashFromTorch(Cuflash):
    """The same, on PyTorch's CUDA tensors, which come and go by DLPack."""

    name = "cuflash-torch"
    devices = ("cuda",)

    def missing(self) -> str | None:
        return super().missing() or torch_missing()

    def load(self, inputs: Inputs) -> Any:
        *arrays, mask = super().load(inputs)
        return *(x if x is None else to_torch(x, inputs) for x in arrays), mask


class CuflashGraph(Cuflash):
    """The same, replayed from a CUDA graph that captured one call."""

    name = "cuflash-graph"
    devices = ("cuda",)

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        import cupy

        if direction != "call":
            raise Skipped("graphs are measured by the host's time of a call only")
        case = super().prepare(inputs, loaded, direction)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            case.call()  # compiles, which is not to be captured
            stream.synchronize()
            stream.begin_capture()
            out = case.call()
            graph = stream.end_capture()

        def replay() -> Any:
            graph.launch()
            return out

        return replace(case, call=replay)


class Plain(Provider):
    """Matmul, softmax, matmul, in NumPy or CuPy."""

    name = "plain"

    def missing(self) -> str | None:
        return None  # NumPy is always there, and `machine.missing` asks for CuPy

    def version(self, device: str) -> str:
        xp = machine.array_library(device)
        return f"{xp.__name__} {xp.__version__}"

    def load(self, inputs: Inputs) -> Any:
        xp, w = machine.array_library(inputs.device), inputs.workload
        q, k, v, dout = (
            xp.ascontiguousarray(x.swapaxes(1, 2).astype(plain.dtype_name(w), copy=False))
            for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        if w.q_heads != w.kv_heads:
            k, v = (xp.repeat(x, w.q_heads // w.kv_heads, axis=1) for x in (k, v))
        return q, k, v, dout

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        xp, w = machine.array_library(inputs.device), inputs.workload
        q, k, v, dout = loaded
        kernel = f"{xp.__name__}.matmul"
        by_head = self._memory_note(inputs, direction)
        note = by_head or self._dtype_note(w)
        scores = plain.added_scores(xp, w, inputs.bias), plain.drawing(xp, w)
        if direction not in GRADIENTS:
            def forward() -> Any:
                if by_head:
                    return plain.forward_by_head(xp, q, k, v, *scores)
                return plain.forward(xp, q, k, v, *scores).out

            return Case(forward, lambda out: out, True, kernel, note=note)
        known = direction == "backward" and not by_head
        kept = plain.forward(xp, q, k, v, *scores) if known else None

        def gradients() -> Any:
            if by_head:
                return plain.backward_by_head(xp, dout, q, k, v, *scores)
            made = plain.forward(xp, q, k, v, *scores) if kept is None else kept
            return plain.backward(xp, dout, q, k, v, made)

        def backward() -> Any:
            dq, dk, dv = gradients()
            return dq, plain.sum_groups(dk, w.kv_heads), plain.sum_groups(dv, w.kv_heads)

        return Case(backward, lambda grads: grads[0], True, kernel, note=note)

    @staticmethod
    def _dtype_note(workload: Workload) -> str | None:
        computed = plain.dtype_name(workload)
        return None if computed == workload.dtype else f"computes in {computed}"

    @staticmethod
    def _memory_note(inputs: Inputs, direction: str) -> str | None:
        """Find whether all heads fit at once; where not, NumPy goes head by head."""
        need = plain.matrix_bytes(inputs.workload, direction)
        free = machine.free_bytes(inputs.device)
        if need * 1.1 < free:
            return None
        text = f"its matrices need {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"
        if inputs.device == "cuda":
            raise Skipped(text)
        again = ", and the backward makes p again" if direction == "backward" else ""
        return f"one head at a time{again}: {text}"


ALL: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Cuflash(),
        CuflashTf32(),
        CuflashGraph(),
        CuflashFromTorch(),
        Plain(),
        PlainTorch(),
        TorchSdpa("cudnn", "CUDNN_ATTENTION", dtypes=HALVES),
        TorchSdpa("fa2", "FLASH_ATTENTION", dtypes=HALVES),
        FlashPackage("fa3", "flash_attn_interface", "tokenspeed-fa3", has_backward=False),
        FlashPackage("fa4", "flash_attn.cute", "flash-attn-4", has_backward=True),
        TorchSdpa("efficient", "EFFICIENT_ATTENTION", dtypes=(*HALVES, "float32")),
        Flex(),
        TorchSdpa("sdpa", None, devices=("cuda", "cpu")),
    )
}
