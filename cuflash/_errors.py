"""The one form that all error messages have."""

from __future__ import annotations

import operator
from typing import Any


def reject(kind: type[Exception], rule: str, value: object) -> Exception:
    """The exception for a broken rule, in the one form that all messages have."""
    return kind(f"{rule}. Got {value!r}.")


def integer(name: str, value: Any, least: int = 0) -> int:
    """The value as an integer that is not below `least`."""
    if isinstance(value, bool):
        raise reject(TypeError, f"{name} must be an integer", value)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise reject(TypeError, f"{name} must be an integer", value) from error
    if number < least:
        rule = f"{name} must be at least {least}" if least else f"{name} must not be negative"
        raise reject(ValueError, rule, value)
    return number
