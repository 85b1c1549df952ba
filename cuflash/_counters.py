"""Counters by which the blocks of a kernel take tiles, one after another that nobody has taken.

A kernel leaves its counter at 0 as it found it. Two launches that can run at the same time need one
each, so every stream has its own, and every launch that a graph captures: the graph may run beside
anything else. They are kept for good, since graphs write to them whenever they run. A launch that
fails on the way ends all work of the process with its GPU, counters and all.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from cuflash._interop import cupy_module

_of_streams: dict[tuple[int, int, int], Any] = {}
_of_graphs: list[Any] = []


def counter() -> Any:
    """The counter, a uint32 array, of a launch on the current device and stream."""
    cupy = cupy_module()
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        _of_graphs.append(cupy.zeros(1, "uint32"))
        return _of_graphs[-1]
    # Of one handle, the default stream of each thread, there are many.
    key = cupy.cuda.Device().id, stream.ptr, get_ident()
    if key not in _of_streams:
        _of_streams[key] = cupy.zeros(1, "uint32")
    return _of_streams[key]
