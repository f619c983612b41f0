"""Clusters that several system tests share: starting one costs seconds."""

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker on the demo model."""
    with Cluster(tmp_path_factory.mktemp("demo")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def hash_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers on the hash executor."""
    directory = tmp_path_factory.mktemp("hash")
    with Cluster(directory, local="2,2", executor="hash") as cluster:
        yield cluster
