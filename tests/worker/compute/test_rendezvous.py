"""Processes meet where they are sent, and those that do not belong together say so at once."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import psutil
import pytest

from tests.faults.ports import free_port
from worker.compute.connection import Connection, exchange
from worker.compute.handshake import Caller, Purpose, call
from worker.compute.rendezvous import Connections, Settings, connect, other_connections
from worker.model.shard import Shard

TIMEOUT_S = 55.0
opened: list[Connections] = []  # by tests, which leave it to the fixture to close them


@pytest.fixture(autouse=True)
def patient_and_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("worker.compute.handshake.HANDSHAKE_S", TIMEOUT_S)
    yield
    while opened:
        for connection in opened.pop().values():
            connection.close()


def meet_all(
    rendezvous: str, *settings: Settings, size: int = 0, secrets: tuple[bytes, ...] = ()
) -> list[Connections | BaseException]:
    """Have one process for each of `settings` meet; return what each gets, or why it does not."""
    size = size or len(settings)

    def one(process: int) -> Connections | BaseException:
        shard = Shard.of_process(process, size, len(settings) // size)
        secret = secrets[process] if secrets else b""
        try:
            opened.append(connect(rendezvous, shard, settings[process], TIMEOUT_S, secret))
        except (ValueError, RuntimeError, OSError) as error:
            return error
        return opened[-1]

    with ThreadPoolExecutor(len(settings)) as threads:
        return list(threads.map(one, range(len(settings))))


@pytest.fixture(params=["file", "abstract", "tcp"])
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp":
        return f"tcp://127.0.0.2:{free_port()}"
    return (
        f"file://{tmp_path}/meet" if request.param == "file" else f"abstract://test-{os.getpid()}"
    )


def listening(directory: Path) -> list[str]:
    """Return where this process listens: its ports, and the names of Unix sockets."""
    ports = [it for it in psutil.Process().net_connections("tcp") if it.status == "LISTEN"]
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = [row[7] for row in rows if row[3] == "00010000" and len(row) > 7]
    ours = str(directory), f"@test-{os.getpid()}"
    return [*map(str, ports), *(it for it in names if it.startswith(ours))]


@pytest.mark.parametrize("secret", [b"", b"of decode-0"])
def test_each_reaches_those_it_has_something_for_and_nobody_listens_after(
    rendezvous: str, secret: bytes, tmp_path: Path
) -> None:
    met = meet_all(rendezvous, *[{"a": 1}] * 6, size=3, secrets=(secret,) * 6)
    assert listening(tmp_path) == [] and list(tmp_path.iterdir()) == []
    found = [it for it in met if isinstance(it, dict)]
    assert len(found) == 6, met
    wanted = [*other_connections(3, 2), *(Caller(it, 0) for it in range(1, 6))]
    assert sum(map(len, found)) == 2 * len(wanted)
    for caller, called, purpose in wanted:
        one, other = found[caller][called, purpose], found[called][caller, purpose]
        for sending, receiving in ((one, other), (other, one)):
            word = f"{caller} to {called} for {purpose}".encode()
            is_sealed = len(sending.receive_buffer(memoryview(word))) > len(word)
            assert is_sealed is (bool(secret) and rendezvous.startswith("tcp"))
            heard = bytearray(len(word))
            exchange([(sending, word)], [])
            exchange([], [(receiving, memoryview(heard))], TIMEOUT_S)
            assert heard == word


def test_shards_of_a_stage_reach_each_other_and_a_shard_its_next_stage() -> None:
    for size, stages in ((1, 1), (2, 1), (1, 3), (3, 2), (2, 3)):
        shards = [Shard.of_process(it, size, stages) for it in range(size * stages)]
        reach = {
            (called.process, caller.process)
            for called, caller in combinations(shards, 2)
            if called.stage == caller.stage
            or (called.rank == caller.rank and abs(called.stage - caller.stage) == 1)
        }
        made = other_connections(size, stages)
        steps = {(it.called, it.caller) for it in made if it.purpose is Purpose.STEPS}
        assert steps == {pair for pair in reach if 0 not in pair}
        for purpose in (Purpose.COPIES, Purpose.WATCH):
            others = [(it.called, it.caller) for it in made if it.purpose is purpose]
            assert others == [(0, it) for it in range(1, size * stages)]
        assert len(set(made)) == len(made)


def test_one_that_has_other_settings_learns_which(rendezvous: str) -> None:
    first, other = meet_all(rendezvous, {"--dtype": "float32"}, {"--dtype": "auto"})
    assert "settings: --dtype is float32 for process 0 and auto for process 1" in str(first)
    assert "--dtype is auto for process 1 and float32 for process 0" in str(other)


def test_one_that_has_another_key_learns_it_at_once() -> None:
    place = f"tcp://127.0.0.2:{free_port()}"
    with ThreadPoolExecutor(1) as threads:
        shard = Shard.of_process(0, 2, 1)
        leading = threads.submit(connect, place, shard, {}, TIMEOUT_S, b"of decode-0")
        with pytest.raises(ValueError, match=f"{place}: a process listens there that has another"):
            connect(place, Shard.of_process(1, 2, 1), {}, TIMEOUT_S, b"of decode-1")
        opened.append(connect(place, Shard.of_process(1, 2, 1), {}, TIMEOUT_S, b"of decode-0"))
        opened.append(leading.result())


def test_each_meeting_has_a_secret_of_its_own_for_the_connections_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection to a port, or the worker's key alone, admits no one after the rendezvous."""
    known: dict[Caller, bytes] = {}

    async def asked(
        sock: socket.socket, caller: Caller, secret: bytes, *, is_sealed: bool
    ) -> Connection:
        known[caller] = secret
        return await call(sock, caller, secret, is_sealed=is_sealed)

    monkeypatch.setattr("worker.compute.rendezvous.call", asked)
    found: list[bytes] = []
    for key in (b"", b"", b"of decode-0"):
        known.clear()
        meet_all(f"tcp://127.0.0.2:{free_port()}", *[{}] * 3, secrets=(key,) * 3)
        assert {known.pop(Caller(it, 0)) for it in (1, 2)} == {key}
        assert known.keys() == {*other_connections(3, 1)}
        found += {*known.values()}
    assert len({*found}) == 3 and all(len(it) >= 32 for it in found)


