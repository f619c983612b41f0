"""A frame with its payload as a vector: on both envelopes, its content as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from wire import parts, stream
from wire.frames import Frame
from wire.payloads import encode_map


def frame(
    name: str,
    headers: Frame | Sequence[Frame],
    payload: Sequence[bytes] = (),
    *,
    kind: str = "none",
    content: Any = None,
) -> dict[str, Any]:
    """One frame on both envelopes; several headers exist on ZeroMQ only."""
    frames = [headers] if isinstance(headers, Frame) else list(headers)
    vector = {
        "name": name,
        "tag": frames[0].tag.name,
        "headers": [asdict(one) for one in frames],
        "payload": kind,
        "content": content,
        "zmq": [bytes(part).hex() for part in parts.encode(frames, *payload)],
    }
    if len(frames) == 1:
        vector["tcp"] = b"".join(stream.encode(frames[0], *payload)).hex()
    return vector


def mapped(name: str, header: Frame, content: msgspec.Struct | Sequence[Any]) -> dict[str, Any]:
    """A frame whose payload is one msgpack map, or a list of them."""
    one = content[0] if isinstance(content, Sequence) else content
    kind = type(one).__name__ + ("[]" if isinstance(content, Sequence) else "")
    return frame(
        name, header, [encode_map(content)], kind=kind, content=msgspec.to_builtins(content)
    )
