#!/usr/bin/env python3
"""Write the bytes in wire/vectors.json, the protocol's test vectors, or compare with --check.

The file itself is the table of cases.  To add a frame, write its `name`, `tag`, `headers`,
`payload` and `content`: this script adds the bytes, which come from `wire`.  So a change of the
code that changes a byte on the wire also changes the file.  Malformed bytes and sessions are not
derived; `scripts/vector_transfers.py` runs the transfers.

usage: .venv/bin/python scripts/vectors.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.vector_transfers import transfers
from wire import parts, payloads, stream
from wire.frames import FRAMES, VERSION, Tag
from wire.layout import KVLayout
from wire.logprobs import join_prompt_logprobs, pack_logprobs
from wire.options import Options
from wire.prefix import prefix_hashes
from wire.process.model import fingerprint
from wire.timeline import Entry, pack_timeline
from wire.transfer import SegmentDescriptor, pack_places

PATH: Final = Path(__file__).resolve().parent.parent / "wire" / "vectors.json"
Vector = dict[str, Any]


def payload_of(kind: str, content: Any) -> list[bytes]:
    """Encode `content`, a payload of this kind, to payload parts."""
    match kind:
        case "none":
            return []
        case "prompt" | "continuation":
            if kind == "continuation" and not content["token_ids"]:
                return []
            options = msgspec.convert(content["options"], Options)
            return [getattr(payloads, f"encode_{kind}")(content["token_ids"], options)]
        case "PrefillResult":
            return [payloads.encode_prefill_result(_prefill_result(content))]
        case "Usage":
            return [payloads.encode_map(payloads.Usage(**_with_timeline(content)))]
        case "Offer":
            return [payloads.encode_map(_offer(content))]
        case "segment":
            fields = {name: content[name] for name in SegmentDescriptor._fields}
            descriptor = SegmentDescriptor(**fields)._replace(digest=int(content["digest"], 16))
            if descriptor.in_memory:
                return [descriptor.pack(), pack_places(content["places"])]
            return [descriptor.pack(), bytes.fromhex(content["kv"])]
        case "Credit":
            return [payloads.Credit(**content).pack()]
        case "api_key":
            return [content.encode()]
        case "Logprobs[]":
            return [payloads.encode_map(msgspec.convert(content, list[payloads.Logprobs | None]))]
        case "PeerDetail[]":
            return [payloads.encode_map(msgspec.convert(content, list[payloads.PeerDetail]))]
    return [payloads.encode_map(msgspec.convert(content, getattr(payloads, kind)))]


def _prefill_result(content: Vector) -> payloads.PrefillResult:
    rows = content.get("prompt_logprobs")
    if rows is not None:
        packed = [pack_logprobs(msgspec.convert(row, payloads.Logprobs)) for row in rows]
        content = content | {"prompt_logprobs": join_prompt_logprobs(len(rows[0]["top"]), packed)}
    return msgspec.convert(_with_timeline(content), payloads.PrefillResult)


def _with_timeline(content: Vector) -> Vector:
    if "timeline" not in content:
        return content
    return content | {"timeline": pack_timeline([Entry(*each) for each in content["timeline"]])}


def _offer(content: Vector) -> payloads.Offer:
    fields = dict(content, layout=msgspec.convert(content["layout"], KVLayout))
    fields["token_ids"] = pack(f"<{len(content['token_ids'])}I", *content["token_ids"])
    for secret in ("key", "token"):
        if secret in content:
            fields[secret] = bytes.fromhex(content[secret])
    return payloads.Offer(**fields)


def frame(vector: Vector) -> Vector:
    """Add the bytes of a frame as ZeroMQ parts and, if it has a single header, as TCP bytes."""
    frames = [FRAMES[Tag[vector["tag"]]](**fields) for fields in vector["headers"]]
    payload = payload_of(vector["payload"], vector["content"])
    vector["zmq"] = [bytes(part).hex() for part in parts.encode(frames, *payload)]
    if len(frames) == 1:
        vector["tcp"] = b"".join(stream.encode(frames[0], *payload)).hex()
    return vector


def prefix(vector: Vector) -> Vector:
    salt = vector.get("cache_salt", "")
    hashes = prefix_hashes(vector["token_ids"], vector["block_size"], salt)
    return vector | {"hashes": [f"{one:016x}" for one in hashes]}


def model(vector: Vector) -> Vector:
    """Add the fingerprint of a model directory; of weight files only names and sizes matter."""
    with TemporaryDirectory() as directory:
        for name, content in vector["files"].items():
            (Path(directory) / name).write_text(content)
        for name, size in vector["weights"].items():
            with (Path(directory) / name).open("wb") as sparse:
                sparse.truncate(size)
        return vector | {"fingerprint": fingerprint(Path(directory))}


def render() -> str:
    """Return the text of the file, with one vector per line, so that a diff shows what changed."""
    vectors = json.loads(PATH.read_text())
    vectors["version"] = VERSION
    for section, derive in (("frames", frame), ("prefix", prefix), ("fingerprint", model)):
        vectors[section] = [derive(vector) for vector in vectors[section]]
    vectors["transfer"] = transfers()
    sections = []
    for name, content in vectors.items():
        if isinstance(content, list):
            lines = ",\n".join("    " + json.dumps(one) for one in content)
            sections.append(f'  "{name}": [\n{lines}\n  ]')
        else:
            sections.append(f'  "{name}": {json.dumps(content)}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if parser.parse_args().check:
        if PATH.read_text() == render():
            return 0
        print("wire/vectors.json is not what the code gives; run scripts/vectors.py and look")
        return 1
    PATH.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
