"""Sealed KV between workers with keys: a second connection, without CURVE's slow cipher.

Offers, credit and ends stay on the connection that CURVE protects.  Over it go the key of each
transfer and the token that opens the second connection, for sealed segments alone.  Until that is
up, and where it never is, segments go over the first.  SPEC 6.9.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from wire.aio.tokens import Tokens, identity_of, name_of, new_token
from wire.errors import PeerLost, RemoteProtocolError, WireError
from wire.frames import KvCache
from wire.parts import Buffer, Message, decode, encode
from wire.process.traffic import Traffic
from worker.environment import Connection, SealedSockets

log = structlog.get_logger("worker")

# How long it may take to connect before the log says that it does not happen.
PATIENCE_S: Final = 10.0


class SealedLink:
    """A prefill worker's end: the connection for sealed segments to one decode worker.

    `token` is what the next offer carries; a connection that ended needs another one.  `on_down` is
    called when a connection that was up has ended.
    """

    def __init__(
        self,
        sockets: SealedSockets,
        identity: bytes,
        kv_endpoint: str,
        traffic: Traffic,
        on_down: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token = new_token()
        self.is_up = False
        self._sockets, self._identity = sockets, identity
        self._host = kv_endpoint.rpartition(":")[0]
        self._traffic, self._on_down, self._clock = traffic, on_down, clock
        self._link: Connection | None = None
        self._number = 0  # of the connection
        self._late_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, port: int, token: bytes | None) -> None:
        """Connect to the port that the decode worker said in answer to an offer with `token`.

        Nothing happens if that has been done already, or another token is due.
        """
        if self._link is not None or token != self.token:
            return
        endpoint, name = f"{self._host}:{port}", name_of(self._identity, self._number)
        try:
            self._link = self._sockets.link(name, endpoint, self.token, self._on_up, self._on_end)
        except OSError as error:
            log.error("cannot connect for sealed KV", endpoint=endpoint, reason=str(error))
            return
        self._late_at = self._clock() + PATIENCE_S

    def send(self, frame: KvCache, *payload: Buffer) -> None:
        """Send a sealed segment.

        Raises:
            WireError: The connection has ended, or too much waits for it.
        """
        parts = encode(frame, *payload)
        try:
            if self._link is None:
                raise PeerLost(self._host)
            self._link.send(parts)
        except WireError as error:
            self._traffic.drop(error)
            raise
        self._traffic.say(parts)

    def lose(self) -> None:
        """Take the connection for lost: what it was given has not arrived."""
        self._on_end()

    def tick(self, now: float) -> None:
        if self._link is not None and not self.is_up and now >= self._late_at:
            self._late_at = float("inf")
            log.warning("no connection for sealed KV, CURVE takes it more slowly", to=self._host)

    def reset(self) -> None:
        """Drop the connection; the next one needs the next token."""
        if self._link is None:
            return
        task = asyncio.create_task(self._link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._link, self.is_up = None, False
        self.token = new_token()
        self._number += 1

    async def close(self) -> None:
        self.reset()
        await asyncio.gather(*self._closing)

    def _on_up(self) -> None:
        self.is_up = True
        log.info("sealed KV has a connection of its own", to=self._host)

    def _on_end(self) -> None:
        was_up = self.is_up
        self.reset()
        if was_up:
            log.warning("connection for sealed KV lost", to=self._host)
            self._on_down()


class SealedHub:
    """A decode worker's end: the socket for sealed segments, on a `port` of its own.

    `on_segment(peer, frame, message)` takes what an admitted `peer` sends, and nothing of it is
    known to be the peer's until it has been opened.
    """

    def __init__(
        self,
        sockets: SealedSockets,
        kv_bind: str,
        port: int,
        on_segment: Callable[[bytes, KvCache, Message], None],
    ) -> None:
        self.traffic = Traffic()
        self._on_segment = on_segment
        self._tokens = Tokens()
        self._hub = sockets.hub(self._on_message, self._tokens)
        bound = self._hub.bind(f"{kv_bind.rpartition(':')[0]}:{port}")
        self.port = int(bound.rpartition(":")[2])

    def expect(self, peer: bytes, token: bytes) -> None:
        """Let `peer` in once with this token."""
        self._tokens.expect(peer, token)

    def forget(self, peer: bytes) -> None:
        """Let `peer` in no more, and cut its connection."""
        self._tokens.forget(peer)

    async def close(self) -> None:
        await self._hub.close()

    def _on_message(self, name: bytes, parts: list[Buffer]) -> None:
        self.traffic.hear(parts)
        try:
            message = decode(parts)
            frame = message.frame
            if not isinstance(frame, KvCache) or not frame.segment:
                raise RemoteProtocolError(f"{frame.tag.name} is no sealed segment")
        except WireError as error:
            log.warning("sealed frame refused", peer=repr(name)[:64], reason=error.message)
            return
        self._on_segment(identity_of(name), frame, message)
