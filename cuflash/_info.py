"""``python -m cuflash info``: versions, kernel cache, devices, and the kernels they get."""

from __future__ import annotations

import argparse
import ctypes
import platform
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np

import cuflash
from cuflash import _compile, _explain, _interop
from cuflash._device import Device, device
from cuflash._dtypes import ELEMENT_TYPES
from cuflash._plan import Plan
from cuflash._problem import describe

DTYPES = ("float16", "float32", "float64")
HEAD_DIMS = (64, 128, 256)
ABSENT_ARCH = 90  # planned for where no GPU is found

_MIB, _GIB = 2**20, 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--arch", type=int, nargs="+",
        help="plan for these architectures (90 for sm_90) rather than for the devices here",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 if an architecture is unknown, never for what is not installed."""
    found, why_none = devices()
    try:
        planned = [Device.of_arch(arch) for arch in arguments.arch or ()]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for label, text in _facts(why_none):
        print(f"{label:9}{text}")
    for index, gpu in enumerate(found):
        print(f"{f'device {index}':9}{_about(index, gpu)}")
    for gpu in planned or found or [Device.of_arch(ABSENT_ARCH)]:
        print(f"\nKernels on {gpu.name} (sm_{gpu.arch}), rows aligned, causal:")
        print("\n".join(_kernel_table(gpu)))
    return 0


def devices() -> tuple[list[Device], str]:
    """The GPUs that can be used, and why there are none if so."""
    try:
        count = _interop.cupy_module().cuda.runtime.getDeviceCount()
        return [device(index) for index in range(count)], "" if count else "none"
    except (ImportError, RuntimeError) as error:  # CuPy's own errors are RuntimeErrors
        return [], _without_cupy(error) or f"none usable: {error}"


def driver_version() -> int | None:
    """What the CUDA driver supports, 13000 for CUDA 13.0; None without a driver. Asks no CuPy."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 and version.value else None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _facts(why_no_device: str) -> Iterator[tuple[str, str]]:
    """Labels and texts of all that does not depend on one device."""
    driver = driver_version()
    yield "cuflash", cuflash.__version__
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "NumPy", f"{np.__version__}, ml_dtypes {ml_dtypes.__version__}"
    yield "CuPy", _cupy(driver)
    yield "NVRTC", _nvrtc()
    yield "driver", "not found" if driver is None else f"supports CUDA {_dotted(driver)}"
    yield "cache", _cache()
    if why_no_device:
        yield "devices", why_no_device


def _cupy(driver: int | None) -> str:
    try:
        cupy = _interop.cupy_module()
    except ImportError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            return f"cannot be imported: {error.__cause__}"
        extra = "cuda12" if driver is not None and driver < 13000 else "cuda13"
        return f'not installed (pip install "cuflash[{extra}]"); NumPy arrays work without it'
    try:
        return f"{cupy.__version__}, CUDA {_dotted(cupy.cuda.runtime.runtimeGetVersion())}"
    except (ImportError, RuntimeError) as error:
        return f"{cupy.__version__}, without its CUDA runtime: {error}"


def _nvrtc() -> str:
    try:
        version = ".".join(map(str, _compile.nvrtc().getVersion()))
        archs = _compile.supported_archs()
    except ImportError as error:
        return _without_cupy(error) or f"not usable: {error}"
    return f"{version}, compiles for sm_{min(archs)} to sm_{max(archs)}"


def _without_cupy(error: Exception) -> str:
    """What to say where CuPy is the reason, which has a line of its own; else nothing."""
    missing = getattr(error.__cause__, "name", None) == "cupy"
    return "not looked for without CuPy" if missing else ""


def _cache() -> str:
    folder = _compile.cache_folder()
    files = [path for ending in ("cubin", "ptx") for path in folder.glob(f"cuflash-*.{ending}")]
    size = sum(path.stat().st_size for path in files) / _MIB
    return f"{folder}: {len(files)} cuflash kernels, {size:.1f} MiB"


def _about(index: int, gpu: Device) -> str:
    properties = _interop.cupy_module().cuda.runtime.getDeviceProperties(index)
    return (
        f"{gpu.name}, compute capability {gpu.arch // 10}.{gpu.arch % 10}, "
        f"{properties['totalGlobalMem'] / _GIB:.1f} GiB, {gpu.multiprocessors} multiprocessors, "
        f"{gpu.shared_bytes / 1024:.0f} KiB shared memory for a block"
    )


def _kernel_table(gpu: Device) -> Iterator[str]:
    """Lines that tell the forward kernel and the backward pass's largest for typical problems."""
    yield f"  {'dtype':9}{'head_dim':>8}  {'forward':38}{'backward'}"
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            rows = ((1, 4096, 16, head_dim), ELEMENT_TYPES[dtype].numpy)
            problem = describe(rows, rows, rows, causal=True)
            forward, *backward = _explain.explain(problem, gpu).plans
            main = max(backward, key=lambda plan: plan.shared_bytes)
            yield f"  {dtype:9}{head_dim:8}  {_name(forward):38}{_name(main)}"


def _name(plan: Plan) -> str:
    """The kernel, with its tile of queries and keys where it has one."""
    constants = dict(plan.constants)
    tile = f"{constants['BLOCK_M']} x {constants['BLOCK_N']}" if "BLOCK_M" in constants else ""
    return f"{plan.kernel} {tile}".rstrip()
