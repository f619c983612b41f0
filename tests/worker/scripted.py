"""A router played by a test, on a real bus, with real workers in the same process.

The workers are whole: engine thread, transfer thread, bus and KV sockets, the hash executor.  The
test sends the router's frames and awaits the workers'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from wire.aio.process import Stop
from wire.aio.zmq import Hub
from wire.frames import (
    NO_RANK,
    DecodeRequest,
    Drain,
    Frame,
    Hello,
    Peers,
    PrefillRequest,
    Role,
    Tag,
    Welcome,
)
from wire.options import Options
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import (
    HelloDetail,
    Load,
    PeerDetail,
    WelcomeDetail,
    decode_map,
    encode_continuation,
    encode_map,
    encode_prompt,
)
from worker.app import Worker
from worker.config import Config
from worker.executor.hash import create
from worker.link import Identity

EPOCH = 7
# Answers of a worker come within milliseconds; only a broken test waits so long.
PATIENCE_S = 10.0


class ScriptedRouter:
    """One router: says WELCOME and PEERS by itself, everything else is up to the test."""

    def __init__(self) -> None:
        self.peers: dict[Role, bytes] = {}
        self.hellos: list[Hello] = []
        self.details: dict[Role, HelloDetail] = {}
        self.loads: dict[bytes, Load] = {}
        self.is_welcoming = True
        self._messages: asyncio.Queue[tuple[bytes, Message]] = asyncio.Queue()
        self._heard = asyncio.Condition()
        self._hub = Hub(self._on_message)
        self.endpoint = self._hub.bind("tcp://127.0.0.1:0")

    async def close(self) -> None:
        await self._hub.close(0)

    def send(self, to: Role, frame: Frame, *payload: Buffer) -> None:
        self._hub.send(self.peers[to], encode(frame, *payload))

    def prefill(self, request_id: int, prompt: list[int], options: Options) -> None:
        rank = NO_RANK if options.max_tokens == 1 else 0
        frame = PrefillRequest(request_id, len(prompt), rank)
        self.send(Role.PREFILL, frame, encode_prompt(prompt, options))

    def decode(self, request_id: int, tokens: list[int], num_tokens: int, options: Options) -> None:
        frame = DecodeRequest(request_id, num_tokens)
        self.send(Role.DECODE, frame, encode_continuation(tokens, options))

    async def receive(self, tag: Tag) -> Message:
        """The next message that is not of the control plane; it must have this tag."""
        message = await self.receive_any()
        assert message.tag is tag, message
        return message

    async def receive_any(self) -> Message:
        _, message = await asyncio.wait_for(self._messages.get(), PATIENCE_S)
        return message

    async def tokens(self, num_tokens: int) -> list[int]:
        """Token ids of DECODE_TOKEN messages, until there are so many."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            message = await self.receive(Tag.DECODE_TOKEN)
            tokens += [frame.token_id for frame in message.frames]  # type: ignore[attr-defined]
        return tokens

    async def until_free(self, *roles: Role) -> None:
        """Wait for heartbeats that say: no block used, nothing in flight."""

        def is_free() -> bool:
            loads = [self.loads.get(self.peers[role]) for role in roles]
            return all(load and not load.used and not load.kv_inflight_bytes for load in loads)

        self.loads.clear()  # what was said before does not count
        async with self._heard:
            await asyncio.wait_for(self._heard.wait_for(is_free), PATIENCE_S)

    async def until_joined(self, *roles: Role) -> None:
        async with self._heard:
            joined = self._heard.wait_for(lambda: all(role in self.loads_by_role for role in roles))
            await asyncio.wait_for(joined, PATIENCE_S)

    @property
    def loads_by_role(self) -> dict[Role, Load]:
        return {role: self.loads[peer] for role, peer in self.peers.items() if peer in self.loads}

    @property
    def is_quiet(self) -> bool:
        """Whether every message has been taken by the test."""
        return self._messages.empty()

    def _on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        message = decode(parts)
        frame = message.frame
        match frame:
            case Hello():
                self._on_hello(peer, frame, decode_map(HelloDetail, message.body()))
            case Drain():
                self._hub.send(peer, encode(Drain(EPOCH, 0)))
            case _ if frame.tag is Tag.HEARTBEAT:
                self.loads[peer] = decode_map(Load, message.body())
            case _:
                self._messages.put_nowait((peer, message))
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._heard:
            self._heard.notify_all()

    def _on_hello(self, peer: bytes, frame: Hello, detail: HelloDetail) -> None:
        role = Role(frame.role)
        self.hellos.append(frame)
        self.peers[role], self.details[role] = peer, detail
        if not self.is_welcoming:
            return
        # Quick heartbeats: tests wait for what they say.
        welcome = WelcomeDetail(max_kv_transfer_bytes=1 << 30)
        self._hub.send(peer, encode(Welcome(EPOCH, 50, 30_000), encode_map(welcome)))
        if {Role.PREFILL, Role.DECODE} <= self.peers.keys():
            self.announce(self.details[Role.DECODE].kv_endpoint)

    def announce(self, kv_endpoint: str) -> None:
        """Tell the prefill worker where the decode worker of rank 0 takes KV in."""
        peer = PeerDetail(rank=0, epoch=1, kv_endpoint=kv_endpoint)
        self.send(Role.PREFILL, Peers(EPOCH, 1), encode_map([peer]))


class Process:
    """A worker and its stop signal."""

    def __init__(self, router: ScriptedRouter, role: str, **settings: Any) -> None:
        step_delay_s = settings.pop("step_delay_s", 0.0)
        settings = {"num_blocks": 256, "router": (router.endpoint,), **settings}
        self.stop = Stop()
        self.worker = Worker(Config(role=role, **settings), create(step_delay_s=step_delay_s))
        self.task = asyncio.create_task(self.worker.run(self.stop))


@asynccontextmanager
async def scripted_router() -> AsyncIterator[ScriptedRouter]:
    router = ScriptedRouter()
    try:
        yield router
    finally:
        await router.close()


@asynccontextmanager
async def running(router: ScriptedRouter, role: str, **settings: Any) -> AsyncIterator[Process]:
    """A worker of this role, registered; stopped at the end."""
    process = Process(router, role, **settings)
    try:
        await router.until_joined(Role[role.upper()])
        yield process
    finally:
        process.stop.set()
        await asyncio.wait_for(process.task, PATIENCE_S)


@asynccontextmanager
async def pair(
    *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> AsyncIterator[ScriptedRouter]:
    """A router with one prefill and one decode worker."""
    async with (
        scripted_router() as router,
        running(router, "decode", **(decode or {})),
        running(router, "prefill", **(prefill or {})),
    ):
        yield router


def identity(role: Role, rank: int = 0, epoch: int = 1) -> bytes:
    return Identity(role, rank, epoch).name
