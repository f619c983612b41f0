"""Waiting for child processes, which send the test no events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
