"""One cluster on the demo model for all clients, and time for it to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import START_S, Cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2 * START_S))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker."""
    with Cluster(tmp_path_factory.mktemp("clients")) as cluster:
        yield cluster
