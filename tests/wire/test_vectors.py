"""vectors.json is what the code gives, and is decoded to its contents."""

from __future__ import annotations

import json
import runpy
from hashlib import sha256
from pathlib import Path
from struct import unpack
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from wire import parts, payloads
from wire.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from wire.frames import (
    ANY_RANK,
    AS_MANY_AS_FIT,
    FRAMES,
    NO_RANK,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Drain,
    DrainAsk,
    Error,
    Frame,
    Hello,
    Peers,
    Role,
    Tag,
)
from wire.logprobs import unpack_prompt_logprobs
from wire.parts import Buffer
from wire.payloads import Credit, Offer, decode_map
from wire.process.model import fingerprint
from wire.session import ENDED, Direction, Session
from wire.stream import StreamDecoder
from wire.timeline import unpack_timeline
from wire.transfer.segment import (
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
        return content | entries_of(result.timeline)
    if kind == "Usage":
        usage = payloads.decode_usage(body)
        return msgspec.to_builtins(usage) | entries_of(usage.timeline)
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


def entries_of(timeline: bytes | None) -> dict[str, Any]:
    if timeline is None:
        return {}
    return {"timeline": [list(entry) for entry in unpack_timeline(timeline)]}


def test_the_file_is_what_the_code_gives() -> None:
    script = PATH.parent.parent / "scripts" / "vectors.py"
    assert runpy.run_path(str(script))["render"]() == PATH.read_text(), (
        "bytes on the wire changed: run scripts/vectors.py and look at the difference"
    )


def test_constants_and_defaults_are_those_of_the_vectors() -> None:
    headers = {vector["name"]: vector["headers"][0] for vector in VECTORS["frames"]}
    assert headers["prefill_request_any_rank"]["decode_rank"] == ANY_RANK
    assert headers["prefill_request_no_rank"]["decode_rank"] == NO_RANK
    assert headers["decode_request_as_many_as_fit"]["max_new_tokens"] == AS_MANY_AS_FIT
    request_id, epoch = headers["cancel"]["request_id"], headers["hello"]["epoch"]
    router_epoch = request_id >> 32
    assert headers["welcome"]["epoch"] == router_epoch
    for name, frame in (
        ("hello", Hello(epoch, 3, Role.DECODE)),
        ("hello_any", Hello(epoch, 3, Role.ANY)),
        ("hello_client", Hello.of_client()),
        ("decode_request_bare", DecodeRequest(request_id, 16)),
        ("decode_done", DecodeDone(request_id)),
        ("cancel", Cancel(request_id, ErrorCode.CANCELLED)),
        ("error_bare", Error(request_id, ErrorCode.INTERNAL)),
        ("drain", Drain(epoch, 30_000)),
        ("drain_asked", Drain(epoch, 0, DrainAsk.RESTART)),
        ("drain_router_leaves", Drain(router_epoch, 0)),
        ("peers", Peers(router_epoch, 1)),
    ):
        assert asdict(frame) == headers[name]
    (credit,) = [vector for vector in VECTORS["frames"] if vector["name"] == "kv_cache_ack"]
    assert Credit(48, 0, 0)._asdict() == credit["content"]


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
    defaults = {"digest": "xxh3_64", "memory": None, "key": None, "token": None, "cache_salt": ""}
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
