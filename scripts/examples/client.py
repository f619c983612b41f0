"""A client of the raw TCP port in the standard library alone, for a router without API keys.

python scripts/examples/client.py http://127.0.0.1:8000 127.0.0.1 8001 "Tell me a story."
"""

import json
import socket
import struct
import sys
from typing import Any
from urllib.request import Request, urlopen

if len(sys.argv) != 5:
    sys.exit(__doc__)
HTTP, TCP = sys.argv[1], (sys.argv[2], int(sys.argv[3]))


def call(path: str, body: object) -> Any:
    request = Request(HTTP + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urlopen(request))


def frame(tag: int, header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<II", tag, len(header) + len(payload)) + header + payload


message = {"role": "user", "content": sys.argv[4]}
ids = call("/tokenize", {"messages": [message]})["tokens"]
stream = socket.create_connection(TCP).makefile("rwb")
prompt = struct.pack(f"<{len(ids)}I", *ids)
stream.write(frame(30, struct.pack("<QII", 1, len(ids), 0xFFFFFFFF), prompt))  # rank unassigned
stream.write(frame(34, struct.pack("<QII", 1, 60, 0)))  # then up to 60 tokens more
stream.flush()

tokens: list[int] = []
while True:
    tag, length = struct.unpack("<II", stream.read(8))
    body = stream.read(length)
    if tag == 31:  # PREFILL_DONE: the first token is the first thing after the header
        tokens += [token for token in struct.unpack_from("<q", body, 16) if token >= 0]
    elif tag == 35:  # DECODE_TOKEN
        tokens += struct.unpack_from("<q", body, 8)
    else:  # DECODE_DONE or ERROR: nothing follows
        break
print(call("/detokenize", {"tokens": tokens})["prompt"])
