"""Feed everything that reads a peer's bytes with mutations of good and bad examples.

A target may answer, or raise the one error it documents; anything else is a finding: it is printed
with the input in hex, which `--replay` runs again.  Memory may not grow by more than
`MAX_GROWTH_BYTES`, however many inputs there were.  Seeds are `wire/vectors.json` and, for HTTP, a
body of each kind.  The mutator is ours and blind to coverage: the decoders are so small that
inputs a second count for more.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from router.api.chat import ChatBody
from router.api.errors import HttpError
from router.api.requests.body import parse
from router.api.text import CompletionBody
from tests.fuzz import framing, gone_bad
from tests.fuzz.framing import Framing
from wire.errors import RemoteProtocolError, WireError
from wire.frames import KvCache
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.logprobs import Logprobs, unpack_prompt_logprobs
from wire.options import decode_options
from wire.parts import decode
from wire.payloads import (
    Credit,
    HelloDetail,
    Load,
    Offer,
    PeerDetail,
    WelcomeDetail,
    decode_continuation,
    decode_error,
    decode_map,
    decode_prefill_result,
    decode_prompt,
    decode_usage,
    encode_map,
)
from wire.stream import PREFIX, StreamDecoder
from wire.transfer import KVReceiver, unasked_segments
from wire.transfer.segment import Coverage, segment_digest, split_segment, unpack_places

VECTORS: Final = Path(__file__).resolve().parents[2] / "wire" / "vectors.json"
MAX_GROWTH_BYTES: Final = 64 << 20
MAX_INPUT_BYTES: Final = 4096
# A frame cap that inputs of this size do exceed.
STREAM_CAP_BYTES: Final = 1024
# Between looks at memory and the clock.
ROUND: Final = 20_000
# Edges of every width there is, and the counts that a length could be mistaken for.
EDGES: Final = (0, 1, 2, 15, 16, 17, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
# One top token, two rows.
PROMPT_LOGPROBS: Final = struct.pack("<IfIffIf", 1, -0.5, 7, -0.5, -1.0, 9, -1.0)
LAYOUT: Final = KVLayout(
    groups=(
        KVGroup(num_layers=2, num_kv_heads=2, key_dim=4, value_dim=4, dtype="uint8"),
        KVGroup(num_layers=1, num_kv_heads=2, key_dim=4, value_dim=0, dtype="uint8", window=9),
        StateGroup(num_layers=2, num_heads=4, head_bytes=3),
    )
)


class Target(NamedTuple):
    """A decoder under test: `feed` may raise nothing but `allowed`."""

    feed: Callable[[bytes], object]
    seeds: Sequence[bytes]
    allowed: type[Exception]


class Finding(NamedTuple):
    """An input that did what no input may do."""

    raw: bytes
    problem: str


class Mutator:
    """Endless variations of the seeds; the same `seed` gives the same ones."""

    def __init__(self, seeds: Sequence[bytes], seed: int) -> None:
        self._seeds = seeds
        self._random = random.Random(seed).random
        self._changes = (self._flip, self._edge, self._cut, self._repeat, self._splice, self._byte)

    def __iter__(self) -> Iterator[bytes]:
        draw, changes = self._random, self._changes
        while True:
            raw = bytearray(self._seeds[int(draw() * len(self._seeds))])
            changes[int(draw() * len(changes))](raw)
            while draw() < 0.4:  # one change is the likeliest to get far
                changes[int(draw() * len(changes))](raw)
            yield bytes(raw[:MAX_INPUT_BYTES])

    def _at(self, raw: bytearray) -> int:
        return int(self._random() * len(raw))

    def _flip(self, raw: bytearray) -> None:
        if raw:
            raw[self._at(raw)] ^= 1 << int(self._random() * 8)

    def _byte(self, raw: bytearray) -> None:
        raw.insert(self._at(raw), int(self._random() * 256))

    def _edge(self, raw: bytearray) -> None:
        number = EDGES[int(self._random() * len(EDGES))]
        width = 1 << int(self._random() * 4)
        start = self._at(raw)
        raw[start : start + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")

    def _cut(self, raw: bytearray) -> None:
        start = self._at(raw)
        del raw[start : start + 1 + int(self._random() * 16)]

    def _repeat(self, raw: bytearray) -> None:
        start = self._at(raw)
        raw[start:start] = raw[start : start + 1 + int(self._random() * 64)]

    def _splice(self, raw: bytearray) -> None:
        other = self._seeds[int(self._random() * len(self._seeds))]
        raw[self._at(raw) :] = other[int(self._random() * len(other)) :]


# The targets.  Each reads its input to the end, as the process that faces the peer would.


def feed_stream(raw: bytes) -> None:
    """Raw TCP: two chunks, every message, the end.  Never more buffered than one frame."""
    decoder = StreamDecoder(max_frame_bytes=STREAM_CAP_BYTES)
    half = raw[0] % len(raw) if raw else 0
    for chunk in (raw[:half], raw[half:]):
        decoder.receive(chunk)
        while decoder.next_message() is not None:
            pass
        assert decoder.buffered_bytes < PREFIX.size + STREAM_CAP_BYTES, "it holds over its cap"
    decoder.receive_eof()


def feed_envelope(raw: bytes) -> None:
    """ZeroMQ: the input's tag, header part and payload, as `num_headers` in its first byte says."""
    end = 5 + 16 * (raw[0] % 5) if raw else 0
    decode([raw[1:5], raw[5:end], raw[end:]])


