"""A router and KV peers played by a test, on real sockets, with real workers in the same process.

The workers are whole: engine thread, transfer thread, bus and KV sockets, the hash executor.  The
test sends the other side's frames and awaits the workers'.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self, cast

from tests.kv import whole
from wire.aio.zmq import Hub, Link
from wire.frames import (
    NO_RANK,
    Cancel,
    DecodeRequest,
    Drain,
    Error,
    Frame,
    Heartbeat,
    Hello,
    KvCache,
    KvCacheAck,
    Peers,
    PrefillRequest,
    Role,
    Tag,
    Welcome,
)
from wire.identity import Identity
from wire.options import Options
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import (
    Credit,
    HelloDetail,
    Load,
    Offer,
    PeerDetail,
    WelcomeDetail,
    decode_map,
    encode_continuation,
    encode_map,
    encode_prompt,
)
from wire.process.keys import Keys
from wire.transfer import SegmentDescriptor, segment_digest
from worker.app import Worker
from worker.config import Config
from worker.environment import Environment
from worker.executor.batch import Batch
from worker.executor.hash import LAYOUT, HashExecutor, HashKVCache, create

EPOCH = 7
# Answers of a worker come within milliseconds; only a broken test waits so long.
PATIENCE_S = 30.0
# A worker that is a process of its own imports torch before it joins, on cores that others use.
START_S = 120.0


class ScriptedRouter:
    """One router: says WELCOME and PEERS by itself, everything else is up to the test."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:0",
        keys: Keys | None = None,
        listener: int | None = None,
    ) -> None:
        self.peers: dict[Role, bytes] = {}
        self.hellos: list[Hello] = []
        self.details: dict[Role, HelloDetail] = {}
        self.loads: dict[bytes, Load] = {}
        self.stored: list[int] = []  # prefix hashes of all heartbeats
        self.beats: dict[Role, Heartbeat] = {}
        self.is_welcoming = True
        self.heartbeat_ms = 50
        self.epoch = EPOCH
        self.lease_ms = 30_000
        self.drains: list[Drain] = []
        self.answers_drains = True
        self.lost: list[bytes] = []
        self._messages: asyncio.Queue[tuple[bytes, Message]] = asyncio.Queue()
        self._heard = asyncio.Condition()
        self._hub = Hub(self._on_message, on_lost=self._on_lost, keys=keys)
        self.endpoint = self._hub.bind(endpoint, listener)

    async def close(self) -> None:
        await self._hub.close(0)

    def hand_over(self) -> int:
        """Leave new connections to a successor; return the descriptor that it listens on."""
        listener = os.dup(self._hub.listener)
        self._hub.stop_accepting()
        return listener

    def send(self, to: Role, frame: Frame, *payload: Buffer) -> None:
        self.send_raw(to, encode(frame, *payload))

    def send_raw(self, to: Role, parts: list[Buffer]) -> None:
        self._hub.send(self.peers[to], parts)

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
            tokens += [token_id for _, token_id in message.tokens]
        return tokens

    async def until_free(self, *roles: Role) -> None:
        """Wait for heartbeats that say: no block used, nothing in flight."""

        def is_free() -> bool:
            loads = [self.loads.get(self.peers[role]) for role in roles]
            return all(load and not load.used and not load.kv_inflight_bytes for load in loads)

        self.loads.clear()  # what was said before does not count
        await self.until(is_free)

    async def load(self, role: Role) -> Load:
        """The content of the next heartbeat."""
        del self.loads[self.peers[role]]
        await self.until_joined(role)
        return self.loads_by_role[role]

    async def until_joined(self, *roles: Role) -> None:
        await self.until(lambda: all(role in self.loads_by_role for role in roles), START_S)

    async def until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Wait for what a worker says to make this true; it is looked at after every message."""
        async with self._heard:
            await asyncio.wait_for(self._heard.wait_for(condition), patience_s)

    @property
    def loads_by_role(self) -> dict[Role, Load]:
        return {role: self.loads[peer] for role, peer in self.peers.items() if peer in self.loads}

    @property
    def is_quiet(self) -> bool:
        """Whether every message has been taken by the test."""
        return self._messages.empty()

    def _on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        message = decode(parts)
        match frame := message.frame:
            case Hello():
                self._on_hello(peer, frame, decode_map(HelloDetail, message.body()))
            case Drain():
                self.drains.append(frame)
                if self.answers_drains:
                    self._hub.send(peer, encode(frame))
            case Heartbeat():
                self.beats[Identity.parse(peer).role] = frame
                self.loads[peer] = load = decode_map(Load, message.body())
                self.stored += load.stored
                self._hub.send(peer, encode(Heartbeat(0, 0, 0)))
            case _:
                self._messages.put_nowait((peer, message))
        asyncio.get_running_loop().create_task(self._notify())

    def _on_lost(self, peer: bytes) -> None:
        self.lost.append(peer)
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
        answer = Welcome(self.epoch, self.heartbeat_ms, self.lease_ms)
        self._hub.send(peer, encode(answer, encode_map(welcome)))
        if {Role.PREFILL, Role.DECODE} <= self.peers.keys():
            decode = self.details[Role.DECODE]
            self.announce(decode.kv_endpoint, decode.kv_unasked_bytes)

    def announce(self, kv_endpoint: str, kv_unasked_bytes: int = 0) -> None:
        """Tell the prefill worker where the decode worker of rank 0 takes KV in."""
        peer = PeerDetail(
            rank=0, epoch=1, kv_endpoint=kv_endpoint, kv_unasked_bytes=kv_unasked_bytes
        )
        self.send(Role.PREFILL, Peers(self.epoch, 1), encode_map([peer]))


class Clock:
    """The worker's clock: it advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Process:
    """A worker and its stop signal; with a `clock` it has no other time, its leases neither."""

    def __init__(self, router: ScriptedRouter, role: str, /, **settings: Any) -> None:
        executor, draft = settings.pop("executor", None), settings.pop("draft", None)
        executor = executor or create(step_delay_s=settings.pop("step_delay_s", 0.0))
        clock = settings.pop("clock", None)
        environment = None if clock is None else Environment(clock=clock)
        settings = {"num_blocks": 256, "router": (router.endpoint,), **settings}
        self.stop = asyncio.Event()
        config = Config(role=cast(Any, role), **settings)
        self.worker = Worker(config, executor, environment, draft=draft)
        self.task = asyncio.create_task(self.worker.run(self.stop))


