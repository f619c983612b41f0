"""A cluster for the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A worker that takes 50 ms for a step, so that an answer can be stopped."""
    directory = tmp_path_factory.mktemp("chat")
    (keys := directory / "api_keys").write_text("sk-" + "a" * 40 + "\n")
    keys.chmod(0o600)
    flags = ("--api-keys", str(keys), "--worker-args", "--hash-step-ms 50")
    api_key = keys.read_text().strip()
    with Cluster(directory, local="1", executor="hash", args=flags, api_key=api_key) as cluster:
        yield cluster


@pytest.fixture
def key_file(cluster: Cluster) -> Path:
    return cluster.log_path.with_name("api_keys")