def feed_payload(raw: bytes) -> None:
    """Every payload decoder; the first byte chooses, a prompt's length is the second."""
    if not raw:
        raise RemoteProtocolError("no decoder chosen")
    body = memoryview(raw)[1:]
    _DECODERS[raw[0] % len(_DECODERS)](body)


def feed_options(raw: bytes) -> None:
    """The options of a request."""
    decode_options(raw)


def feed_segment(raw: bytes) -> None:
    """A KV segment: descriptor, places, bounds, overlap, digest."""
    descriptor, kv = split_segment(raw)
    if descriptor.in_memory:
        unpack_places(kv)
    Coverage(LAYOUT, 1, 64).admit(descriptor.rectangle)
    descriptor.rectangle.num_bytes(LAYOUT)
    segment_digest(1, kv)


def feed_offer(raw: bytes) -> None:
    """An offer with its KV: how many segments, then each part behind its length."""
    payload, at = [], 1
    while at < len(raw):
        end = at + 2 + int.from_bytes(raw[at : at + 2], "little")
        payload.append(raw[at + 2 : end])
        at = end
    frame = KvCache(1, 0, raw[0] if raw else 0)
    unasked = unasked_segments(frame, payload, 4096)
    offer = decode_map(Offer, payload[0] if payload else b"")
    receiver = KVReceiver(
        *(1, offer),
        layout=offer.layout,
        max_bytes=8192,
        credit_bytes=8 << 20,  # any layout may be
        lease_s=1.0,
        now=0.0,
    )
    receiver.check_unasked(unasked)
    for segment in receiver.accept_with(unasked, 0.0):
        receiver.stored(segment, 0.0)
    assert receiver.is_complete or not unasked


def feed_http(raw: bytes) -> None:
    """Both bodies of the HTTP API, and what the HTTP application asks of one that is good."""
    try:
        _use(parse(CompletionBody, raw))
    except HttpError:
        _use(parse(ChatBody, raw))


def feed_framing(raw: bytes) -> None:
    """HTTP/1.1 itself: heads, chunks, pipelines."""
    _framing().feed(raw)


@cache
def _framing() -> Framing:
    return Framing()


def _use(body: CompletionBody | ChatBody) -> None:
    body.options(seed=1, max_tokens=body.token_limit or 1)
    _ = body.stops, body.num_choices, body.wants_usage
    if isinstance(body, CompletionBody):
        _ = body.prompts


def _prompt(body: memoryview) -> object:
    return decode_prompt(body[1:], body[0] if body else 0)


# By the name that the vectors call the payload by.
PAYLOADS: Final[dict[str, Callable[[memoryview], object]]] = {
    "prompt": _prompt,
    "continuation": decode_continuation,
    "PrefillResult": decode_prefill_result,
    "ErrorDetail": decode_error,
    "prompt_logprobs": unpack_prompt_logprobs,
    "Credit": Credit.unpack,
    "HelloDetail": lambda body: decode_map(HelloDetail, body),
    "WelcomeDetail": lambda body: decode_map(WelcomeDetail, body),
    "Load": lambda body: decode_map(Load, body),
    "PeerDetail[]": lambda body: decode_map(list[PeerDetail], body),
    "Usage": decode_usage,
    "Logprobs[]": lambda body: decode_map(list[Logprobs | None], body),
    "Offer": lambda body: decode_map(Offer, body),
    "KVLayout": lambda body: decode_map(KVLayout, body),
}
_DECODERS: Final = tuple(PAYLOADS.values())

COMPLETION: Final = {
    "model": "demo",
    "prompt": [[1, 2], [3]],
    "n": 2,
    "stop": ["a", "b"],
    "logit_bias": {"5": -1.5},
    "logprobs": 2,
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
    "temperature": 0.5,
}
CHAT: Final = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Grüße \U0001f600"}]},
    ],
    "logprobs": True,
    "top_logprobs": 3,
    "max_completion_tokens": 5,
    "stop": "x",
    "top_p": 0.9,
}


