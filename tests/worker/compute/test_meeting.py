"""Processes meet where they are sent, and those that do not belong together say so at once."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import Store

from tests.faults.ports import free_port
from worker.compute.meeting import meet

TIMEOUT_S = 55.0


def meet_all(rendezvous: str, *settings: dict[str, object]) -> list[Store | BaseException]:
    """Have one process for each of `settings` meet; return what each gets, or why it does not."""

    def one(process: int) -> Store | BaseException:
        try:
            return meet(rendezvous, process, len(settings), settings[process], TIMEOUT_S)
        except (ValueError, OSError) as error:
            return error

    with ThreadPoolExecutor(len(settings)) as threads:
        return list(threads.map(one, range(len(settings))))


@pytest.fixture(params=["file", "tcp"])
def rendezvous(request: Any, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/meeting"
    return f"tcp://127.0.0.1:{free_port()}"


def test_who_has_the_same_settings_has_one_store(rendezvous: str) -> None:
    first, *others = meet_all(rendezvous, {"a": 1}, {"a": 1}, {"a": 1})
    assert isinstance(first, Store)
    first.set("word", "7")
    assert [it.get("word") for it in others if isinstance(it, Store)] == [b"7", b"7"]


def test_who_has_other_settings_learns_which(rendezvous: str) -> None:
    float32: dict[str, object] = {"--dtype": "float32"}
    first, same, other = meet_all(rendezvous, float32, float32, {"--dtype": "auto"})
    assert "settings: --dtype is float32 for process 0 and auto for process 2" in str(first)
    assert "--dtype is auto for process 2 and float32 for process 0" in str(other)
    assert isinstance(same, Store)


def test_a_place_that_was_used_is_refused(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/meeting"
    kept = meet_all(place, {}, {})
    for error in meet_all(place, {}, {}):
        assert isinstance(error, ValueError) and "before; give each process its own" in str(error)
    assert all(isinstance(it, Store) for it in kept)


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")])
def test_on_the_loopback_nobody_else_can_come(host: str, address: str) -> None:
    port = free_port()
    if ":" in address:
        try:
            socket.create_server((address, port), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    kept = meet_all(f"tcp://{host}:{port}", {}, {})
    assert all(isinstance(it, Store) for it in kept)
    listening = [it for it in psutil.Process().net_connections() if it.status == "LISTEN"]
    assert [it.laddr.ip for it in listening if it.laddr.port == port] == [address]


@pytest.mark.parametrize("process", [0, 1])
def test_who_does_not_come_is_named(process: int, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=f"process {1 - process} of 2 has not come to"):
        meet(f"file://{tmp_path}/meeting", process, 2, {}, 0.0)
