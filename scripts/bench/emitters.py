#!/usr/bin/env python3
"""A prefill and a decode worker that compute nothing and send tokens as fast as a router reads.

    scripts/bench/emitters.py tcp://127.0.0.1:5570 --model wire/demo

Both run in this process and use the wire protocol.  The first token id of a prompt determines the
output (`answer`), so that clients can check every token.  The `seed` of a request encodes the pace
of its tokens (`Flow`).  As with a real engine, each step is one message with a token for every
running request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import uvloop

from wire.aio.zmq import Link
from wire.frames import (
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Error,
    Heartbeat,
    Hello,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.identity import Identity
from wire.layout import KVLayout
from wire.parts import MAX_HEADERS, TAG, Buffer, decode, encode
from wire.payloads import (
    HelloDetail,
    Load,
    PrefillResult,
    Usage,
    decode_continuation,
    decode_prompt,
    encode_map,
    encode_prefill_result,
)
from wire.process.model import fingerprint, locate

LAYOUT: Final = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8")
NUM_BLOCKS: Final = 1 << 22
BEAT_S: Final = 0.5
# The interval for polling whether the send queue of a connection is empty.
FULL_S: Final = 0.0005
# The delay before requests decode together, so that clients receive the first tokens before.
TOGETHER_S: Final = 0.05


@dataclass(frozen=True)
class Flow:
    """The pace of the tokens after the first.

    There is a step every `pace_us`, or as fast as the router reads for 0, and no step before
    `together` requests are running.
    """

    pace_us: int = 0
    together: int = 0

    @property
    def seed(self) -> int:
        return self.together << 32 | self.pace_us

    @classmethod
    def of_seed(cls, seed: int) -> Flow:
        return cls(seed & 0xFFFFFFFF, seed >> 32)


def vocabulary(model: Path) -> list[int]:
    """Return the ids of tokens that are plain words; outputs consist of these."""
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(index for text, index in vocab.items() if text.strip("Ġ").isalpha())


def answer(words: list[int], key: int, num_tokens: int, start: int = 0) -> list[int]:
    """Return the output tokens from `start` on for prompts that begin with the token `key`."""
    return [words[(31 * key + 17 * i) % len(words)] for i in range(start, num_tokens)]


@dataclass(slots=True)
class Running:
    """A running request on the decode worker."""

    headers: list[bytes]
    flow: Flow
    num_sent: int = 0


@dataclass(slots=True)
class Shared:
    """The state that the decode workers for several router processes share."""

    running: list[dict[int, Running]] = field(default_factory=list)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    """One of the two workers and its connection to the router."""

    def __init__(self, role: Role, model: Path, router: str) -> None:
        self._identity = Identity(role, 0, time.time_ns() & (2**40 - 1))
        self._hello = HelloDetail(
            model=model.name,
            fingerprint=fingerprint(model),
            layout=LAYOUT,
            block_size=16,
            num_blocks=NUM_BLOCKS,
            max_model_len=1 << 20,
            max_kv_transfer_bytes=1 << 40,
            arithmetic="none",
            threads=1,
            kv_endpoint="tcp://127.0.0.1:1" if role is Role.DECODE else "",
        )
        self.words = vocabulary(model)
        self.link = Link(
            self._identity.name,
            router,
            self.on_message,
            on_up=self._say_hello,
            high_water_mark=64,  # else heartbeats would be queued behind seconds of tokens
        )

    def _say_hello(self) -> None:
        identity = self._identity
        hello = Hello(identity.epoch, identity.rank, identity.role)
        self.link.send(encode(hello, encode_map(self._hello)))
        self.beat()

    def beat(self) -> None:
        """Send a heartbeat that reports free blocks."""
        load = Load(total=NUM_BLOCKS, used=0, cached=0, free=NUM_BLOCKS)
        self.link.send(encode(Heartbeat(0, 0, 0), encode_map(load)))

    def on_message(self, parts: list[Buffer]) -> None:
        message = decode(parts)
        if isinstance(message.frame, Error):
            raise SystemExit(f"refused: {bytes(message.body())!r}")
        self.on_frame(message.frame, message.body())

    def on_frame(self, frame: object, body: Buffer) -> None:
        raise NotImplementedError


class Prefill(Worker):
    """Responds to every prompt at once; logs when it arrived and when its first token was sent."""

    def __init__(self, model: Path, router: str, notes: IO[str] | None) -> None:
        super().__init__(Role.PREFILL, model, router)
        self._notes = notes

    def on_frame(self, frame: object, body: Buffer) -> None:
        came_at = time.monotonic()
        if not isinstance(frame, PrefillRequest):
            return
        token_ids, options = decode_prompt(body, frame.seq_len)
        [token_id] = answer(self.words, token_ids[0], 1)
        is_last = options.max_tokens == 1
        result = PrefillResult(token_id=token_id, finish_reason="length" if is_last else None)
        done = PrefillDone(frame.request_id, 0)
        left_at = time.monotonic()
        self.link.send(encode(done, encode_prefill_result(result)))
        if self._notes is not None:
            print(token_ids[0], came_at, left_at, file=self._notes, flush=True)


class Decode(Worker):
    """Sends a token for every running request in each step."""

    def __init__(self, model: Path, router: str, shared: Shared) -> None:
        super().__init__(Role.DECODE, model, router)
        self._running: dict[int, Running] = {}
        self._shared = shared
        shared.running.append(self._running)

    def on_frame(self, frame: object, body: Buffer) -> None:
        if isinstance(frame, DecodeRequest):
            token_ids, options = decode_continuation(body)
            first = 1 + options.generated_tokens
            tokens = answer(self.words, token_ids[0], first + frame.max_new_tokens, first)
            pack, request_id = DecodeToken.layout.pack, frame.request_id
            headers = [pack(request_id, token_id) for token_id in tokens]
            self._running[request_id] = Running(headers, Flow.of_seed(options.seed))
            self._shared.has_more.set()
        elif isinstance(frame, Cancel):
            self._running.pop(frame.request_id, None)

    async def run(self) -> None:
        """Run steps while any request is running; never return."""
        tag = TAG.pack(Tag.DECODE_TOKEN)
        while True:
            while not (self._running and await self._may_begin()):
                self._shared.has_more.clear()
                await self._shared.has_more.wait()
            while moving := list(self._running.items())[:MAX_HEADERS]:
                self.link.send([tag, b"".join([each.headers[each.num_sent] for _, each in moving])])
                for request_id, each in moving:
                    each.num_sent += 1
                    if each.num_sent == len(each.headers):
                        self._end(request_id)
                await asyncio.sleep(max(each.flow.pace_us for _, each in moving) / 1e6)
                await self._until_sent()

    async def _until_sent(self) -> None:
        """Wait until the send queue of the connection is empty."""
        while self.link.queued_bytes:  # noqa: ASYNC110  a link has no event for it
            await asyncio.sleep(FULL_S)

    async def _may_begin(self) -> bool:
        awaited = max([each.flow.together for each in self._running.values()], default=1)
        if sum(map(len, self._shared.running)) < awaited:
            return False
        await asyncio.sleep(TOGETHER_S if awaited else 0.0)
        return True

    def _end(self, request_id: int) -> None:
        del self._running[request_id]
        self.link.send(encode(DecodeDone(request_id), encode_map(Usage(finish_reason="length"))))


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("router", nargs="+", help="its --bus; of several processes, all")
    parser.add_argument("--model", default="demo", help="that of the router")
    parser.add_argument(
        "--notes",
        type=argparse.FileType("w"),
        help="a line for each prompt: its key, when "
        "it came, and when its first token left, by the monotonic clock",
    )
    given = parser.parse_args()
    model = locate(given.model)
    prefills = [Prefill(model, router, given.notes) for router in given.router]
    shared = Shared()
    decoders = [Decode(model, router, shared) for router in given.router]
    running = [asyncio.create_task(decoder.run()) for decoder in decoders]
    while not any(task.done() for task in running):
        await asyncio.sleep(BEAT_S)
        for worker in (*prefills, *decoders):
            worker.beat()
    await asyncio.gather(*running)


if __name__ == "__main__":
    uvloop.run(main())
