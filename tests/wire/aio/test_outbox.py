"""The queue of one peer is bounded in bytes, keeps its order, and frees buffers for sure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.aio.outbox import MAX_BURST, MESSAGE_OVERHEAD, RETRY_S, Limits, Outbox, Sending
from wire.errors import ErrorCode, LocalProtocolError, WireError
from wire.parts import Buffer


class Socket:
    """Takes `room` messages, then is full; or has no such peer."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.is_gone = False
        self.sent: list[list[bytes]] = []

    def transmit(self, parts: Sequence[Buffer], sending: Sending | None) -> None:
        if self.is_gone:
            raise ConnectionError
        if not self.room:
            raise BlockingIOError
        self.room -= 1
        self.sent.append([bytes(part) for part in parts])
        if sending is not None:
            sending.hand_over([])


class Tracker:
    done = False


def outbox_of(socket: Socket, queue_bytes: int = 1 << 20, part_bytes: int = 1 << 10) -> Outbox:
    return Outbox("decode-0-1", Limits(part_bytes, queue_bytes), socket.transmit)


def test_a_message_goes_at_once_while_there_is_room() -> None:
    socket = Socket(room=1)
    outbox = outbox_of(socket)
    outbox.send([b"a"], track=False, now=True)
    assert (socket.sent, len(outbox), outbox.num_bytes) == ([[b"a"]], 0, 0)
    outbox.send([b"b", b"c"], track=False, now=True)
    assert (len(outbox), outbox.num_bytes) == (1, MESSAGE_OVERHEAD + 2)
    assert outbox.flush() == RETRY_S
    socket.room = 2
    assert outbox.flush() is None
    assert socket.sent == [[b"a"], [b"b", b"c"]]
    assert outbox.num_bytes == 0


def test_a_message_that_must_wait_does_not_go_at_once() -> None:
    socket = Socket(room=1)
    outbox = outbox_of(socket)
    outbox.send([b"a"], track=False, now=False)
    assert (socket.sent, len(outbox)) == ([], 1)


def test_one_flush_is_one_burst() -> None:
    socket = Socket()
    outbox = outbox_of(socket)
    for _ in range(MAX_BURST + 1):
        outbox.send([b""], track=False, now=False)
    socket.room = 2 * MAX_BURST
    assert outbox.flush() == 0.0
    assert len(socket.sent) == MAX_BURST
    assert outbox.flush() is None


def test_a_lost_peer_is_an_error_that_loses_no_message_silently() -> None:
    socket = Socket()
    outbox = outbox_of(socket)
    outbox.send([b"a"], track=False, now=True)
    socket.is_gone = True
    with pytest.raises(ConnectionError):
        outbox.send([b"b"], track=False, now=True)
    with pytest.raises(ConnectionError):
        outbox.flush()
    assert len(outbox) == 1


@given(st.lists(st.integers(0, 1024), max_size=60), st.integers(2048, 8192))
def test_the_queue_never_exceeds_its_bound(sizes: list[int], queue_bytes: int) -> None:
    socket = Socket()
    outbox = outbox_of(socket, queue_bytes)
    accepted = []
    for size in sizes:
        before = outbox.num_bytes
        try:
            outbox.send([bytes(size)], track=False, now=True)
            accepted.append([bytes(size)])
        except WireError as error:
            assert error.code is ErrorCode.OVERLOADED
            assert before + size + MESSAGE_OVERHEAD > queue_bytes
            assert outbox.num_bytes == before
        assert outbox.num_bytes <= queue_bytes
    socket.room = len(sizes)
    assert outbox.flush() is None
    assert socket.sent == accepted
    assert outbox.num_bytes == 0


def test_an_untracked_buffer_is_the_callers_again_at_once_a_tracked_one_is_not() -> None:
    socket = Socket()
    outbox = outbox_of(socket)
    buffer = bytearray(b"old")
    outbox.send([buffer], track=False, now=True)
    sending = outbox.send([buffer], track=True, now=True)
    assert sending is not None and not sending.done
    buffer[:] = b"new"
    socket.room = 2
    outbox.flush()
    assert socket.sent == [[b"old"], [b"new"]]
    assert sending.done


def test_dropping_frees_the_buffers() -> None:
    outbox = outbox_of(Socket())
    sending = outbox.send([b"a"], track=True, now=True)
    assert sending is not None and not sending.done
    outbox.drop()
    assert sending.done and sending.was_dropped
    assert (len(outbox), outbox.num_bytes) == (0, 0)


async def test_a_sending_is_done_when_every_tracker_is() -> None:
    sending = Sending()
    first, last = Tracker(), Tracker()
    sending.hand_over([first, last])
    last.done = True
    assert not sending.done
    first.done = True
    await sending.wait()
    assert sending.done and not sending.was_dropped


@pytest.mark.parametrize("parts", [[], [b""] * 65, [bytes(1025)], [b"", memoryview(bytes(1025))]])
def test_a_message_no_peer_would_take_is_refused(parts: list[Buffer]) -> None:
    socket = Socket(room=1)
    with pytest.raises(LocalProtocolError):
        outbox_of(socket).send(parts, track=False, now=True)
    assert socket.sent == []


def test_limits_that_hold_no_message_are_refused() -> None:
    with pytest.raises(ValueError, match="max_queue_bytes = 100"):
        Limits(part_bytes=100, queue_bytes=100)
