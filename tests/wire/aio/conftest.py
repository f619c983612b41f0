"""Sockets are tested on asyncio's own loop and on uvloop, which the processes run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

ON_BOTH = ("test_zmq.py", "test_tcp.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End a test that hangs from a thread: uvloop swallows what the handler of a signal raises."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(method="thread"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "uvloop": uvloop.new_event_loop
    }
    if item.path.name in ON_BOTH:
        factories["asyncio"] = asyncio.new_event_loop
    return factories
