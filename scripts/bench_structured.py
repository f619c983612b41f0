#!/usr/bin/env python3
"""Measure the cost of structured output: tokens per second with and without a JSON schema.

    python -m router --model demo --local 1,1 &
    python scripts/bench_structured.py --streams 32 --tokens 400

All loads run alternately, so that a slow phase of the machine affects all of them, and medians are
compared.  In the third load, half of the streams are structured, which must not slow down the other
half.  A response with too few tokens ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.connection import COMPLETIONS, open_url
from router.command.bench.table import Table

# Too long an array for an output to be complete before max_tokens.
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
STRUCTURED: Final[dict[str, Any]] = {"structured_outputs": {"json": SCHEMA}}
FREE: Final[dict[str, Any]] = {"ignore_eos": True}  # so that it has all tokens
LOADS: Final = {"without": (FREE,), "with": (STRUCTURED,), "half": (STRUCTURED, FREE)}


async def stream(url: str, body: dict[str, Any], num_tokens: int) -> None:
    """Run one streamed completion.

    Raises:
        SystemExit: It does not have `num_tokens` tokens.
    """
    connection = await open_url(url)
    await connection.post(COMPLETIONS, body)
    connection.transport.close()
    if connection.num_tokens() != num_tokens:
        raise SystemExit(
            f"{connection.num_tokens()} tokens, not {num_tokens}: {connection.body[-300:]!r}"
        )


async def tokens_per_second(
    url: str, num_streams: int, num_tokens: int, loads: Sequence[dict[str, Any]]
) -> float:
    """Run `num_streams` streams at once, whose request fields alternate between `loads`."""
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
    await asyncio.gather(*[stream(url, body, num_tokens) for body in bodies])
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
    table = Table("schema:<8", "tokens/s:>9.0f", "ratio:>7.3f")
    for name, measured in rates.items():
        table.row(name, median(measured), median(measured) / plain)


if __name__ == "__main__":
    main()
