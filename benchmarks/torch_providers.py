"""PyTorch's own attention, and the plain sequence of its operations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import machine
import numpy as np
import plain
from inputs import Inputs
from provider import Case, Provider, Skipped
from workloads import ITEM_BYTES, Workload

HALVES = ("float16", "bfloat16")
WITH_BIAS = ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", None)  # backends that take one
MATRICES = 5  # of the size of the scores, that plain autograd holds at once


class TorchProvider(Provider):
    """A function of PyTorch's tensors q, k and v, and its gradients by autograd.

    Attributes
    ----------
    heads_first : bool
        As in `provider.Case`.
    """

    torch_memory = True
    heads_first = True

    @abstractmethod
    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        """Make the function that computes out. Raises `Skipped` for what it can't do."""

    def kernel(self) -> str:
        """Name what runs."""
        return self.name

    def missing(self) -> str | None:
        return torch_missing()

    def version(self, device: str) -> str:
        import torch

        return f"torch {torch.__version__}"

    def load(self, inputs: Inputs) -> Any:
        arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
        tensors = tuple(to_torch(x, inputs) for x in arrays)
        if not self.heads_first:
            return tensors
        return tuple(x.transpose(1, 2).contiguous() for x in tensors)

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        import torch

        torch.set_float32_matmul_precision("highest")  # no TF32
        attend, kernel = self.function(inputs), self.kernel()
        q, k, v, dout = loaded
        if direction in ("call", "forward"):
            return Case(lambda: attend(q, k, v), lambda out: out, self.heads_first, kernel)
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        if direction == "both":
            return Case(lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
                        lambda grads: grads[0], self.heads_first, kernel)
        out = attend(*leaves)
        return Case(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
                    lambda grads: grads[0], self.heads_first, kernel)


class TorchSdpa(TorchProvider):
    """PyTorch's scaled_dot_product_attention with one of its backends, or with its own choice."""

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

    def active(self) -> AbstractContextManager[Any]:
        if self.backend is None:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def version(self, device: str) -> str:
        import torch

        number = torch.backends.cudnn.version() if self.backend == "CUDNN_ATTENTION" else None
        if number is None:
            return super().version(device)
        major, minor, patch = number // 10000, number // 100 % 100, number % 100
        return f"cuDNN {major}.{minor}.{patch} in {super().version(device)}"

    def kernel(self) -> str:
        return self.backend or "PyTorch's choice"

    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        import torch

        w = inputs.workload
        reason = self._obstacle(w)
        if reason:
            raise Skipped(reason)
        options: dict[str, Any] = {
            "is_causal": w.causal, "enable_gqa": w.q_heads != w.kv_heads, "dropout_p": w.dropout,
        }
        if w.bias:  # PyTorch takes no causal mask beside one: it is a part of the bias
            bias, hidden = to_torch(inputs.bias, inputs), hidden_scores(inputs)
            options["is_causal"] = False
            options["attn_mask"] = (
                bias if hidden is None else bias.masked_fill(hidden, -torch.inf)
            )
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: attend(q, k, v, **options)

    def _obstacle(self, w: Workload) -> str | None:
        if w.dtype not in self.dtypes:
            return f"{self.name} takes no {w.dtype}"
        if w.mask:
            return f"{self.name} takes no block mask"
        if w.window:
            return "PyTorch has no window"
        if w.bias and self.backend not in WITH_BIAS:
            return f"{self.name} takes no bias"
        if w.causal and w.q_len != w.kv_len:
            return "PyTorch aligns the causal mask top-left"
        if self.name == "efficient" and w.q_heads != w.kv_heads:
            return "efficient takes no grouped heads"
        return None


class PlainTorch(TorchProvider):
    """Matmul, scale, bias, mask, softmax, dropout, matmul, as GPT-2's implementations write it."""

    name = "plain-torch"

    def kernel(self) -> str:
        return "torch.matmul"

    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        import torch

        w = inputs.workload
        need = MATRICES * w.score_size * ITEM_BYTES[w.dtype]
        if need > machine.free_bytes(inputs.device):
            raise Skipped(f"its matrices need {need / 1e9:.0f} GB")
        bias = to_torch(inputs.bias, inputs) if w.bias else None
        hidden = hidden_scores(inputs)

        def attend(q: Any, k: Any, v: Any) -> Any:
            if w.q_heads != w.kv_heads:
                k, v = (x.repeat_interleave(w.q_heads // w.kv_heads, dim=1) for x in (k, v))
            scores = q @ k.transpose(-2, -1) * w.head_dim**-0.5
            if bias is not None:
                scores = scores + bias
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            p = torch.softmax(scores, dim=-1)
            if w.dropout:
                p = torch.nn.functional.dropout(p, w.dropout)
            return p @ v

        return attend


class Flex(TorchProvider):
    """FlexAttention, compiled, with the block mask of the workload.

    Its forward is that of training, so that one compilation serves both directions.
    """

    name = "flex"
    devices = ("cuda",)
    dtypes = HALVES

    def __init__(self) -> None:
        self._compiled: tuple[Workload, Callable[[Any, Any, Any], Any]] | None = None

    def missing(self) -> str | None:
        reason = torch_missing()
        if reason is None and find_spec("triton") is None:
            return "FlexAttention is compiled by triton, which is not here"
        return reason

    def active(self) -> AbstractContextManager[Any]:
        from torch._functorch import config

        return config.patch(donated_buffer=False)  # the graph is kept for a second backward

    def kernel(self) -> str:
        return "flex_attention"

    def load(self, inputs: Inputs) -> Any:
        *leaves, dout = super().load(inputs)
        return *(x.requires_grad_() for x in leaves), dout

    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        w = inputs.workload
        if w.mask is None:
            raise Skipped("flex is measured with block masks only")
        if w.bias or w.dropout or w.q_heads != w.kv_heads:
            raise Skipped("flex is measured without other options")
        if self._compiled is None or self._compiled[0] != w:
            torch.compiler.reset()  # after some recompilations it would run uncompiled
            mask = flex_mask(w, inputs.device)
            attend = torch.compile(flex_attention, dynamic=False)
            self._compiled = w, lambda q, k, v: attend(q, k, v, block_mask=mask)
        return self._compiled[1]


def flex_mask(workload: Workload, device: str) -> Any:
    """Make FlexAttention's block mask, by the predicate of the pattern."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    w, mask = workload, workload.mask
    assert mask is not None
    visible = mask.visible(w.q_len, lambda table: torch.from_numpy(table).to(device))
    heads = None if mask.heads == 1 else mask.heads
    return create_block_mask(lambda b, h, i, j: visible(h, i, j), None, heads, w.q_len, w.kv_len,
                             device=device, BLOCK_SIZE=mask.block_size)


def hidden_scores(inputs: Inputs) -> Any:
    """Make the (q_len, kv_len) tensor that is True where a score is hidden, or None."""
    visible = plain.visible(machine.array_library(inputs.device), inputs.workload)
    return None if visible is None else to_torch(~visible, inputs)


def torch_missing() -> str | None:
    """Say why PyTorch is absent, or None."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def to_torch(array: Any, inputs: Inputs) -> Any:
    """Hand an array to PyTorch without a copy, in its own layout."""
    import torch

    if inputs.device == "cuda":
        if not torch.cuda.is_available():
            raise Skipped("PyTorch sees no GPU")
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":  # NumPy's own DLPack has no bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
