"""FlashAttention in packages of its own, newer than the one inside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from inputs import Inputs
from provider import Case, Skipped
from torch_providers import HALVES, TorchProvider
from workloads import GRADIENTS


class FlashPackage(TorchProvider):
    """`flash_attn_func` of a package, on the layout of the inputs.

    Parameters
    ----------
    name : str
    module, package : str
        What is imported, and the distribution that brings it.
    has_backward : bool
        The package is built with the backward pass.
    """

    devices = ("cuda",)
    dtypes = HALVES
    heads_first = False

    def __init__(self, name: str, module: str, package: str, has_backward: bool) -> None:
        self.name = name
        self.module = module
        self.package = package
        self.has_backward = has_backward

    def missing(self) -> str | None:
        reason = super().missing()
        if reason:
            return reason
        try:
            metadata.version(self.package)
            import_module(self.module)
        except Exception as error:  # no package; or one for another PyTorch, CUDA or GPU
            return f"{type(error).__name__}: {error}"
        return None

    def version(self, device: str) -> str:
        return f"{self.package} {metadata.version(self.package)}"

    def prepare(self, inputs: Inputs, loaded: Any, direction: str) -> Case:
        if direction in GRADIENTS and not self.has_backward:
            raise Skipped(f"{self.package} is built without the backward pass")
        return super().prepare(inputs, loaded, direction)

    def function(self, inputs: Inputs) -> Callable[[Any, Any, Any], Any]:
        w = inputs.workload
        if w.dtype not in self.dtypes:
            raise Skipped(f"{self.name} takes no {w.dtype}")
        if w.bias or w.dropout or w.mask:
            raise Skipped(f"{self.name} is measured without bias, dropout and block masks")
        attend = import_module(self.module).flash_attn_func
        options: dict[str, Any] = {"causal": w.causal}
        if w.window:
            options["window_size"] = w.window

        def out(q: Any, k: Any, v: Any) -> Any:
            result = attend(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result  # FA4 gives lse as well

        return out
