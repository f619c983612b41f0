"""Processes that many tests share, as starting them takes longer than a test."""

from collections.abc import Iterator

import pytest

from tests.worker.compute.processes import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(4, tmp_path_factory.mktemp("meetings")) as started:
        yield started
