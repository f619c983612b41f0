"""Messages arrive whole, sealed if there are keys, and who is gone is noticed at once."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from worker.compute.connection import Connection, ProcessLost, exchange

KEYS = bytes(32), bytes([1] * 32)
Ends = tuple[Connection, Connection]


def connect(keys: tuple[bytes, bytes] | None) -> Ends:
    """Return both ends of a connection of processes 0 and 1, over TCP if there are keys."""
    if keys is None:
        one, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            one = socket.create_connection(listening.getsockname())
            other, _ = listening.accept()
    return Connection(one, 1, keys), Connection(other, 0, keys and keys[::-1])


@pytest.fixture(params=[None, KEYS], ids=["plain", "sealed"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = connect(request.param)
    yield made
    for it in made:
        it.close()


def receive(connection: Connection, num_bytes: int) -> bytes:
    message = bytearray(num_bytes)
    exchange([], [(connection, memoryview(message))], 30)
    return bytes(message)


def test_both_send_at_once_more_than_a_socket_holds(ends: Ends) -> None:
    messages = [random.Random(seed).randbytes(8 << 20) for seed in range(2)]

    def swap(number: int) -> bytes:
        got = bytearray(8 << 20)
        exchange([(ends[number], messages[number])], [(ends[number], memoryview(got))], 30)
        return bytes(got)

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(swap, range(2))] == messages[::-1]


def test_messages_keep_their_order_and_their_ends(ends: Ends) -> None:
    for number in range(20):
        exchange([(ends[0], bytes([number]) * (number + 1))], [])
    assert [receive(ends[1], it + 1) for it in range(20)] == [
        bytes([it]) * (it + 1) for it in range(20)
    ]


def test_a_process_that_is_gone_is_noticed_and_named(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receive, ends[1], 1)
        ends[0].close()
        with pytest.raises(ProcessLost, match=r"^process 0 is gone"):
            waiting.result()
    with pytest.raises(ProcessLost, match=r"^process 0 is gone"):
        while True:
            exchange([(ends[1], b"x")], [])


def test_one_that_closes_wakes_its_own_thread(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receive, ends[0], 1)
        ends[0].close()
        with pytest.raises(ProcessLost):
            waiting.result()


def test_one_that_says_nothing_is_named_after_a_time(ends: Ends) -> None:
    with pytest.raises(ProcessLost, match=r"process 1 has not answered for 0\.01 s"):
        exchange([], [(ends[0], memoryview(bytearray(1)))], 0.01)


class Trickle:
    """A `select.poll` on a clock of its own: the other end sends a byte every 10 s."""

    now_s = 0.0

    def __init__(self, sending: socket.socket) -> None:
        self._sending = sending

    def register(self, *_: object) -> None:
        pass

    def poll(self, timeout_ms: float) -> list[object]:
        wait_s = min(10.0, timeout_ms / 1000)
        self.now_s += wait_s
        if wait_s < 10.0:
            return []
        self._sending.sendall(b"x")
        return [self]


def test_a_message_that_trickles_has_no_more_time_than_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = connect(None)
    trickle = Trickle(other.socket)
    monkeypatch.setattr("select.poll", lambda: trickle)
    monkeypatch.setattr("time.monotonic", lambda: trickle.now_s)
    with pytest.raises(ProcessLost, match="process 1 has not answered for 25 s"):
        exchange([], [(one, memoryview(bytearray(4)))], 25)
    assert trickle.now_s == 25
    exchange([], [(one, memoryview(bytearray(2)))], 25)
    for it in (one, other):
        it.close()


def test_nothing_of_a_sealed_message_is_seen_on_its_way() -> None:
    one, other = connect(KEYS)
    exchange([(one, b"secret words")], [])
    assert b"secret" not in other.socket.recv(100)
    for it in (one, other):
        it.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:],
        lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
        lambda _: b"",
    ],
    ids=["first byte", "last byte", "repeated"],
)
def test_a_sealed_message_that_was_changed_or_repeated_is_refused(change: partial[bytes]) -> None:
    one, other = connect(KEYS)
    first, second = bytes(other.seal(b"words")), bytes(other.seal(b"words"))
    other.socket.sendall(first + (change(second) or first))
    assert receive(one, 5) == b"words"
    with pytest.raises(ProcessLost, match="process 1 was changed in transit"):
        receive(one, 5)
    for it in (one, other):
        it.close()