@asynccontextmanager
async def scripted_router(
    keys: Keys | None = None, listener: int | None = None
) -> AsyncIterator[ScriptedRouter]:
    router = ScriptedRouter(keys=keys, listener=listener)
    try:
        yield router
    finally:
        await router.close()


async def heard(router: ScriptedRouter) -> None:
    """Wait until the decode worker has read what the router sent."""
    router.send(Role.DECODE, PrefillRequest(9, 1, 0), encode_prompt([1], Options()))
    await router.receive(Tag.ERROR)  # a decode worker refuses it


@asynccontextmanager
async def running(router: ScriptedRouter, role: str, /, **settings: Any) -> AsyncIterator[Process]:
    """A worker of this role, registered; stopped at the end."""
    process = Process(router, role, **settings)
    try:
        await router.until_joined(Role[role.upper()])
        yield process
    finally:
        process.stop.set()
        await asyncio.wait_for(process.task, PATIENCE_S)


@asynccontextmanager
async def running_prefill(
    **settings: Any,
) -> AsyncIterator[tuple[ScriptedRouter, ScriptedDecode]]:
    """A real prefill worker between a router and a decode worker of the test's."""
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill", **settings),
    ):
        router.announce(decode.endpoint)
        yield router, decode


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


class ScriptedPeer:
    """A KV socket; every frame is up to the test."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        raise NotImplementedError

    async def receive(self) -> Message:
        return await asyncio.wait_for(self._messages.get(), PATIENCE_S)

    @property
    def is_quiet(self) -> bool:
        return self._messages.empty()


class ScriptedDecode(ScriptedPeer):
    """The KV socket of a decode worker."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", **security: Any) -> None:
        super().__init__()
        self.peer = b""
        self.is_left = asyncio.Event()  # by a peer whose connection ended
        self._hub = Hub(self._on_message, on_lost=lambda _: self.is_left.set(), **security)
        self.endpoint = self._hub.bind(endpoint)

    async def close(self) -> None:
        await self._hub.close(0)

    def _on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        self.peer = peer
        self._messages.put_nowait(decode(parts))

    async def receive_past_keepalives(self) -> Message:
        """The next message that is no keepalive."""
        while (message := await self.receive()).tag is Tag.KV_CACHE and not message.payload:
            pass
        return message

    def send(self, frame: Frame, *payload: Buffer) -> None:
        self._hub.send(self.peer, encode(frame, *payload))

    def ack(
        self,
        request_id: int,
        kv_bytes: int,
        credit: int,
        *,
        ready: bool = False,
        in_memory: bool = False,
        segment_port: int = 0,
    ) -> None:
        granted = Credit(credit, 0, int(ready), int(in_memory), segment_port)
        self.send(KvCacheAck(request_id, kv_bytes), granted.pack())

    async def offered(self, request_id: int) -> Offer:
        message = await self.receive()
        assert message.frame == KvCache(request_id, 0, 0)
        return decode_map(Offer, message.body())

    async def segment(self, request_id: int) -> SegmentDescriptor:
        """The next segment, which must be sound."""
        message = await self.receive_past_keepalives()
        assert isinstance(message.frame, KvCache) and message.frame.request_id == request_id
        descriptor, kv = SegmentDescriptor.unpack(message.payload[0]), message.payload[1]
        assert descriptor.num_bytes == len(kv)
        assert descriptor.digest == segment_digest(request_id, kv)
        return descriptor


