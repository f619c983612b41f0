#!/usr/bin/env python3
"""What structured answers cost: tokens a second of a cluster, with a JSON schema and without.

    python -m router --model demo --local 1,1 &
    python scripts/bench_structured.py --streams 32 --tokens 400

All loads run in turns, so that a slow minute of the machine meets each; the medians count.  In the
third one half of the streams are structured: what one asks for must not slow the others.  An answer
without all its tokens ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

# No answer ends before the token that is counted last.
SCHEMA: Final = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
HELD: Final[dict[str, Any]] = {"structured_outputs": {"json": SCHEMA}}
FREE: Final[dict[str, Any]] = {"ignore_eos": True}  # else it cannot have all tokens
LOADS: Final = {"without": (FREE,), "with": (HELD,), "half": (HELD, FREE)}


async def stream(host: str, port: int, body: dict[str, Any], num_tokens: int) -> None:
    """Read one streamed completion; by a bare socket, for the cores are needed elsewhere.

    Raises:
        SystemExit: It has not so many tokens.
    """
    reader, writer = await asyncio.open_connection(host, port)
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    answer = await reader.read()
    writer.close()
    count = answer.count(b'"text":')
    if count != num_tokens or b"data: [DONE]" not in answer:
        raise SystemExit(f"{count} tokens, not {num_tokens}: {answer[-300:]!r}")


async def tokens_per_second(
    url: str, num_streams: int, num_tokens: int, loads: Sequence[dict[str, Any]]
) -> float:
    """Generate so many tokens in so many streams at once; they have these fields in turns."""
    address = urlsplit(url)
    assert address.hostname and address.port, "give a URL with a port"
    bodies = [
        {
            "prompt": [40 + number * 7 % 300, 17, 33],
            "temperature": 1.0,
            "seed": number,
            "max_tokens": num_tokens,
            "stream": True,
            **loads[number % len(loads)],
        }
        for number in range(num_streams)
    ]
    start_s = time.perf_counter()
    streams = [stream(address.hostname, address.port, body, num_tokens) for body in bodies]
    await asyncio.gather(*streams)
    return num_streams * num_tokens / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running router's")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in LOADS}
    for number in range(1 + args.rounds):
        for name, loads in LOADS.items():
            rate = asyncio.run(tokens_per_second(args.url, args.streams, args.tokens, loads))
            if number:  # the first round compiles
                rates[name].append(rate)
    plain = median(rates["without"])
    for name, measured in rates.items():
        print(f"{name:8} {median(measured):8.0f} tokens/s  {median(measured) / plain:.3f}")


if __name__ == "__main__":
    main()
