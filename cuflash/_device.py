"""What a GPU can do, as numbers; made by hand where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cuflash._values import HashedOnce

# Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities).
_SHARED_BYTES = {
    70: 98304, 75: 65536, 80: 166912, 86: 101376, 87: 166912, 88: 101376, 89: 101376,
    90: 232448, 100: 232448, 103: 232448, 110: 232448, 120: 101376, 121: 101376,
}  # fmt: skip


@dataclass(frozen=True)
class Device(HashedOnce):
    """A GPU as the planner sees it.

    Attributes
    ----------
    arch : int
        Compute capability times ten: 90 for sm_90.
    multiprocessors : int
    shared_bytes : int
        Greatest dynamic shared memory of one block.
    name : str
    """

    arch: int
    multiprocessors: int
    shared_bytes: int
    name: str = "planned only"

    __hash__ = HashedOnce.__hash__

    @staticmethod
    def of_arch(arch: int) -> Device:
        """A device of an architecture that need not be present, for planning and compiling."""
        if arch not in _SHARED_BYTES:
            known = ", ".join(map(str, _SHARED_BYTES))
            raise ValueError(f"arch must be one of {known}. Got {arch}.")
        return Device(arch, 100, _SHARED_BYTES[arch], "planned only")


@cache
def device(index: int) -> Device:
    """The GPU with this index in the process."""
    import cupy

    found = cupy.cuda.Device(index)
    about = found.attributes
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
    return Device(
        int(found.compute_capability),
        about["MultiProcessorCount"],
        about["MaxSharedMemoryPerBlockOptin"],
        name,
    )
