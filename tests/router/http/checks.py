"""Checks of structures that can be made to wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from wire.options import Structure
from wire.process.structured_output import problem_of


class Checks:
    """Records checked structures; one with "slow" in it waits until checks may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked: list[str] = []
        self.may_go_on = threading.Event()
        self._started = threading.Semaphore(0)
        monkeypatch.setattr("router.api.requests.structures.problem_of", self._check)

    async def have_begun(self, count: int = 1) -> None:
        """Wait until so many more slow ones are being checked."""
        for _ in range(count):
            assert await asyncio.to_thread(self._started.acquire, timeout=60)

    def _check(self, structure: Structure) -> str | None:
        self.checked.append(structure.text)
        if "slow" in structure.text:
            self._started.release()
            assert self.may_go_on.wait(60)
        return problem_of(structure)