def targets() -> dict[str, Target]:
    """Return what can be fuzzed, by name, with seeds from the protocol's vectors."""
    vectors = json.loads(VECTORS.read_text())
    messages = [_parts(row) for row in (*vectors["frames"], *vectors["malformed"])]
    payloads = [b"".join(parts[2:]) for parts in messages if len(parts) > 2]
    framed = [
        PREFIX.pack(int.from_bytes(parts[0], "little"), sum(map(len, parts[1:])))
        + b"".join(parts[1:])
        for parts in messages
        if len(parts) > 1 and len(parts[0]) == 4
    ]
    envelopes = [bytes([len(p[1]) // 16]) + b"".join(p) for p in messages if len(p) > 1]
    chosen = [seed for row in vectors["frames"] for seed in _payload_seeds(row)]
    chosen.append(bytes([list(PAYLOADS).index("prompt_logprobs")]) + PROMPT_LOGPROBS)
    chosen.append(bytes([list(PAYLOADS).index("KVLayout")]) + encode_map(LAYOUT))
    prompts = [seed for seed in chosen if seed[0] == 0]
    options = [seed[2 + 4 * seed[1] :] for seed in prompts] + [b"\x80"]
    descriptors = [
        struct.pack("<HHHHIIIIQQQ", *place, num_bytes, 1, 0)
        for *place, num_bytes in (
            (0, 0, 2, 0, 0, 2, 1, 3, 96),
            (1, 1, 1, 0, 0, 1, 60, 3, 12),
            (2, 2, 2, 0, 0, 2, 64, 0, 12),
        )
    ]
    segments = [*(one + bytes(12) for one in descriptors), *descriptors, *payloads]
    bodies = [json.dumps(body).encode() for body in (COMPLETION, CHAT, {"prompt": "a"})]
    wrong = RemoteProtocolError
    return {
        "stream": Target(feed_stream, [*framed, b"".join(framed[:8])], wrong),
        "envelope": Target(feed_envelope, envelopes, wrong),
        "payload": Target(feed_payload, chosen, wrong),
        "options": Target(feed_options, options, wrong),
        "segment": Target(feed_segment, segments, wrong),
        "offer": Target(feed_offer, _offers(vectors), WireError),
        "http": Target(feed_http, bodies, HttpError),
        "framing": Target(feed_framing, framing.SEEDS, framing.Refused),
        **{name: Target(*feed, wrong) for name, feed in gone_bad.feeds().items()},
    }


def _offers(vectors: dict[str, Any]) -> list[bytes]:
    """Return the offers with KV of recorded transfers."""
    offers = []
    for transfer in vectors["transfer"]:
        _, header, *payload = map(bytes.fromhex, transfer["messages"][0]["zmq"])
        number = KvCache.from_header(header).num_segments
        if number:
            parts = [len(part).to_bytes(2, "little") + part for part in payload]
            offers.append(b"".join([bytes([number]), *parts]))
    return offers


def _parts(row: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(part) for part in row.get("zmq", ())]


def _payload_seeds(row: dict[str, Any]) -> Iterator[bytes]:
    """A frame's payload as `feed_payload` takes it, if it has one that a decoder reads."""
    kinds = list(PAYLOADS)
    if row["payload"] in PAYLOADS and (payload := b"".join(_parts(row)[2:])):
        length = bytes([row["headers"][0]["seq_len"]]) if row["payload"] == "prompt" else b""
        yield bytes([kinds.index(row["payload"])]) + length + payload


class Tally(NamedTuple):
    """How a run went; `growth_bytes` is of the process's largest resident size."""

    accepted: int
    refused: int
    seconds: float
    growth_bytes: int


def fuzz(target: Target, inputs: int, seed: int = 1) -> Tally | Finding:
    """Feed `inputs` mutations and say how it went, or return the first finding."""
    mutations = iter(Mutator(target.seeds, seed))
    feed, allowed = target.feed, target.allowed
    refused, start, before = 0, time.monotonic(), _peak_bytes()
    for number in range(inputs):
        raw = next(mutations)
        try:
            feed(raw)
        except allowed:
            refused += 1
        except Exception as error:
            return Finding(raw, f"{type(error).__name__}: {error}")
        if number % ROUND == 0 and _peak_bytes() - before > MAX_GROWTH_BYTES:
            return Finding(raw, f"memory grew over {MAX_GROWTH_BYTES} bytes near this input")
    growth = _peak_bytes() - before
    return Tally(inputs - refused, refused, time.monotonic() - start, growth)


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: Sequence[str]) -> int:
    known = targets()
    parser = argparse.ArgumentParser("scripts/fuzz", description="Feed the decoders broken bytes.")
    parser.add_argument("--target", choices=[*known, "all"], default="all")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target")
    parser.add_argument("--seed", type=int, default=1, help="another one gives other inputs")
    parser.add_argument("--replay", metavar="HEX", help="feed this one input to --target")
    args = parser.parse_args(argv)
    if args.replay is not None:
        if args.target == "all":
            parser.error("--replay needs the --target that the input was found with")
        known[args.target].feed(bytes.fromhex(args.replay))
        return 0
    status = 0
    for name in known if args.target == "all" else [args.target]:
        result = fuzz(known[name], args.inputs, args.seed)
        if isinstance(result, Finding):
            print(f"{name}: {result.problem}\n  --target {name} --replay {result.raw.hex()}")
            status = 1
            continue
        print(
            f"{name}: {args.inputs} inputs, {result.accepted} accepted, {result.refused} refused, "
            f"{result.seconds:.0f} s, {result.growth_bytes >> 20} MiB more",
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
