"""A closed connection is traced to its peer, also when descriptors and identities come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from wire.aio.outbox import Limits, Sending
from wire.aio.peers import Peers
from wire.errors import PeerLost
from wire.parts import Buffer


class Socket:
    """Says who is full and who is gone; keeps the rest."""

    def __init__(self) -> None:
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.sent: list[tuple[bytes, Buffer]] = []
        self.lost: list[bytes] = []
        self.peers = Peers(Limits(1024, 4096), self.transmit, self.lost.append)

    def transmit(self, peer: bytes, parts: Sequence[Buffer], sending: Sending | None) -> None:
        if peer in self.gone:
            raise ConnectionError
        if peer in self.full:
            raise BlockingIOError
        self.sent.append((peer, parts[0]))


@pytest.fixture
def socket() -> Socket:
    socket = Socket()
    for fd, peer in ((7, b"a"), (8, b"b")):
        socket.peers.open(fd)
        socket.peers.meet(peer, fd)
    return socket


def test_a_closed_connection_is_a_lost_peer_once_settled(socket: Socket) -> None:
    socket.peers.close(7)
    assert socket.lost == []
    assert socket.peers.reachable == [b"b"]
    with pytest.raises(PeerLost):
        socket.peers.send(b"a", [b"x"], track=False)
    socket.peers.settle()
    socket.peers.settle()
    assert socket.lost == [b"a"]


def test_a_last_message_does_not_bring_a_closed_peer_back(socket: Socket) -> None:
    socket.peers.close(7)
    assert not socket.peers.knows(b"a")
    socket.peers.meet(b"a", 7)
    socket.peers.settle()
    assert socket.lost == [b"a"]
    assert socket.peers.reachable == [b"b"]


def test_a_peer_that_is_back_before_its_loss_was_settled_is_lost_and_met_again(
    socket: Socket,
) -> None:
    socket.peers.close(7)
    socket.peers.open(9)
    socket.peers.meet(b"a", 9)
    assert socket.lost == [b"a"]
    assert socket.peers.reachable == [b"b", b"a"]
    socket.peers.settle()
    assert socket.lost == [b"a"]
    socket.peers.close(9)
    socket.peers.settle()
    assert socket.lost == [b"a", b"a"]


def test_a_reused_descriptor_belongs_to_its_new_peer(socket: Socket) -> None:
    socket.peers.close(7)
    socket.peers.settle()
    socket.peers.open(7)
    socket.peers.meet(b"c", 7)
    socket.peers.close(7)
    socket.peers.settle()
    assert socket.lost == [b"a", b"c"]


def test_a_peer_that_spoke_once_and_left_is_lost_too(socket: Socket) -> None:
    socket.peers.open(9)
    socket.peers.close(9)
    socket.peers.meet(b"c", 9)
    assert b"c" not in socket.peers.reachable
    socket.peers.settle()
    assert socket.lost == [b"c"]


def test_a_forgotten_peer_is_unknown_and_its_end_is_no_news(socket: Socket) -> None:
    socket.peers.forget(b"a")
    with pytest.raises(PeerLost):
        socket.peers.send(b"a", [b"x"], track=False)
    socket.peers.close(7)
    socket.peers.settle()
    assert socket.lost == []


def test_a_full_peer_waits_alone(socket: Socket) -> None:
    socket.full.add(b"a")
    for i in range(3):
        socket.peers.send(b"a", [b"%d" % i], track=False)
        socket.peers.send(b"b", [b"%d" % i], track=False)
    assert socket.sent == [(b"b", b"%d" % i) for i in range(3)]
    assert socket.peers.queued_bytes(b"a") > 0 == socket.peers.queued_bytes(b"b")
    assert socket.peers.queued_bytes(b"nobody") == 0
    assert socket.peers.flush() is not None
    socket.full.clear()
    assert socket.peers.flush() is None
    assert socket.sent[3:] == [(b"a", b"%d" % i) for i in range(3)]


def test_a_peer_the_socket_does_not_know_is_lost(socket: Socket) -> None:
    socket.gone.add(b"a")
    with pytest.raises(PeerLost):
        socket.peers.send(b"a", [b"x"], track=False)
    socket.full.add(b"b")
    sending = socket.peers.send(b"b", [b"x"], track=True)
    socket.gone.add(b"b")
    assert socket.peers.flush() is None
    assert sending is not None and sending.was_dropped
    socket.peers.settle()
    assert socket.lost == [b"a", b"b"]
