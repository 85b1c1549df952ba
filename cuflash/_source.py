"""CUDA source text: the files of ``kernels/`` with their constants in front, headers inlined.

Headers are inlined rather than found by the compiler, so that the text is all that a compiled
kernel depends on and a cache may key on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([\w.]+)"\s*$')


@lru_cache(maxsize=1)
def folder() -> Path:
    """The folder with the CUDA sources, in an installed package or in a checkout."""
    package = Path(str(files("cuflash")))
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def _inlined(name: str, seen: set[str]) -> Iterator[str]:
    seen.add(name)
    yield f'#line 1 "{name}"'
    for number, line in enumerate((folder() / name).read_text("utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            if line != "#pragma once":
                yield line
        elif include[1] not in seen:
            yield from _inlined(include[1], seen)
            yield f'#line {number + 1} "{name}"'


def _constant(name: str, value: int | bool | str) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    return f"constexpr int {name} = {value};"


@lru_cache(maxsize=1024)
def source(kernel: str, constants: tuple[tuple[str, int | bool | str], ...]) -> str:
    """The complete text of one kernel variant.

    Parameters
    ----------
    kernel : str
        Name of a ``.cu`` file in ``kernels/``, without the ending.
    constants : tuple of (str, int or bool or str)
        The leading constants; a string value names a type.
    """
    seen: set[str] = set()
    lines = [*_inlined("types.cuh", seen), "#line 1 \"constants\""]
    lines += [_constant(name, value) for name, value in constants]
    lines += _inlined(f"{kernel}.cu", seen)
    return "\n".join(lines) + "\n"