def test_a_second_process_of_one_number_is_refused(rendezvous: str) -> None:
    shards = [Shard.of_process(it, 3, 1) for it in (0, 1, 1, 2)]
    with ThreadPoolExecutor(3) as threads:
        leading, *same = (
            threads.submit(connect, rendezvous, shard, {}, TIMEOUT_S) for shard in shards[:3]
        )
        # One of the two is refused while the other waits for process 2.
        wait(same, return_when=FIRST_COMPLETED)
        opened.append(connect(rendezvous, shards[3], {}, TIMEOUT_S))
        opened.append(leading.result())
        errors = [it.exception() for it in same]
        opened.extend(it.result() for it in same if it.exception() is None)
    assert sorted(str(it)[:37] for it in errors) == [
        "None",
        "process 1 of this worker has come bef",
    ]


def test_a_file_that_is_there_is_left_alone_and_refused(tmp_path: Path) -> None:
    place = tmp_path / "meet"
    place.write_text("mine")
    with pytest.raises(ValueError, match="give each worker and each start a new file"):
        connect(f"file://{place}", Shard.of_process(0, 2, 1), {}, TIMEOUT_S)
    assert place.read_text() == "mine"


def test_the_file_is_for_this_user_alone_and_gone_when_process_0_gives_up(tmp_path: Path) -> None:
    place = tmp_path / "meet"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(connect, f"file://{place}", Shard.of_process(0, 2, 1), {}, 0.3)
        while not waiting.done():
            with suppress(FileNotFoundError):
                if not (mode := stat.S_IMODE(place.stat().st_mode)) & 0o077:
                    assert mode == 0o600
                    break
        with pytest.raises(TimeoutError):
            waiting.result()
    assert not place.exists()


@pytest.mark.parametrize("process", [0, 1])
def test_one_that_does_not_come_is_named(process: int, rendezvous: str) -> None:
    with pytest.raises(
        TimeoutError, match=f"process {1 - process} .* to --rendezvous {rendezvous}"
    ):
        connect(rendezvous, Shard.of_process(process, 2, 1), {}, 0.0)
