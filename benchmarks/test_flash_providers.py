"""Packages of FlashAttention, by a stand-in for what they bring."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import providers
import pytest
from flash_providers import FlashPackage
from measure import Subject
from provider import Skipped
from workloads import Workload, optional, square

GROUPED = Workload("grouped", 2, 48, 48, 4, 2, 32, "bfloat16", True)


def _attend(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Attention of tensors of shape (batch, seq, heads, head_dim)."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def _bring(monkeypatch: pytest.MonkeyPatch, module: str, attend: Any) -> None:
    for name in ("flash_attn", module):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_func=attend))
    monkeypatch.setattr(metadata, "version", lambda package: "9.9")


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_who_is_absent_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    provider = providers.ALL[name]

    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    assert isinstance(provider, FlashPackage)
    reason = provider.missing()
    assert reason and provider.package in reason


def test_fa3_gives_out_and_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    _bring(monkeypatch, "flash_attn_interface", _attend)
    provider, subject = providers.ALL["fa3"], Subject.of(GROUPED, "cpu")
    assert provider.missing() is None and provider.version("cpu") == "tokenspeed-fa3 9.9"
    loaded = provider.load(subject.inputs)
    case = provider.prepare(subject.inputs, loaded, "forward")
    error = subject.error(provider, case, case.call(), "forward")
    assert error is not None and error < 0.02
    with pytest.raises(Skipped, match="without the backward"):
        provider.prepare(subject.inputs, loaded, "backward")


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_fa4_gives_lse_as_well(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    pytest.importorskip("torch")
    _bring(monkeypatch, "flash_attn.cute",
           lambda q, k, v, causal=False: (_attend(q, k, v, causal), None))
    provider, subject = providers.ALL["fa4"], Subject.of(GROUPED, "cpu")
    case = provider.prepare(subject.inputs, provider.load(subject.inputs), direction)
    for _ in range(2):  # a backward can be repeated
        error = subject.error(provider, case, case.call(), direction)
        assert error is not None and error < 0.05


def test_a_window_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    asked: list[dict[str, Any]] = []
    _bring(monkeypatch, "flash_attn.cute", lambda q, k, v, **options: asked.append(options))
    provider = providers.ALL["fa4"]
    inputs = Subject.of(optional(GROUPED, window=(8, 0)), "cpu").inputs
    provider.prepare(inputs, provider.load(inputs), "forward").call()
    assert asked == [{"causal": True, "window_size": (8, 0)}]


@pytest.mark.parametrize("option", [{"bias": True}, {"dropout": 0.1}])
def test_other_options_are_skipped(option: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    workload = optional(square("x", 1, 64, 2, 32, "bfloat16", True), **option)
    subject = Subject.of(workload, "cpu")
    with pytest.raises(Skipped, match="without bias, dropout"):
        providers.ALL["fa3"].prepare(subject.inputs, (None,) * 4, "forward")
