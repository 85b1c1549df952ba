"""The machine under measurement: its name, its free memory, and the commit of this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def missing(device: str) -> str | None:
    """Say why a device can't be measured here, or None."""
    if device == "cpu":
        return None
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, a driver that is too old
        return f"no GPU: {error}"
    return None if count else "no GPU"


def machine_name(device: str) -> str:
    """Name the GPU, or the processor and the number of cores that this process may use."""
    if device == "cuda":
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    model = "CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        model = found.group(1) if found else model
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return f"{model}, {cores} cores"


def architecture() -> int:
    """Architecture of the GPU: 90 for sm_90."""
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def file_label(name: str) -> str:
    """Turn a machine's name into a part of a file name: "NVIDIA H200" is "nvidia-h200"."""
    name = re.sub(r"\((R|TM)\)|@.*?(?=,|$)", " ", name)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def free_bytes(device: str) -> int:
    """Bytes that a new allocation may hope for."""
    if device == "cuda":
        import cupy

        return cupy.cuda.runtime.memGetInfo()[0]
    info = Path("/proc/meminfo")
    if info.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
        if found:
            return int(found.group(1)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def release_memory(device: str) -> None:
    """Give cached memory back to the device, so that the next library can have it."""
    if device != "cuda":
        return
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def array_library(device: str) -> Any:
    """NumPy or CuPy."""
    if device == "cpu":
        return np
    import cupy

    return cupy


def synchronize(device: str) -> None:
    """Wait until the device has done all its work. An error of an earlier kernel shows here."""
    if device == "cuda":
        import cupy

        cupy.cuda.Device().synchronize()


def load_warning() -> str | None:
    """Say that other programs keep the processor busy, where that is so."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < 0.25 * cores:
        return None
    return f"load average {load:.1f} on {cores} cores: other programs disturb host times"


def commit() -> str:
    """Ask git for the commit of this checkout; "unknown" where there is no git."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
