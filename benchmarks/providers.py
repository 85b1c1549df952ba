"""Who is measured: every provider is a plug-in that says whether it is present.

A provider takes the inputs in (`load`) and makes a `Case` of them (`prepare`): a call without
arguments, and what is needed to read its result. To add one, write a class and name it in `ALL`.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import machine
import numpy as np
import plain
from inputs import Inputs
from provider import Case, Provider, Skipped
from workloads import Workload

# A checkout that is not installed is measured as it stands.
sys.path.insert(0, str(machine.ROOT))

HALVES = ("float16", "bfloat16")


class Cuflash(Provider):
    """The library of this checkout, on the arrays as they come (NumPy or CuPy)."""

    name = "cuflash"

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
        return inputs.q, inputs.k, inputs.v, inputs.dout

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        import cuflash

        causal = inputs.workload.causal
        q, k, v, dout = loaded
        kernel = self._kernel(inputs, loaded, direction)
        if direction == "call":
            return Case(lambda: cuflash.attention(q, k, v, causal=causal),
                        lambda out: out, False, kernel)
        if direction == "forward":
            return Case(lambda: cuflash.attention(q, k, v, causal=causal, return_lse=True),
                        lambda result: result[0], False, kernel)
        out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
        return Case(lambda: cuflash.attention_backward(dout, q, k, v, out, lse, causal=causal),
                    lambda grads: grads[0], False, kernel)

    def _kernel(self, inputs: Inputs, loaded: Any, direction: str) -> str | None:
        """Name what runs, by `explain`, whose own failure is worth no lost measurement."""
        import cuflash

        case = (inputs.workload, inputs.device)
        if case not in self._explained:  # it may compile: once for all directions
            try:
                self._explained[case] = cuflash.explain(*loaded[:3], causal=inputs.workload.causal)
            except Exception:
                self._explained[case] = None
        found = self._explained[case]
        plans = getattr(found, "plans", ())
        if direction == "backward" and len(plans) > 1:
            return " + ".join(plan.kernel for plan in plans[1:])
        return getattr(found, "kernel", None)


class CuflashFromTorch(Cuflash):
    """The same, on PyTorch's CUDA tensors, which come and go by DLPack."""

    name = "cuflash-torch"
    devices = ("cuda",)

    def missing(self) -> str | None:
        return super().missing() or _torch_missing()

    def load(self, inputs: Inputs) -> Any:
        return tuple(_to_torch(x, inputs) for x in super().load(inputs))


class Plain(Provider):
    """Matmul, softmax, matmul, in NumPy or CuPy."""

    name = "plain"

    def missing(self) -> str | None:
        return None  # NumPy is always there, and `machine.missing` asks for CuPy

    def version(self, device: str) -> str:
        return f"{_array_library(device).__name__} {_array_library(device).__version__}"

    def load(self, inputs: Inputs) -> Any:
        xp, w = _array_library(inputs.device), inputs.workload
        q, k, v, dout = (
            xp.ascontiguousarray(x.swapaxes(1, 2))
            for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        if w.q_heads != w.kv_heads:
            k, v = (xp.repeat(x, w.q_heads // w.kv_heads, axis=1) for x in (k, v))
        return q, k, v, dout

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        xp, w = _array_library(inputs.device), inputs.workload
        q, k, v, dout = loaded
        kernel = f"{xp.__name__}.matmul"
        note = self._memory_note(inputs, direction)
        hidden = plain.hidden_scores(xp, w, q.dtype)
        if direction != "backward":
            if note:
                return Case(lambda: plain.forward_by_head(xp, q, k, v, hidden),
                            lambda out: out, True, kernel, note)
            return Case(lambda: plain.forward(xp, q, k, v, hidden)[0],
                        lambda out: out, True, kernel)
        if note:
            def gradients() -> Any:
                return plain.backward_by_head(xp, dout, q, k, v, hidden)
        else:
            out, p = plain.forward(xp, q, k, v, hidden)

            def gradients() -> Any:
                return plain.backward(xp, dout, q, k, v, out, p)

        def backward() -> Any:
            dq, dk, dv = gradients()
            return dq, plain.sum_groups(dk, w.kv_heads), plain.sum_groups(dv, w.kv_heads)

        return Case(backward, lambda grads: grads[0], True, kernel, note)

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


class TorchSdpa(Provider):
    """PyTorch's scaled_dot_product_attention with one of its backends, or with its own choice."""

    torch_memory = True

    def __init__(
        self,
        name: str,
        backend: str | None,
        devices: tuple[str, ...] = ("cuda",),
        dtypes: tuple[str, ...] = Provider.dtypes,
    ) -> None:
        self.name = name
        self.backend = backend
        self.devices = devices
        self.dtypes = dtypes

    def missing(self) -> str | None:
        return _torch_missing()

    def version(self, device: str) -> str:
        import torch

        return f"torch {torch.__version__}"

    def active(self) -> AbstractContextManager[Any]:
        if self.backend is None:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def load(self, inputs: Inputs) -> Any:
        arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
        return tuple(_to_torch(x, inputs).transpose(1, 2).contiguous() for x in arrays)

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        import torch

        w = inputs.workload
        if w.dtype not in self.dtypes:
            raise Skipped(f"{self.name} takes no {w.dtype}")
        if w.causal and w.q_len != w.kv_len:
            raise Skipped("PyTorch aligns the causal mask top-left")
        if self.name == "efficient" and w.q_heads != w.kv_heads:
            raise Skipped("efficient takes no grouped heads")
        torch.set_float32_matmul_precision("highest")  # no TF32
        attend = torch.nn.functional.scaled_dot_product_attention
        options: dict[str, Any] = {"is_causal": w.causal, "enable_gqa": w.q_heads != w.kv_heads}
        q, k, v, dout = loaded
        kernel = self.backend or "PyTorch's choice"
        if direction != "backward":
            return Case(lambda: attend(q, k, v, **options), lambda out: out, True, kernel)
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        out = attend(*leaves, **options)
        return Case(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
                    lambda grads: grads[0], True, kernel)


def _array_library(device: str) -> Any:
    if device == "cpu":
        return np
    import cupy

    return cupy


def _torch_missing() -> str | None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def _to_torch(array: Any, inputs: Inputs) -> Any:
    """Hand an array to PyTorch without a copy, in its own layout."""
    import torch

    if inputs.device == "cuda":
        if not torch.cuda.is_available():
            raise Skipped("PyTorch sees no GPU")
        return torch.from_dlpack(array)
    if inputs.workload.dtype == "bfloat16":  # NumPy's own DLPack has no bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


ALL: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Cuflash(),
        CuflashFromTorch(),
        Plain(),
        TorchSdpa("cudnn", "CUDNN_ATTENTION", dtypes=HALVES),
        TorchSdpa("fa2", "FLASH_ATTENTION", dtypes=HALVES),
        TorchSdpa("efficient", "EFFICIENT_ATTENTION", dtypes=(*HALVES, "float32")),
        TorchSdpa("sdpa", None, devices=("cuda", "cpu")),
    )
}