def offer_of(prompt: list[int], **changes: Any) -> bytes:
    """A prefill worker's offer of a prompt."""
    fields = {
        "layout": LAYOUT,
        "num_tokens": len(prompt),
        "total_bytes": len(prompt) * LAYOUT.token_bytes,
        "token_ids": b"".join(token.to_bytes(4, "little") for token in prompt),
        **changes,
    }
    return encode_map(Offer(**fields))


class ScriptedPrefill(ScriptedPeer):
    """The KV socket of a prefill worker, connected to a decode worker."""

    def __init__(
        self, to: ScriptedRouter | str, name: bytes = b"prefill-0-1", **security: Any
    ) -> None:
        super().__init__()
        self.is_refused = asyncio.Event()  # or its connection ended otherwise
        endpoint = to if isinstance(to, str) else to.details[Role.DECODE].kv_endpoint
        self._link = Link(name, endpoint, self._on_message, on_down=self.is_refused.set, **security)

    async def close(self) -> None:
        await self._link.close(0)

    def _on_message(self, parts: list[Buffer]) -> None:
        self._messages.put_nowait(decode(parts))

    def send(self, frame: Frame, *payload: Buffer) -> None:
        self._link.send(encode(frame, *payload))

    def send_raw(self, *parts: Buffer) -> None:
        self._link.send(parts)

    async def error(self) -> tuple[int, int]:
        """Request id and code of the next message, which must be an ERROR."""
        frame = (await self.receive()).frame
        assert isinstance(frame, Error), frame
        return frame.request_id, frame.code

    async def ack(self) -> tuple[KvCacheAck, Credit]:
        message = await self.receive()
        assert isinstance(message.frame, KvCacheAck), message
        return message.frame, Credit.unpack(message.body())

    def offer(self, request_id: int, prompt: list[int], **changes: Any) -> None:
        self.send(KvCache(request_id, 0, 0), offer_of(prompt, **changes))

    def offer_with_kv(
        self,
        request_id: int,
        prompt: list[int],
        *cuts: range,
        digest: int | None = None,
        memory: str | None = None,
    ) -> None:
        """Offer with the KV (zeros) of all layers of these tokens, a segment each."""
        payload = []
        for tokens in cuts:
            kv = bytes(len(tokens) * LAYOUT.token_bytes)
            said = segment_digest(request_id, kv) if digest is None else digest
            rectangle = whole(LAYOUT, tokens.start, len(tokens))
            payload += [SegmentDescriptor.of(rectangle, len(kv), said).pack(), kv]
        offer = offer_of(prompt, memory=memory)
        self.send(KvCache(request_id, 0, len(cuts)), offer, *payload)

    def segment(
        self,
        request_id: int,
        tokens: range,
        number: int = 1,
        num_segments: int = 1,
        *,
        digest: int | None = None,
    ) -> None:
        """Send the KV (zeros) of all layers of these tokens."""
        kv = bytes(len(tokens) * LAYOUT.token_bytes)
        rectangle = whole(LAYOUT, tokens.start, len(tokens))
        digest = segment_digest(request_id, kv) if digest is None else digest
        descriptor = SegmentDescriptor.of(rectangle, len(kv), digest).pack()
        self.send(KvCache(request_id, number, num_segments), descriptor, kv)

    def cancel(self, request_id: int) -> None:
        self.send(Cancel(request_id, 12))


