"""The one form that all error messages have."""

from __future__ import annotations


def reject(kind: type[Exception], rule: str, value: object) -> Exception:
    """The exception for a broken rule, in the one form that all messages have."""
    return kind(f"{rule}. Got {value!r}.")
