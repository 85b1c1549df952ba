"""Frozen values that are looked up in caches at every call."""

from __future__ import annotations

from typing import Any


class HashedOnce:
    """Keeps the hash of a frozen dataclass, which sets ``__hash__ = HashedOnce.__hash__``."""

    def __hash__(self) -> int:
        state = self.__dict__
        found: int | None = state.get("_hash")
        if found is None:
            found = state["_hash"] = hash(tuple(self.__getstate__().values()))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}
