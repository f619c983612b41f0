"""Clients that write down everything they see: each token with its time, and how it ended.

A `Record` is one request.  `ask_http` streams it through the OpenAI API, `TcpClient` multiplexes
many over one raw TCP connection.  Neither judges: that is `tests.faults.checks`.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from scripts.tcp_client import Client, connect
from wire.errors import ErrorCode
from wire.frames import (
    ANY_RANK,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Error,
    PrefillDone,
    PrefillRequest,
)
from wire.options import Options
from wire.parts import Message
from wire.payloads import Usage, decode_error, decode_map, decode_prefill_result, encode_prompt

# A request that has not ended after this long will never end.
PATIENCE_S: Final = 120.0


@dataclass(eq=False)
class Record:
    """One request and all its client saw; times are of the monotonic clock.

    `finish` is the finish reason, `error` the sentence of an error event or of a broken connection;
    `num_ends` counts both and `late` what came after the first.
    """

    prompt: list[int]
    options: Options
    num_tokens: int
    face: str
    asked_at: float = 0.0
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    ended_at: float = 0.0
    num_ends: int = 0
    late: list[str] = field(default_factory=list)
    is_cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def is_open(self) -> bool:
        return bool(self.asked_at) and not self.num_ends

    @property
    def is_held(self) -> bool:
        """Whether the first token is here and the second is not."""
        return self.is_open and len(self.tokens) == 1

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    def on_tokens(self, token_ids: list[int]) -> None:
        if token_ids and self.num_ends:
            self.late.append(f"{len(token_ids)} tokens")
        self.tokens += token_ids
        self.token_s += [time.monotonic()] * len(token_ids)
        self.changed.set()

    def on_end(self, *, finish: str = "", error: str = "") -> None:
        if self.num_ends:
            self.late.append(finish or error)
        self.num_ends += 1
        self.finish = self.finish or finish
        self.error = self.error or error
        self.ended_at = self.ended_at or time.monotonic()
        self.changed.set()

    async def until_tokens(self, count: int) -> None:
        """Wait until so many tokens are here, or the end.  Only one may wait."""
        while len(self.tokens) < count and not self.num_ends:
            self.changed.clear()
            await self.changed.wait()


def body_of(record: Record) -> dict[str, Any]:
    """The body of POST /v1/completions that asks for it."""
    return {
        "prompt": record.prompt,
        "max_tokens": record.num_tokens,
        "temperature": record.options.temperature,
        "seed": record.options.seed,
        "ignore_eos": record.options.ignore_eos,
        "stream": True,
        "return_token_ids": True,
    }


async def ask_http(client: httpx.AsyncClient, record: Record) -> None:
    """Stream one completion to its end, whatever that is."""
    record.asked_at = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body_of(record)) as response:
            if response.status_code != 200:
                await response.aread()
                record.on_end(error=f"HTTP {response.status_code}: {response.text[:300]}")
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _on_event(record, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        if record.is_open:
            record.on_end(error=f"connection: {type(error).__name__}: {error}")


def _on_event(record: Record, data: str) -> None:
    if data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        record.on_end(error=event["error"]["message"])
    for choice in event.get("choices", ()):
        token_ids = choice.get("token_ids", [])
        # HTTP names the EOS too, which raw TCP and the oracle leave out.
        record.on_tokens(token_ids[:-1] if choice["finish_reason"] == "stop" else token_ids)
        if choice["finish_reason"]:
            record.on_end(finish=choice["finish_reason"])


class TcpClient:
    """One raw TCP connection with any number of requests on it; closed by `close`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._records: dict[int, Record] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._first: dict[int, asyncio.Event] = {}
        self._next_id = 1
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, host: str, port: int) -> TcpClient:
        return cls(await connect(host, port))

    async def ask(self, record: Record, *, hold_s: float = 0.0) -> None:
        """Send a request and wait for its end; DECODE_REQUEST goes `hold_s` after PREFILL_DONE."""
        request_id = await self.begin(record)
        if hold_s:
            await _either(self._first[request_id], self._ended[request_id])
            await asyncio.sleep(hold_s)
        self.go_on(request_id)
        try:
            await asyncio.wait_for(self._ended[request_id].wait(), PATIENCE_S)
        except TimeoutError:
            return  # The record has no end: that is for the checks to say.

    async def begin(self, record: Record) -> int:
        """Send PREFILL_REQUEST; return its id on this connection."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._records[request_id] = record
        self._ended[request_id], self._first[request_id] = asyncio.Event(), asyncio.Event()
        record.asked_at = time.monotonic()
        if self._reader.done():
            self._first[request_id].set()
            self._ended[request_id].set()
            record.on_end(error="connection: closed before the request")
            return request_id
        prompt = encode_prompt(record.prompt, record.options)
        self._client.send(PrefillRequest(request_id, len(record.prompt), ANY_RANK), prompt)
        await self._client.drain()
        return request_id

    def go_on(self, request_id: int) -> None:
        """Send DECODE_REQUEST."""
        record = self._records[request_id]
        if not record.num_ends:
            self._client.send(DecodeRequest(request_id, record.num_tokens - 1))

    def cancel(self, request_id: int) -> None:
        """Send CANCEL; what comes after the answer to it is none of the request's."""
        record = self._records[request_id]
        if not record.num_ends:
            record.is_cancelled = True
            self._client.send(Cancel(request_id, ErrorCode.CANCELLED))
            self._forget(request_id)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._client.close()

    async def _read(self) -> None:
        try:
            async for message in self._client:
                self._on_message(message)
            reason = "connection: closed"
        except ConnectionError as error:
            reason = f"connection: {error}"
        for record in self._records.values():
            if record.is_open and not record.is_cancelled:
                record.on_end(error=reason)
        for event in (*self._first.values(), *self._ended.values()):
            event.set()

    def _on_message(self, message: Message) -> None:
        frame = message.frame
        request_id: int = frame.request_id  # type: ignore[attr-defined]
        record = self._records.get(request_id)
        if record is None or record.is_cancelled:
            return
        if isinstance(frame, PrefillDone):
            result = decode_prefill_result(message.body())
            record.on_tokens([] if result.finish_reason == "stop" else [result.token_id])
            self._first[request_id].set()
        elif isinstance(frame, DecodeToken):
            record.on_tokens([frame.token_id])
        elif isinstance(frame, DecodeDone):
            record.on_end(finish=decode_map(Usage, message.body()).finish_reason)
            self._ended[request_id].set()
        elif isinstance(frame, Error):
            record.on_end(error=decode_error(message.body()).message)
            self._ended[request_id].set()

    def _forget(self, request_id: int) -> None:
        for table in (self._records, self._ended, self._first):
            del table[request_id]


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (one, other)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    for wait in waits:
        wait.cancel()
