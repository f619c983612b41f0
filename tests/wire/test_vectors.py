"""vectors.json, read as data: every vector both ways."""

from __future__ import annotations

import json
import runpy
from hashlib import sha256
from pathlib import Path
from struct import unpack
from typing import Any

import msgspec
import pytest

from wire import parts, payloads
from wire.errors import LocalProtocolError, RemoteProtocolError, TransferFailed
from wire.frames import FRAMES, DecodeToken, Error, Frame, KvCache, Tag
from wire.layout import KVGroup, KVLayout
from wire.logprobs import unpack_prompt_logprobs
from wire.parts import Buffer
from wire.payloads import Credit, Offer, decode_map
from wire.prefix import prefix_hashes
from wire.process.model import fingerprint
from wire.session import ENDED, Direction, Session
from wire.stream import StreamDecoder
from wire.transfer import (
    HEAD_BYTES,
    KVReceiver,
    Rectangle,
    read_head,
    segment_head,
    unasked_segments,
)
from wire.transfer.segment import (
    SegmentDescriptor,
    segment_digest,
    split_segment,
    unpack_places,
)

PATH = Path(payloads.__file__).with_name("vectors.json")
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(PATH.read_text())

# Bytes in an offer, hexadecimal in a vector.
SECRETS = ("key", "token")


