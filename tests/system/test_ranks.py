"""Two real workers of one rank: who is alive stays, and the place is never left empty."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster import START_S, Cluster, until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("ranks"), executor="hash") as cluster:
        yield cluster


def serve(cluster: Cluster) -> None:
    cluster.choices([1, 2, 3], max_tokens=4)


def epoch(cluster: Cluster) -> int:
    return int(cluster.ready("decode", 0)["epoch"])


def until_logged(cluster: Cluster, words: str) -> None:
    until(lambda: words in cluster.log(), words, START_S)


def test_a_place_that_becomes_free_is_taken_and_given_back(cluster: Cluster) -> None:
    incumbent = epoch(cluster)
    newcomer = cluster.worker("decode", 0)
    until_logged(cluster, "worker refused")
    cluster.kill_local("decode", 0)  # while the newcomer still asks
    until(lambda: len(cluster.local_pids("decode", 0)) == 2, "it is started again", START_S)
    again = cluster.local_pids("decode", 0)[-1]
    os.kill(again, signal.SIGSTOP)  # so that it is the newcomer who comes first

    def is_taken() -> bool:
        row = cluster.find("decode", 0)
        return row is not None and row["epoch"] != incumbent

    until(lambda: is_taken() or newcomer.poll() is not None, "the newcomer has the place", START_S)
    if not is_taken():  # it had given up before the kill
        newcomer = cluster.worker("decode", 0)
    os.kill(again, signal.SIGCONT)
    taken = epoch(cluster)
    until_logged(cluster, "ours waits until it is free")  # the local one was started again
    assert newcomer.poll() is None and epoch(cluster) == taken
    serve(cluster)
    newcomer.kill()
    until_logged(cluster, "the rank is free again")
    until(lambda: epoch(cluster) != taken, "the local one is back", START_S)
    serve(cluster)
