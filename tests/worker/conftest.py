"""Processes that many tests share, as starting them takes longer than a test."""

from collections.abc import Iterator

import pytest

from tests.worker.compute.processes import Processes


@pytest.fixture(autouse=True)
def _memory_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still does not answer in time when one of its workers asks another."""
    monkeypatch.setattr("wire.aio.unix.ANSWER_S", 60.0)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(4, tmp_path_factory.mktemp("meetings")) as started:
        yield started
