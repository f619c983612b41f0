"""Metered sockets pass everything on and count it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from wire.errors import PeerLost
from wire.frames import Cancel
from wire.parts import Buffer, encode
from worker.counted import CountedConnect, CountedPlane
from worker.environment import Environment
from worker.transfer.sockets import KVPlane


async def test_both_ends_of_the_plane_count_what_crosses_it() -> None:
    ours, theirs = CountedPlane(KVPlane(64)), CountedPlane(KVPlane(64))
    came: asyncio.Queue[list[Buffer]] = asyncio.Queue()
    answered: asyncio.Queue[list[Buffer]] = asyncio.Queue()
    peers: list[bytes] = []

    def on_message(peer: bytes, parts: list[Buffer]) -> None:
        peers.append(peer)
        came.put_nowait(parts)

    hub = theirs.hub(on_message, lambda peer: None)
    link = ours.link(
        b"prefill-0-1", hub.bind("tcp://127.0.0.1:0"), answered.put_nowait, peers.clear
    )
    link.send(encode(Cancel(7, 0)))
    await asyncio.wait_for(came.get(), 10)
    assert (link.is_up, ours.num_up) == (True, 1)
    hub.send(peers[0], encode(Cancel(8, 0)))
    await asyncio.wait_for(answered.get(), 10)
    await link.close()
    with suppress(PeerLost):
        link.send(encode(Cancel(9, 0)))
    both = {("cancel", "sent", 1), ("cancel", "received", 1)}
    assert (set(ours.traffic.rows()), set(theirs.traffic.rows())) == (both, both)
    assert (dict(ours.traffic.dropped), ours.num_up) == ({"worker_lost": 1}, 0)
    await hub.close()
    await ours.close()
    await theirs.close()


async def test_the_way_to_a_router_is_counted() -> None:
    connect = CountedConnect(Environment().connect, None)
    plane = KVPlane(64)
    came = asyncio.Event()
    hub = plane.hub(lambda peer, parts: came.set(), lambda peer: None)
    link = connect(
        b"decode-0-1",
        hub.bind("tcp://127.0.0.1:0"),
        lambda parts: None,
        on_up=lambda: None,
        on_down=lambda: None,
    )
    link.send(encode(Cancel(7, 0)))
    await asyncio.wait_for(came.wait(), 10)
    assert list(connect.traffic.rows()) == [("cancel", "sent", 1)]
    await link.close()
    await hub.close()
    await plane.close()
