"""A cluster that several system tests share, for starting one costs seconds; and time for all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import START_S, Cluster

HERE = Path(__file__).parent
# Against tests that hang: a few starts of a cluster, each of which may take START_S.
TIMEOUT_S = 3 * START_S
# Hundreds of connections of one process are slow to speak where others want the cores as well.
PATIENT = ("--grace-s", "60")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def hash_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers on the hash executor."""
    directory = tmp_path_factory.mktemp("hash")
    with Cluster(directory, local="2,2", executor="hash", args=PATIENT) as cluster:
        yield cluster
