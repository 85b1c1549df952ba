"""Every kernel variant builds for every architecture, without spills and complaints."""

import re

import pytest

cupy = pytest.importorskip("cupy")

from forwards import HOPPER  # noqa: E402

from cuflash import _compile, _plan, _precompile, _source, _variants  # noqa: E402
from cuflash._device import Device  # noqa: E402
from cuflash._tiles import HOPPER_FORWARD, HopperTile, spill_allowance  # noqa: E402

try:
    ARCHS = _precompile.default_archs()
except ImportError:
    pytest.skip("no NVRTC", allow_module_level=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_all_variants_build(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    plans = _variants.variants(arch)
    assert len(plans) > 100
    # For sm_89 the same texts are compiled as for sm_86, and to much the same code, since nothing
    # here asks for what is new there (float8): one of each kernel shows that they can be.
    if arch == 89 and texts(plans) == texts(_variants.variants(86)):
        plans = list({plan.kernel: plan for plan in plans}.values())
        monkeypatch.setattr(_precompile, "variants", lambda arch: plans)
    reports = list(_precompile.reports([arch]))
    assert len(reports) == len(plans)
    assert [str(report) for report in reports if report.faults] == []
    assert all(report.built.registers > 0 for report in reports)
    assert not any(report.built.spill_bytes for report in reports if is_plain_hopper(report.plan))
    assert all(has_registers(report) for report in reports if report.plan.kernel == HOPPER)
    limit = Device.of_arch(arch).shared_bytes
    assert all(r.plan.shared_bytes + r.built.static_shared_bytes <= limit for r in reports)
    assert len(list(tmp_path.glob("*.cubin"))) == len(reports)


def is_plain_hopper(plan):
    """Whether it is the Hopper kernel, for scores that are only scaled and banded."""
    options = {name for name, value in plan.constants if name.startswith("HAS_") and value}
    return plan.kernel == HOPPER and options <= {"HAS_LEFT", "HAS_RIGHT"}


def has_registers(report):
    """Whether blocks of the Hopper kernel start with what their warp groups share out later on."""
    plan = report.plan
    producer, consumer = (plan.constant(f"{role}_REGISTERS") for role in ("PRODUCER", "CONSUMER"))
    needed = 128 * producer + (plan.threads - 128) * consumer
    return needed <= plan.threads * report.built.registers <= 65536


def texts(plans):
    return {(plan.kernel, plan.constants) for plan in plans}


def test_variants_cover_tables_and_kernels():
    plans = _variants.variants(90)
    kernels = {path.stem for path in _source.folder().glob("*.cu")}
    assert {plan.kernel for plan in plans} == kernels
    features = {name for plan in plans for name, value in plan.constants if value is True}
    assert {f"HAS_{name}" for name in (
        "LEFT", "RIGHT", "MASK", "BLOCKS", "BIAS", "ALIBI", "SOFTCAP", "DROPOUT", "SINKS",
    )} < features


def test_variants_cover_the_tiles_of_the_hopper_kernel():
    """All of them for sm_90, with each feature, and none for the others."""
    plans = [plan for plan in _variants.variants(90) if plan.kernel == HOPPER]
    names = [name.upper() for name in vars(HOPPER_FORWARD[0].plain[0])]
    assert {HopperTile(*map(plan.constant, names)) for plan in plans} == {
        tile for entry in HOPPER_FORWARD
        for tile in entry.plain + entry.long + entry.rich + entry.sparse
    }  # fmt: skip
    assert {plan.constant("Element") for plan in plans} == {"float16", "bfloat16"}
    features = {name for plan in plans for name, value in plan.constants if value is True}
    assert {f"HAS_{name}" for name in (
        "LEFT", "RIGHT", "BLOCKS", "ALIBI", "SOFTCAP", "DROPOUT", "SINKS",
    )} < features  # fmt: skip
    for arch in set(ARCHS) - {90}:
        assert HOPPER not in {plan.kernel for plan in _variants.variants(arch)}


def test_serialised_products_are_a_fault(monkeypatch):
    """The assembler complains where sums are read and nobody has waited for the products."""
    plan = next(plan for plan in _variants.variants(90) if plan.kernel == HOPPER)
    text, wait = _source.source(plan.kernel, plan.constants), "wgmma.wait_group.sync.aligned %0;"
    assert wait in text
    monkeypatch.setattr(_compile, "source", lambda *_: text.replace(wait, ""))
    built = _compile.build(plan, 90)
    assert any("C75" in fault for fault in _precompile.Report(90, plan, 1.0, built).faults)


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
