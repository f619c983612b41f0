"""A router without sockets or time, and workers that do as they are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.bus import Bus
from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet, Worker
from router.core.request import Request, RequestEnd
from router.core.state import Limits, RequestIds
from wire.aio.zmq import Link
from wire.errors import ErrorCode, WireError
from wire.frames import DecodeToken, Frame, Heartbeat, Hello, Role, Tag
from wire.layout import KVLayout
from wire.options import Options
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import (
    HelloDetail,
    Load,
    Logprobs,
    PrefillResult,
    Usage,
    encode_map,
    encode_prefill_result,
)

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype="uint8")
EPOCH = 0xABCD


def detail(**changes: object) -> HelloDetail:
    fields: dict[str, object] = {
        "model": "demo",
        "fingerprint": "f00d",
        "layout": LAYOUT,
        "block_size": 16,
        "num_blocks": 64,
        "max_model_len": 1000,
        "max_kv_transfer_bytes": 1 << 20,
        "arithmetic": "hash",
        "threads": 1,
        "kv_endpoint": "tcp://127.0.0.1:1",
    }
    return HelloDetail(**(fields | changes))  # type: ignore[arg-type]


def load(total: int = 64, used: int = 0, cached: int = 0, **more: object) -> Load:
    return Load(total=total, used=used, cached=cached, free=total - used - cached, **more)  # type: ignore[arg-type]


def fleet(**changes: object) -> Fleet:
    settings: dict[str, object] = {
        "model_fingerprint": "f00d",
        "max_kv_transfer_bytes": 1 << 20,
        "heartbeat_s": 1.0,
    }
    return Fleet(**(settings | changes))  # type: ignore[arg-type]


def worker(role: Role = Role.DECODE, rank: int = 0, **changes: object) -> Worker:
    """A ready worker that belongs to no fleet."""
    made = fleet()
    name = f"{role.name.lower()}-{rank}-1".encode()
    joined, _ = made.hello(name, Hello(1, rank, role), detail(**changes), 0.0)
    num_blocks = joined.detail.num_blocks
    made.heartbeat(name, Heartbeat(0, 0, 0), load(num_blocks), 0.0)
    return joined


@dataclass
class RecordingSink:
    """Writes down what it hears; `ends` must never be more than one."""

    events: list[tuple[str, object]] = field(default_factory=list)
    books: list[RequestEnd] = field(default_factory=list)

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        self._note("prefill", result)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        self._note("token", token_id)

    def on_done(self, usage: Usage) -> None:
        self._note("done", usage)

    def on_error(self, error: WireError) -> None:
        self._note("error", error)

    def on_end(self, end: RequestEnd) -> None:
        self.books.append(end)

    def _note(self, kind: str, what: object) -> None:
        assert not self.ends, f"{kind} after {self.ends}"
        self.events.append((kind, what))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    @property
    def ends(self) -> list[tuple[str, object]]:
        return [event for event in self.events if event[0] in ("done", "error")]

    @property
    def error(self) -> WireError:
        [(kind, error)] = self.ends
        assert kind == "error" and isinstance(error, WireError)
        return error

    @property
    def usage(self) -> Usage:
        [(kind, usage)] = self.ends
        assert kind == "done" and isinstance(usage, Usage)
        return usage


@dataclass
class Ends:
    """An observer that keeps every end."""

    ends: list[RequestEnd] = field(default_factory=list)

    def on_request_end(self, end: RequestEnd) -> None:
        self.ends.append(end)


class Router:
    """A `Bus` over a list: `sent` holds what went to whom, `now` is the clock.

    Nothing more goes to the peers in `full`.
    It tries once unless `limits` say otherwise, so that a test sees how an attempt fails.
    """

    def __init__(self, limits: Limits | None = None, **fleet_changes: object) -> None:
        self.now = 100.0
        self.sent: list[tuple[bytes, Message]] = []
        self.forgotten: list[bytes] = []
        self.full: set[bytes] = set()
        self.fleet = fleet(**fleet_changes)
        self.bus = Bus(
            self.fleet,
            transmit=self.transmit,
            forget=self.forgotten.append,
            limits=limits or Limits(max_attempts=1),
            lease_ms=5000,
            request_ids=RequestIds(EPOCH),
            clock=lambda: self.now,
        )
        self.ends = Ends()
        self.dispatcher.observers.append(self.ends)

    def transmit(self, peer: bytes, parts: list[Buffer]) -> None:
        if peer in self.full:
            raise WireError(ErrorCode.OVERLOADED, "full")
        self.sent.append((peer, decode(parts)))

    @property
    def dispatcher(self) -> Dispatcher:
        return self.bus.dispatcher

    def say(self, peer: bytes, frames: Frame | list[DecodeToken], *payload: Buffer) -> None:
        """A message from a worker."""
        self.bus.on_message(peer, encode(frames, *payload))

    def join(self, role: Role, rank: int = 0, epoch: int = 1, **changes: object) -> bytes:
        """A worker joins and beats once; returns its identity."""
        peer = f"{role.name.lower()}-{rank}-{epoch}".encode()
        about = detail(**changes)
        self.say(peer, Hello(epoch, rank, role), encode_map(about))
        self.beat(peer, load(about.num_blocks))
        return peer

    def pair(self, **changes: object) -> tuple[bytes, bytes]:
        return self.join(Role.PREFILL, 0, 1, **changes), self.join(Role.DECODE, 0, 1, **changes)

    def beat(self, peer: bytes, what: Load) -> None:
        self.say(peer, Heartbeat(1, 0, 0), encode_map(what))

    def submit(
        self,
        prompt: int | tuple[int, ...] = 20,
        new: int | None = 5,
        client: str = "",
        **options: object,
    ) -> tuple[int, RecordingSink]:
        token_ids = tuple(range(prompt)) if isinstance(prompt, int) else prompt
        sink = RecordingSink()
        request = Request(token_ids, Options(**options), new, client)  # type: ignore[arg-type]
        return self.dispatcher.submit(request, sink), sink

    def take(self, tag: Tag) -> list[tuple[bytes, Message]]:
        """Remove and return what was sent with this tag."""
        taken = [item for item in self.sent if item[1].tag == tag]
        self.sent = [item for item in self.sent if item[1].tag != tag]
        return taken

    def prefill_id(self) -> int:
        """The request id of the one PREFILL_REQUEST sent."""
        [(_, message)] = self.take(Tag.PREFILL_REQUEST)
        return message.frame.request_id  # type: ignore[attr-defined, no-any-return]

    def assert_idle(self) -> None:
        """Every count is back at zero."""
        assert (self.dispatcher.num_running, self.dispatcher.num_waiting) == (0, 0)
        for each in self.fleet:
            assert not each.attempts and not each.promised
            assert (each.num_active, each.prefill_tokens, each.promised_blocks) == (0, 0, 0)


def first(token_id: int = 7, finish_reason: str | None = None) -> bytes:
    return encode_prefill_result(PrefillResult(token_id=token_id, finish_reason=finish_reason))


def usage(reason: str = "length") -> bytes:
    return encode_map(Usage(finish_reason=reason))


class ScriptedWorker:
    """A worker of the real protocol over a real link; what it hears is awaited by tag."""

    def __init__(
        self, endpoint: str, role: Role, rank: int = 0, epoch: int = 1, **changes: object
    ) -> None:
        self.hello = Hello(epoch, rank, role)
        self.identity = f"{role.name.lower()}-{rank}-{epoch}".encode()
        self._heard: asyncio.Queue[Message] = asyncio.Queue()
        self._detail = detail(**changes)
        self.link = Link(
            self.identity,
            endpoint,
            lambda parts: self._heard.put_nowait(decode(parts)),
            on_up=self._say_hello,
            on_down=lambda: None,
        )

    def _say_hello(self) -> None:
        self.say(self.hello, encode_map(self._detail))
        self.say(Heartbeat(0, 0, 0), encode_map(load()))

    def say(self, frames: Frame | list[DecodeToken], *payload: Buffer) -> None:
        self.link.send(encode(frames, *payload))

    async def hear(self, tag: Tag) -> Message:
        while True:
            message = await self._heard.get()
            if message.tag == tag:
                return message
