"""Reads single keys of a config.json; raises an error that names the key and the invalid value."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from wire.process.model import ModelError

Keys = Mapping[str, Any]


def count(keys: Keys, key: str, default: int | None = None, *, minimum: int = 1) -> int:
    """Return an integer of at least `minimum`; null means the default."""
    value = keys.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{key} is missing")
    if type(value) is not int or value < minimum:
        raise ModelError(f"{key} is {value!r}, not an integer of at least {minimum}")
    return value


def flag(keys: Keys, key: str, *, default: bool = False) -> bool:
    value = keys.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, not true or false")
    return value


def positive(keys: Keys, key: str, default: float | None = None) -> float:
    """Return a finite number above 0; null means the default."""
    value = keys.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise ModelError(f"{key} is {value!r}, not a positive number")
    return float(value)
