"""Every kernel variant builds for every architecture, without spills and complaints."""

import re

import pytest

cupy = pytest.importorskip("cupy")

from cuflash import _compile, _plan, _precompile, _source, _variants  # noqa: E402
from cuflash._device import Device  # noqa: E402
from cuflash._tiles import spill_allowance  # noqa: E402

try:
    ARCHS = _precompile.default_archs()
except ImportError:
    pytest.skip("no NVRTC", allow_module_level=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_all_variants_build(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    reports = list(_precompile.reports([arch]))
    assert len(reports) > 100
    assert [str(report) for report in reports if report.faults] == []
    assert all(report.built.registers > 0 for report in reports)
    assert not any(report.built.spill_bytes for report in reports if is_plain_hopper(report.plan))
    limit = Device.of_arch(arch).shared_bytes
    assert all(r.plan.shared_bytes + r.built.static_shared_bytes <= limit for r in reports)
    assert len(list(tmp_path.glob("*.cubin"))) == len(reports)


def is_plain_hopper(plan):
    """Whether it is the Hopper kernel, for scores that are only scaled and banded."""
    options = {name for name, value in plan.constants if name.startswith("HAS_") and value}
    return plan.kernel == "attention_forward_sm90" and options <= {"HAS_LEFT", "HAS_RIGHT"}


def test_variants_cover_tables_and_kernels():
    plans = _variants.variants(90)
    kernels = {path.stem for path in _source.folder().glob("*.cu")}
    assert {plan.kernel for plan in plans} == kernels
    features = {name for plan in plans for name, value in plan.constants if value is True}
    assert {f"HAS_{name}" for name in (
        "LEFT", "RIGHT", "MASK", "BLOCKS", "BIAS", "ALIBI", "SOFTCAP", "DROPOUT", "SINKS",
    )} < features


def test_a_spill_is_a_fault():
    plan = _variants.variants(90)[0]
    allowed = spill_allowance(plan.kernel)
    fine = _compile.Build(b"", registers=100, spill_bytes=allowed)
    bad = _compile.Build(b"", registers=255, spill_bytes=allowed + 4)
    told = _compile.Build(b"", complaints=("info: (C7510) serialized",))
    assert not _precompile.Report(90, plan, 1.0, fine).faults
    assert "spills" in _precompile.Report(90, plan, 1.0, bad).faults[0]
    assert "C7510" in _precompile.Report(90, plan, 1.0, told).faults[0]


def test_a_source_that_does_not_compile_raises_with_the_message():
    plan = _variants.variants(90)[0]
    broken = _plan.Plan(plan.kernel, plan.constants[:-4], 1, 128)
    with pytest.raises(RuntimeError, match=re.escape(plan.kernel)) as error:
        _compile.build(broken, 90)
    assert "undefined" in str(error.value)


def test_a_damaged_cache_file_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    plan = next(p for p in _variants.variants(90) if p.kernel == "dropout_mask")
    path = _compile.cached_file(plan, 90)
    code = path.read_bytes()
    path.write_bytes(code[:100])
    assert _compile.cached_file(plan, 90).read_bytes() == code
    assert (path.stat().st_mode & 0o777) == 0o644


def test_an_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    plan = next(p for p in _variants.variants(90) if p.kernel == "dropout_mask")
    assert _compile.cached_file(plan, 90) is None


def test_the_cache_keys_on_source_and_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    first, second = [p for p in _variants.variants(90) if p.kernel == "dropout_mask"][:2]
    files = {_compile.cached_file(plan, arch) for plan in (first, second) for arch in (80, 90)}
    assert len(files) == 4


@pytest.mark.parametrize("arch", [50, 999])
def test_unknown_architectures(arch):
    with pytest.raises(ValueError, match="arch must be one of"):
        Device.of_arch(arch)
