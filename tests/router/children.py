"""Waiting for child processes, which send the test no events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.cluster import START_S


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():  # noqa: ASYNC110 - they send no events
            await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
