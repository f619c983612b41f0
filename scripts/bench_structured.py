#!/usr/bin/env python3
"""What structured answers cost: tokens a second of one engine, with a JSON schema and without.

Both loads run in turns, so that a slow minute of the machine meets both; the medians count.  A
third load has half of its streams structured: what one asks for must not slow the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker does, before torch is there
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wire.options import Options, Structure
from wire.process.model import locate
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Token
from worker.engine.sequence import Sequence
from worker.executor.torch import TorchExecutor

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


def tokens_per_second(
    engine: Engine, num_streams: int, num_tokens: int, structures: list[Structure | None]
) -> float:
    """Generate so many tokens in so many streams at once; stream i has structure i, in turns."""
    for number in range(num_streams):
        structure = structures[number % len(structures)]
        options = Options(
            temperature=1.0,
            seed=number,
            ignore_eos=structure is None,  # else it cannot end
            max_tokens=num_tokens,
            structure=structure,
        )
        engine.add(Sequence(number, [40 + number * 7 % 300, 17, 33], options))
    count, start_s = 0, time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            if isinstance(output, Failed):
                raise SystemExit(f"request {output.request_id}: {output.message}")
            count += isinstance(output, Token)
    rate = count / (time.perf_counter() - start_s)
    if count != num_streams * num_tokens:
        raise SystemExit(f"{count} tokens, not {num_streams} x {num_tokens}")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, a directory, or a name on the hub")
    parser.add_argument("--schema", type=Path, help="a JSON schema of long answers")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    executor = TorchExecutor.load(locate(args.model), name=args.model)
    blocks = args.streams * (args.tokens // 16 + 2)
    engine = Engine(executor, num_blocks=blocks, block_size=16, prefix_cache=False)
    text = args.schema.read_text() if args.schema else json.dumps(SCHEMA)
    structure = Structure(kind="json_schema", text=text)
    loads: dict[str, list[Structure | None]] = {
        "without": [None],
        "with": [structure],
        "half": [structure, None],
    }
    rates: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(1 + args.rounds):
        for name, structures in loads.items():
            rate = tokens_per_second(engine, args.streams, args.tokens, structures)
            if number:  # the first round compiles
                rates[name].append(rate)
    plain = median(rates["without"])
    for name, measured in rates.items():
        print(f"{name:8} {median(measured):8.0f} tokens/s  {median(measured) / plain:.3f}")


if __name__ == "__main__":
    main()
