"""A worker gone bad, for `scripts/fuzz`: what it says goes to a real router core.

An input is the 16 bytes of a header and a payload, of one tag for each target.  The core may refuse
it, by dropping the worker or by failing the one request; that is `RemoteProtocolError` here.
Whatever it lets through must be fit for a client and for the metrics: that is asserted by the sink
that hears it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from math import isfinite
from typing import Any, Final

import structlog

from router.bus import Bus
from router.core.cluster import state_of
from router.core.fleet import Fleet
from router.core.replies import SENTENCES
from router.core.request import Request, RequestEnd
from router.core.state import Limits, RequestIds
from router.metrics import Metrics
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import (
    DecodeDone,
    DecodeToken,
    Drain,
    Error,
    Frame,
    Heartbeat,
    Hello,
    PrefillDone,
    Role,
    Tag,
)
from wire.identity import Identity
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.logprobs import join_prompt_logprobs, pack_logprobs, unpack_prompt_logprobs
from wire.options import Options
from wire.parts import TAG, decode, encode
from wire.payloads import (
    ErrorDetail,
    HelloDetail,
    Load,
    Logprobs,
    PrefillResult,
    TierLoad,
    Usage,
    encode_map,
    encode_prefill_result,
)
from wire.stream import MAX_SMALL_FRAME_BYTES

VOCAB: Final = 100
PROMPT: Final = tuple(range(4))
OPTIONS: Final = Options(logprobs=2, prompt_logprobs=1)
LAYOUT: Final = KVLayout(
    groups=(
        KVGroup(num_layers=2, num_kv_heads=1, key_dim=4, value_dim=4, dtype="uint8"),
        KVGroup(num_layers=2, num_kv_heads=1, key_dim=4, value_dim=4, dtype="uint8", window=3),
        StateGroup(num_layers=1, num_heads=2, head_bytes=8),
    )
)
KV_BYTES: Final = LAYOUT.transfer_bytes(len(PROMPT))
# The request that a header means by this id is the one that is open.
OPEN: Final = 1
# Between looks at what Prometheus and /v1/cluster would be told.
LOOK: Final = 2000

P, D, NEW = (
    Identity(Role.PREFILL, 0, 7),
    Identity(Role.DECODE, 0, 7),
    Identity(Role.DECODE, 1, 7),
)
DETAIL: Final = HelloDetail(
    model="demo",
    fingerprint="f00d",
    layout=LAYOUT,
    block_size=16,
    num_blocks=64,
    max_model_len=1000,
    max_kv_transfer_bytes=1 << 20,
    kv_endpoint="tcp://127.0.0.1:5600",
    arithmetic="hash",
    threads=1,
)
LOAD: Final = Load(
    total=64,
    used=4,
    cached=3,
    free=57,
    stored=(1, 2**64 - 1),
    evicted=(7,),
    host=TierLoad(max_blocks=8, blocks=2, bytes=96),
    disk=TierLoad(max_blocks=9, loaded_tokens=32),
)
SCORES: Final = Logprobs(logprob=-0.5, top=((7, -0.5), (9, -1.5)))
ROWS: Final = join_prompt_logprobs(1, 3 * [pack_logprobs(Logprobs(logprob=-1.0, top=((9, -0.5),)))])


class Sink:
    """The client side; results must fit the request and be finite, and errors be in our words."""

    def __init__(self) -> None:
        self.error: WireError | None = None

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        assert kv_bytes <= KV_BYTES
        assert result.cached_tokens <= len(PROMPT) and -1 <= result.token_id < VOCAB
        assert result.finish_reason in (None, "stop", "length")
        _check_scores(result.logprobs)
        if result.prompt_logprobs is not None:
            rows = unpack_prompt_logprobs(result.prompt_logprobs)
            assert len(rows) == len(PROMPT) - 1
            for row in rows:
                _check_scores(row)
        assert len(encode_prefill_result(result)) < MAX_SMALL_FRAME_BYTES

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        assert 0 <= token_id < VOCAB
        _check_scores(logprobs)

    def on_done(self, usage: Usage) -> None:
        assert usage.finish_reason in ("stop", "length")
        assert usage.kv_bytes <= KV_BYTES
        assert 0 <= usage.kv_seconds < 1e3 and 0 <= usage.kv_transfer_seconds < 1e3

    def on_error(self, error: WireError) -> None:
        self.error = error
        ours = ("lost ", "prefill-0 broke", "decode-0 broke", *SENTENCES.values())
        assert error.message.startswith(ours), error.message

    def on_end(self, end: RequestEnd) -> None:
        """The metrics hear of it too."""


class Core:
    """A router without sockets; `say` brings everything back to where it was."""

    def __init__(self) -> None:
        structlog.configure(processors=[_drop])
        self._now, self._num_inputs = 100.0, 0
        self._fleet = Fleet(
            model_fingerprint="f00d", max_kv_transfer_bytes=1 << 20, heartbeat_s=1.0
        )
        self._is_dropped = False
        self._sent_id = 0
        self._bus = Bus(
            self._fleet,
            transmit=self._transmit,
            forget=self._forget,
            limits=Limits(max_attempts=1, vocab_size=VOCAB),
            lease_ms=5000,
            request_ids=RequestIds(7),
            clock=lambda: self._now,
        )
        self._metrics = Metrics(self._bus.dispatcher)
        self._bus.dispatcher.observers.append(self._metrics)
        for who in (P, D):
            self._join(who)

    def say(self, tag: Tag, raw: bytes) -> None:
        """Have a worker say it.

        Raises:
            RemoteProtocolError: The router refused it.
        """
        self._num_inputs += 1
        self._now += 0.001
        who = {Tag.HELLO: NEW, Tag.PREFILL_DONE: P}.get(tag, D)
        sink, handle = self._request(is_read=tag in (Tag.DECODE_TOKEN, Tag.DECODE_DONE))
        header = raw[:16]
        if header[:8] == struct.pack("<Q", OPEN):
            header = struct.pack("<Q", self._sent_id) + header[8:]
        self._is_dropped = False
        self._bus.on_message(who.name, [TAG.pack(tag), header, raw[16:]])
        is_refused = self._is_dropped or (
            sink.error is not None and "broke the protocol" in sink.error.message
        )
        self._restore(handle)
        if self._num_inputs % LOOK == 0:
            self._look()
        if is_refused:
            raise RemoteProtocolError("refused")

    def _request(self, *, is_read: bool) -> tuple[Sink, int]:
        sink = Sink()
        handle = self._bus.dispatcher.submit(Request(PROMPT, OPTIONS, 5), sink)
        if is_read:
            payload = encode_prefill_result(PrefillResult(token_id=3))
            self._bus.on_message(P.name, encode(PrefillDone(self._sent_id, 0), payload))
        return sink, handle

    def _restore(self, handle: int) -> None:
        self._bus.dispatcher.cancel(handle)
        if self._fleet.get(NEW.name) is not None:
            self._bus.on_lost(NEW.name)
        for who in (P, D):
            worker = self._fleet.get(who.name)
            if worker is None or not worker.is_ready:
                self._bus.on_lost(who.name)
                self._join(who)
        assert self._bus.dispatcher.num_running == self._bus.dispatcher.num_waiting == 0
        assert self._bus.index.size(D.name) <= DETAIL.num_blocks

    def _look(self) -> None:
        text = self._metrics.render()
        assert b"NaN" not in text and b"Inf" not in text.replace(b'le="+Inf"', b"")
        assert b'outcome="other"' not in text, "a finish reason that is none"
        assert len(text) < 100_000, "labels grow"
        state_of(self._bus.dispatcher, self._now)

    def _join(self, who: Identity) -> None:
        hello = Hello(who.epoch, who.rank, who.role)
        self._bus.on_message(who.name, encode(hello, encode_map(DETAIL)))
        self._beat(who)

    def _beat(self, who: Identity) -> None:
        load = Load(total=64, used=0, cached=0, free=64)
        self._bus.on_message(who.name, encode(Heartbeat(1, 0, 0), encode_map(load)))

    def _transmit(self, peer: bytes, parts: list[Any]) -> None:
        frame = decode(parts).frame
        if frame.tag is Tag.PREFILL_REQUEST:
            self._sent_id = frame.request_id  # type: ignore[attr-defined]
        elif isinstance(frame, Error) and frame.code == ErrorCode.PROTOCOL:
            self._is_dropped = True

    def _forget(self, peer: bytes) -> None:
        self._is_dropped = True


def feeds() -> dict[str, tuple[Callable[[bytes], None], list[bytes]]]:
    """Return a target for every frame of a worker, and inputs that are good, by its name."""
    said: dict[Tag, list[tuple[Frame, bytes]]] = {
        Tag.HELLO: [(Hello(NEW.epoch, NEW.rank, NEW.role), encode_map(DETAIL))],
        Tag.HEARTBEAT: [(Heartbeat(5, 1, 2), encode_map(LOAD))],
        Tag.PREFILL_DONE: [
            (PrefillDone(OPEN, 64), encode_prefill_result(PrefillResult(**fields)))
            for fields in (
                {"token_id": 7},
                {"token_id": 7, "cached_tokens": 2, "logprobs": SCORES, "prompt_logprobs": ROWS},
                {"token_id": 7, "finish_reason": "length"},
                {"token_id": -1, "finish_reason": "stop"},
            )
        ],
        Tag.DECODE_TOKEN: [
            (DecodeToken(OPEN, 7), b""),
            (DecodeToken(OPEN, 7), encode_map([SCORES])),
        ],
        Tag.DECODE_DONE: [
            (DecodeDone(OPEN), encode_map(Usage(finish_reason="stop"))),
            (
                DecodeDone(OPEN),
                encode_map(
                    Usage(
                        finish_reason="length",
                        completion_tokens=6,
                        kv_bytes=64,
                        kv_skipped_tokens=2,
                        kv_seconds=0.25,
                        kv_transfer_seconds=0.125,
                    )
                ),
            ),
        ],
        Tag.ERROR: [
            (Error(request_id, code), encode_map(ErrorDetail(message="as it says", stage="decode")))
            for request_id, code in ((OPEN, 1), (OPEN, 7), (0, 2))
        ],
        Tag.DRAIN: [(Drain(D.epoch, 100), b"")],
    }
    return {
        f"worker-{tag.name.lower()}": (
            lambda raw, tag=tag: _core().say(tag, raw),  # type: ignore[misc]
            [frame.header() + payload for frame, payload in frames],
        )
        for tag, frames in said.items()
    }


@cache
def _core() -> Core:
    return Core()


def _check_scores(logprobs: Logprobs | None) -> None:
    if logprobs is not None:
        assert len(logprobs.top) <= 2
        assert all(isfinite(value) and 0 <= i < VOCAB for i, value in logprobs.top)
        assert isfinite(logprobs.logprob)


def _drop(*_: object) -> Any:
    raise structlog.DropEvent
