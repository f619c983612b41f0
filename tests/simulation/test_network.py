"""The simulated network gives what ZeroMQ over TCP gives, and no more."""

from __future__ import annotations

from random import Random
from struct import pack

import pytest

from tests.simulation.loop import Timeline, new_process
from tests.simulation.network import Mischief, Network, kind_of
from tests.simulation.sockets import Hub, Link
from wire.errors import PeerLost
from wire.frames import Tag
from wire.parts import Buffer

# A seed with which the hub hears of a cut before the link is back; later, it would not hear it.
CLEAR_CUT = 2
ENDPOINT = "tcp://router:1"


class Site:
    """A hub and a link to it, and all that either has heard."""

    def __init__(
        self, *, seed: int = 1, queue_bytes: int = 1 << 20, mischief: Mischief | None = None
    ) -> None:
        self.timeline, random = Timeline(), Random(seed)
        self.network = Network(
            self.timeline,
            random,
            latency_s=(0.001, 0.1),
            queue_bytes=queue_bytes,
            note=lambda *_: None,
            mischief=mischief or Mischief(random),
        )
        self.at_hub: list[bytes] = []
        self.at_link: list[bytes] = []
        self.events: list[str] = []
        self.hub = Hub(
            self.network, new_process(self.timeline, "router"), self._on_hub, self._on_lost
        )
        self.hub.bind(ENDPOINT)
        self.link = self.connect("worker", is_kv=mischief is not None)

    def connect(self, name: str, *, is_kv: bool = False) -> Link:
        return Link(
            self.network,
            new_process(self.timeline, name),
            b"identity",
            ENDPOINT,
            lambda parts: self.at_link.append(bytes(parts[-1])),
            on_up=lambda: self.events.append("up"),
            on_down=lambda: self.events.append("down"),
            is_kv=is_kv,
        )

    def _on_hub(self, peer: bytes, parts: list[Buffer]) -> None:
        self.at_hub.append(bytes(parts[-1]))

    def _on_lost(self, peer: bytes) -> None:
        self.events.append("lost")

    def run(self, seconds: float) -> None:
        end = self.timeline.now + seconds
        while self.timeline.next_s <= end:
            self.timeline.step()
        self.timeline.now = end


def words(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_messages_of_a_connection_come_in_order_and_once() -> None:
    site = Site()
    for word in words(*range(20)):
        site.link.send([word])  # before the connection is up, too
    site.run(1.0)
    for word in words(*range(20, 40)):
        site.link.send([word])
        site.hub.send(b"identity", [word])
    site.run(10.0)
    assert site.at_hub == words(*range(40)) and site.at_link == words(*range(20, 40))


def test_a_buffer_that_changes_on_its_way_is_noticed() -> None:
    site = Site()
    site.run(1.0)
    buffer = bytearray(b"early")
    sending = site.link.send([buffer], track=True)
    assert sending is not None and not sending.done
    site.run(1.0)
    assert sending.done and site.at_hub == [b"early"]
    site.link.send([buffer], track=True)
    buffer[:] = b"later"
    with pytest.raises(AssertionError, match="a buffer was reused while it was being sent"):
        site.run(1.0)


def test_a_cut_loses_what_is_under_way_and_both_hear_of_it() -> None:
    site = Site(seed=CLEAR_CUT)
    site.link.send([b"1"])
    site.run(1.0)
    site.link.send([b"2"])
    site.network.cut("worker")
    site.run(30.0)
    assert site.at_hub == [b"1"]
    assert sorted(site.events) == ["down", "lost", "up", "up"]
    with pytest.raises(PeerLost):
        site.hub.send(b"identity", [b"3"])  # not a message of it yet
    site.link.send([b"4"])
    site.run(1.0)
    site.hub.send(b"identity", [b"5"])
    site.run(1.0)
    assert site.at_hub == [b"1", b"4"] and site.at_link == [b"5"]


def test_only_segments_change_places() -> None:
    mischief = Mischief(Random(3), twice=1.0, swapped=1.0)
    site = Site(mischief=mischief)

    def segment(number: int) -> list[bytes]:
        return [pack("<I", Tag.KV_CACHE), pack("<QII", 1, number, 3), b"%d" % number]

    assert kind_of(segment(0)) == (0, 1)
    for number in range(4):
        site.link.send(segment(number))
    site.run(1.0)
    assert site.at_hub[0] == b"0" and site.at_hub.count(b"0") == 1  # the offer: first, and once
    assert sorted(site.at_hub) == sorted(words(0, 1, 1, 2, 2, 3, 3))