class GatedCache(HashKVCache):
    """Copies wait at a gate, and say that they have come to it."""

    copies_at_once, copies_wait = 2, True  # as of a device

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.gate = threading.Event()
        self.gate.set()
        self.is_reached = threading.Event()
        self.problem: Exception | None = None

    def pass_gate(self) -> None:
        if threading.current_thread().name.startswith("kv-"):
            self.is_reached.set()
            assert self.gate.wait(PATIENCE_S)
            if self.problem is not None:
                raise self.problem

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.is_reached.wait, PATIENCE_S)

    def pack(self, *args: Any) -> memoryview:
        self.pass_gate()
        return super().pack(*args)

    def unpack(self, *args: Any) -> None:
        self.pass_gate()
        super().unpack(*args)


class GatedExecutor(HashExecutor):
    """The hash executor with a `GatedCache`; `fail_at` is the step that raises, from 0."""

    def __init__(
        self,
        *,
        fail_at: int = -1,
        problem: Exception | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(create(max_model_len=max_model_len).info)
        self._fail_at, self._problem = fail_at, problem
        self._steps = count()

    @property
    def cache(self) -> GatedCache:
        assert isinstance(self._cache, GatedCache)
        return self._cache

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> HashKVCache:
        self._cache = GatedCache(num_blocks, block_size)
        return self._cache

    def forward(self, batch: Any) -> list[int]:
        if next(self._steps) == self._fail_at:
            raise self._problem or RuntimeError("the device is gone")
        return super().forward(batch)


class GatedSteps(HashExecutor):
    """Steps wait at a gate, which is open at first; `num_tokens` has the size of each."""

    def __init__(self) -> None:
        super().__init__(create().info)
        self.gate = threading.Event()
        self.gate.set()
        self.is_reached = threading.Event()
        self.num_tokens: list[int] = []
        self._passes_one = False

    def forward(self, batch: Batch) -> list[int]:
        self.num_tokens.append(len(batch.token_ids))
        self.is_reached.set()
        assert self.gate.wait(PATIENCE_S)
        if self._passes_one:
            self.gate.clear()
        return super().forward(batch)

    def close(self) -> None:
        """Close the gate, for the next step to come to it."""
        self.is_reached.clear()
        self.gate.clear()

    def pass_one(self) -> None:
        """Open the gate for one step."""
        self._passes_one = True
        self.gate.set()

    def open(self) -> None:
        self._passes_one = False
        self.gate.set()

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.is_reached.wait, PATIENCE_S)
