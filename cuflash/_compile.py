"""Source text to machine code by NVRTC, and machine code to kernels: once per device.

CuPy's own way (``RawModule(code=...)``) adds ``-ftz=true`` and the present GPU's architecture.
cuflash keeps subnormal numbers, compiles for architectures that are not present and reads the
assembler's log, so it calls NVRTC itself and gives CuPy the finished file. That file is its disk
cache, in CuPy's folder (``CUPY_CACHE_DIR``).
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cuflash._interop import cupy_module
from cuflash._plan import Plan
from cuflash._source import source

_SPILLS = re.compile(r"(\d+) bytes spill stores")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_COMPLAINT = re.compile(r"^.*\bC75\d\d\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """Machine code of one kernel variant, and what the assembler said of it.

    Attributes
    ----------
    code : bytes
        A cubin; PTX where the architecture is newer than NVRTC.
    registers, spill_bytes, static_shared_bytes : int
        Of each thread, the last of each block.
    complaints : tuple of str
        Messages of the assembler that it serialises or ignores something (C75xx).
    """

    code: bytes
    registers: int = 0
    spill_bytes: int = 0
    static_shared_bytes: int = 0
    complaints: tuple[str, ...] = ()


def nvrtc() -> Any:
    """CuPy's binding of NVRTC, or one sentence that says what is missing."""
    cupy_module()
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            "Compiling kernels needs NVRTC of CuPy's CUDA version: "
            'pip install "cuflash[cuda13]" (or cuda12) brings it.'
        ) from error
    return nvrtc


@lru_cache(maxsize=1)
def supported_archs() -> tuple[int, ...]:
    """Architectures that the installed NVRTC compiles for."""
    return tuple(nvrtc().getSupportedArchs())


def _target(arch: int) -> str:
    known = supported_archs()
    if arch in known:
        return f"sm_{arch}"
    if arch < min(known):
        version = ".".join(map(str, nvrtc().getVersion()))
        raise RuntimeError(
            f"NVRTC {version} compiles for sm_{min(known)} and newer. Got sm_{arch}: "
            'install "cuflash[cuda12]".'
        )
    return f"compute_{max(a for a in known if a <= arch)}"


def _options(plan: Plan, arch: int) -> tuple[str, ...]:
    # wgmma and setmaxnreg exist in the architecture-specific instruction set alone.
    target = "sm_90a" if plan.for_hopper else _target(arch)
    return (f"-arch={target}", "--std=c++17", "-ftz=false", "-fmad=true")


def build(plan: Plan, arch: int) -> Build:
    """Compiles one kernel variant; needs neither GPU nor driver.

    Raises
    ------
    RuntimeError
        With the compiler's message, if it refuses the source.
    """
    compiler = nvrtc()
    options = (*_options(plan, arch), "--ptxas-options=-v")
    text = source(plan.kernel, plan.constants)
    program = compiler.createProgram(text, f"{plan.kernel}.cu", (), ())
    try:
        try:
            compiler.compileProgram(program, options)
        except compiler.NVRTCError as error:
            log = compiler.getProgramLog(program)
            message = f"{plan.kernel} could not be compiled for sm_{arch}:\n{log}"
            raise RuntimeError(message) from error
        log = compiler.getProgramLog(program)
        if _target(arch).startswith("compute"):
            return Build(compiler.getPTX(program))
        code = compiler.getCUBIN(program) + b"\0"  # CuPy drops the last byte, as if of a text
    finally:
        compiler.destroyProgram(program)
    return Build(
        code,
        max((int(found) for found in _REGISTERS.findall(log)), default=0),
        sum(int(found) for found in _SPILLS.findall(log)),
        max((int(found) for found in _SHARED.findall(log)), default=0),
        tuple(_COMPLAINT.findall(log)),
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept: CuPy's cache."""
    default = os.path.expanduser("~/.cupy/kernel_cache")
    return Path(os.environ.get("CUPY_CACHE_DIR") or default)


def _cache_file(plan: Plan, arch: int) -> Path:
    text = source(plan.kernel, plan.constants)
    key = hashlib.sha256(repr((text, _options(plan, arch), nvrtc().getVersion())).encode())
    ending = "ptx" if _target(arch).startswith("compute") else "cubin"
    return cache_folder() / f"cuflash-{key.hexdigest()[:40]}.{ending}"


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def cached_file(plan: Plan, arch: int) -> Path | None:
    """The file with a variant's machine code, compiled if it is missing or damaged.

    None if no file can be kept.
    """
    path = _cache_file(plan, arch)
    seal = path.with_suffix(".sha256")
    try:
        if seal.read_bytes() == _digest(path.read_bytes()):
            return path
    except OSError:
        pass
    return store(build(plan, arch).code, path)


def store(code: bytes, path: Path) -> Path | None:
    """Writes machine code and its checksum, each in one step; None if the folder refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, content in ((path, code), (path.with_suffix(".sha256"), _digest(code))):
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cuflash-")
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o644)
            os.replace(name, target)
    except OSError:
        return None
    return path


def fill_cache(plan: Plan, arch: int) -> Build:
    """Compiles a variant whether or not it is cached, keeps it, and tells about it."""
    built = build(plan, arch)
    store(built.code, _cache_file(plan, arch))
    return built


_kernels: dict[tuple[int, str, Any], Any] = {}
_locks: dict[tuple[int, str, Any], threading.Lock] = {}


@lru_cache(maxsize=4096)
def kernel(plan: Plan, device_index: int, arch: int) -> Any:
    """The loaded kernel of a plan on the current device, as a ``cupy.cuda.Function``."""
    key = (device_index, plan.kernel, plan.constants)  # plans of many sizes share it
    with _locks.setdefault(key, threading.Lock()):
        if key not in _kernels:
            _kernels[key] = _load(plan, arch)
        return _kernels[key]


def _load(plan: Plan, arch: int) -> Any:
    cupy = cupy_module()
    path = cached_file(plan, arch)
    if path is not None:
        module = cupy.RawModule(path=str(path))
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(build(plan, arch).code)
            file.flush()
            module = cupy.RawModule(path=file.name)
            module.compile()
    loaded = module.get_function(plan.kernel)
    if plan.shared_bytes > 48 * 1024:
        loaded.max_dynamic_shared_size_bytes = plan.shared_bytes
    return loaded.kernel
