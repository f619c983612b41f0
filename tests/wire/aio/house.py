"""A hub with keys on a port of its own, and links of parties to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.wire.process.key_files import write
from wire.aio.zmq import Hub, Link
from wire.parts import Buffer
from wire.process.keys import Keys

LOOPBACK = "tcp://127.0.0.1:*"


class House:
    """A router's hub with keys, and the directory they are in."""

    def __init__(self, directory: Path, *parties: str) -> None:
        self.directory = directory
        self.pairs = write(directory, "router", *(parties or ("prefill-0", "decode-0")))
        self.messages: asyncio.Queue[tuple[bytes, list[Buffer]]] = asyncio.Queue()
        self.lost: asyncio.Queue[bytes] = asyncio.Queue()
        self.hub = Hub(
            lambda peer, parts: self.messages.put_nowait((peer, parts)),
            on_lost=self.lost.put_nowait,
            keys=Keys(directory, "router"),
        )
        self.endpoint = self.hub.bind(LOOPBACK)
        self.links: list[Link] = []

    def link(self, name: str, identity: bytes, **changes: object) -> Link:
        keys = Keys(self.directory, name)
        link = Link(identity, self.endpoint, lambda parts: None, keys=keys, **changes)  # type: ignore[arg-type]
        self.links.append(link)
        return link

    def authorize(self, *names: str) -> None:
        lines = [f"{self.pairs[name].public} {name}\n" for name in names]
        (self.directory / "authorized_keys").write_text("".join(lines))

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        await self.hub.close()