def named(section: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", VECTORS[section], ids=lambda v: v.get("name", ""))


def frames_of(vector: dict[str, Any]) -> list[Frame]:
    kind = FRAMES[Tag[vector["tag"]]]
    return [kind(**fields) for fields in vector["headers"]]


def map_type(kind: str) -> Any:
    lists = {
        "Logprobs[]": list[payloads.Logprobs | None],
        "PeerDetail[]": list[payloads.PeerDetail],
    }
    return lists.get(kind) or getattr(payloads, kind)


def decode_payload(kind: str, body: Buffer, seq_len: int) -> Any:
    """The JSON content of a payload, from its bytes."""
    if kind == "none":
        assert len(body) == 0
        return None
    if kind in ("prompt", "continuation"):
        token_ids, options = (
            payloads.decode_prompt(body, seq_len)
            if kind == "prompt"
            else payloads.decode_continuation(body)
        )
        return {"token_ids": list(token_ids), "options": msgspec.to_builtins(options)}
    if kind == "PrefillResult":
        result = payloads.decode_prefill_result(body)
        content = msgspec.to_builtins(result)
        if result.prompt_logprobs is not None:
            rows = unpack_prompt_logprobs(result.prompt_logprobs)
            content["prompt_logprobs"] = msgspec.to_builtins(rows)
        return content
    if kind == "Offer":
        offer = decode_map(Offer, body)
        ids = unpack(f"<{offer.num_tokens}I", offer.token_ids)
        layout = msgspec.to_builtins(offer.layout)
        fields = msgspec.structs.asdict(offer)
        secrets = {name: fields[name].hex() for name in SECRETS if fields[name] is not None}
        return {**fields, **secrets, "layout": layout, "token_ids": list(ids)}
    if kind == "segment":
        descriptor, kv = split_segment(body)
        digest = f"{descriptor.digest:016x}"
        fields = {**descriptor._asdict(), "digest": digest}
        if descriptor.in_memory:
            return {**fields, "places": list(unpack_places(kv))}
        return {**fields, "kv": bytes(kv).hex()}
    if kind == "Credit":
        return Credit.unpack(body)._asdict()
    if kind == "api_key":
        return bytes(body).decode()
    return msgspec.to_builtins(decode_map(map_type(kind), body))


def test_the_file_is_what_the_code_gives() -> None:
    script = PATH.parent.parent / "scripts" / "vectors.py"
    assert runpy.run_path(str(script))["render"]() == PATH.read_text(), (
        "bytes on the wire changed: run scripts/vectors.py and look at the difference"
    )


def test_every_tag_has_a_vector_on_both_envelopes() -> None:
    assert {vector["tag"] for vector in VECTORS["frames"]} == {tag.name for tag in Tag}
    assert {v["tag"] for v in VECTORS["frames"] if "tcp" in v} == {tag.name for tag in Tag}


@named("frames")
def test_frame_is_decoded_from_the_vector(vector: dict[str, Any]) -> None:
    message = parts.decode([bytes.fromhex(part) for part in vector["zmq"]])
    tokens: list[Frame] = [DecodeToken(*each) for each in message.tokens]
    assert (tokens or [message.frame]) == frames_of(vector)
    seq_len = vector["headers"][0].get("seq_len", 0)
    content = decode_payload(vector["payload"], message.body(), seq_len)
    assert message.tag.name == vector["tag"]
    # Through JSON: tuples and lists are the same there.
    assert json.loads(json.dumps(content)) == complete(vector["payload"], vector["content"])
    if "tcp" in vector:
        decoder = StreamDecoder()
        decoder.receive(bytes.fromhex(vector["tcp"]))
        streamed = decoder.next_message()
        assert streamed is not None
        assert (streamed.frame, streamed.tokens) == (message.frame, message.tokens)
        assert bytes(streamed.body()) == bytes(message.body())
        decoder.receive_eof()


def complete(kind: str, content: Any) -> Any:
    """An offer's content names every key, some of which a vector may leave to their defaults."""
    defaults = {"digest": "xxh3_64", "memory": None, "key": None, "token": None}
    return {**defaults, **content} if kind == "Offer" else content


@named("malformed")
def test_malformed_bytes_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        if "zmq" in vector:
            parts.decode([bytes.fromhex(part) for part in vector["zmq"]])
        elif "tcp" in vector:
            decoder = StreamDecoder()
            decoder.receive(bytes.fromhex(vector["tcp"]))
            decoder.next_message()
        else:
            kind, _, seq_len = vector["payload"].partition(":")
            decode_payload(kind, bytes.fromhex(vector["wire"]), int(seq_len or 0))


@pytest.mark.parametrize("entries", [each for each in VECTORS.values() if isinstance(each, list)])
def test_every_entry_has_a_name_of_its_own(entries: list[dict[str, Any]]) -> None:
    names = [entry.get("name") for entry in entries]
    assert all(names) and len(set(names)) == len(names)


@named("fingerprint")
def test_fingerprints(vector: dict[str, Any], tmp_path: Path) -> None:
    """As SPEC 5.1 says it, without the code that makes ours."""
    digest = sha256()
    for name in ("config.json", "tokenizer.json"):
        content = vector["files"].get(name, "")
        digest.update(f"{name} {len(content)}\n{content}".encode())
        if name in vector["files"]:
            (tmp_path / name).write_text(content)
    for name, size in sorted(vector["weights"].items()):
        digest.update(f"{name} {size}\n".encode())
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert digest.hexdigest()[:16] == vector["fingerprint"] == fingerprint(tmp_path)


@named("prefix")
def test_prefix_hashes(vector: dict[str, Any]) -> None:
    hashes = prefix_hashes(vector["token_ids"], vector["block_size"])
    assert [f"{one:016x}" for one in hashes] == vector["hashes"]


def parts_of(message: dict[str, Any]) -> list[bytes]:
    """The parts of a message on the KV socket, or what would be those of one at the other port."""
    if "zmq" in message:
        return [bytes.fromhex(part) for part in message["zmq"]]
    at_port = bytes.fromhex(message["segment_port"])
    head = at_port[:HEAD_BYTES]
    frame, descriptor, num_bytes = read_head(head)
    assert len(at_port) == HEAD_BYTES + num_bytes
    assert segment_head(frame, SegmentDescriptor.unpack(descriptor), num_bytes) == head
    return [bytes(part) for part in parts.encode(frame, descriptor, at_port[HEAD_BYTES:])]


@named("transfer")
def test_the_receiver_answers_a_recorded_transfer(vector: dict[str, Any]) -> None:
    """Literal bytes of the sender in, the recorded bytes of the receiver out."""
    messages = [(m["from"], parts_of(m)) for m in vector["messages"]]
    layout = msgspec.convert(vector["layout"], KVLayout)
    memory = bytes.fromhex(vector["memory"])
    receiver: KVReceiver | None = None
    answers = iter([recorded for who, recorded in messages if who == "decode"])
    for who, recorded in messages:
        if who == "decode":
            continue
        message = parts.decode(recorded)
        frame = message.frame
        assert isinstance(frame, KvCache)
        if frame.segment == 0:
            receiver = KVReceiver(
                vector["request_id"],
                decode_map(Offer, message.payload[0]),
                layout=layout,
                max_bytes=1 << 20,
                credit_bytes=vector["credit_bytes"],
                lease_s=30.0,
                now=0.0,
            )
            unasked = unasked_segments(frame, message.payload, vector["unasked_bytes"])
            receiver.check_unasked(unasked)
            if unasked and not vector["cached_tokens"]:
                answer = stored_with_the_offer(receiver, unasked)
                assert parts.encode(answer[0], *[it.pack() for it in answer[1:]]) == next(answers)
                continue
            port = vector["segment_port"]
            ack = receiver.accept(vector["cached_tokens"], 0.0, len(memory), port)
        else:
            assert receiver is not None
            is_beside = bool(vector["segment_port"])
            segment = receiver.on_segment(frame, message.payload, 0.0, is_beside=is_beside)
            assert segment is not None
            try:
                if segment.is_sealed:
                    assert receiver.opened(segment).kv == kv_of(layout, segment.rectangle)
                else:
                    kv = b"".join(segment.pieces(memory))
                    receiver.verify(segment, segment_digest(vector["request_id"], kv))
            except TransferFailed as error:
                receiver.broken(segment, error)
                assert parts.decode(next(answers)).tag is Tag.ERROR
                continue
            ack = receiver.stored(segment, 0.0)
        assert ack is not None
        assert parts.encode(ack[0], ack[1].pack()) == next(answers)
    assert receiver is not None and receiver.state.value == vector["ends"]
    assert next(answers, None) is None


def stored_with_the_offer(
    receiver: KVReceiver, unasked: list[tuple[Buffer, Buffer]]
) -> tuple[Any, ...]:
    ack = None
    for segment in receiver.accept_with(unasked, 0.0):
        try:
            receiver.verify(segment)
        except TransferFailed as error:
            receiver.broken(segment, error)
            return (Error(receiver.request_id, error.code),)
        assert ack is None
        ack = receiver.stored(segment, 0.0)
    assert ack is not None
    return ack


def kv_of(layout: KVLayout, rectangle: Rectangle) -> bytes:
    """The bytes of a transfer by SPEC 12, where keys and values are alike."""
    group = layout.groups[rectangle.group]
    assert isinstance(group, KVGroup)
    return bytes(
        (64 * layer + 32 * side + 16 * head + 4 * token + i) % 256
        for layer in rectangle.layers
        for side in range(2)
        for head in rectangle.heads
        for token in rectangle.tokens
        for i in range(group.key_dim)
    )


@named("sessions")
def test_sessions(vector: dict[str, Any]) -> None:
    events = [(Direction(direction), Tag[tag]) for direction, tag in vector["events"]]
    for side in Direction:
        session = Session(sends=side)
        legal = events[:-1] if vector["ends"] == "error" else events
        for direction, tag in legal:
            session.on(tag, direction)
        if vector["ends"] != "error":
            assert session.state.value == vector["ends"]
            assert session.is_over == (session.state in ENDED)
            continue
        before, (direction, tag) = session.state, events[-1]
        with pytest.raises(LocalProtocolError if direction is side else RemoteProtocolError):
            session.on(tag, direction)
        assert session.state is before
