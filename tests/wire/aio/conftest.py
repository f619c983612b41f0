"""Sockets are tested on uvloop, which the processes run on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from tests import certificate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End a test that hangs from a thread: uvloop swallows what the handler of a signal raises."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(method="thread"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> certificate.Certificate:
    """A certificate of a test authority."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    return certificate.make(tmp_path_factory.mktemp("certificate"))
