"""The workers that a router refused: why, and when.  Bounded; a worker that joins is forgotten."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

# This many refused workers, the latest ones, are listed.
MAX_REFUSED: Final = 16


class Refusals:
    """The reasons of the latest refusals, by the worker's name, `<role>-<rank>`."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def add(self, name: str, reason: str, now: float) -> None:
        """List a worker as refused at the time `now` in seconds."""
        self.forget(name)
        self._found[name] = reason, now
        if len(self._found) > MAX_REFUSED:
            self._found.popitem(last=False)

    def forget(self, name: str) -> None:
        """Remove a worker from the list, if it is there."""
        self._found.pop(name, None)

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return the list for `GET /v1/cluster`, the latest last."""
        return [
            {"worker": name, "reason": reason, "last_seen_s": round(now - at, 3)}
            for name, (reason, at) in self._found.items()
        ]
