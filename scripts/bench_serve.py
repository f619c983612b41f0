"""Closed-loop load on a running router: how fast it answers, and that every answer is whole.

Each of --concurrency clients sends its next request when its last one ended.  A request counts
only if it has exactly the tokens asked for and says finish_reason "length"; a run with a single
wrong answer exits 1 and prints no figures for it.

    python scripts/bench_serve.py --concurrency 8 --requests 64 --prompt-tokens 256 \
        --output-tokens 64 --shared-prefix-tokens 128 --json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm


@dataclass
class Measured:
    """One request: seconds from its start to each chunk that carried tokens, and their counts."""

    prompt_tokens: int
    chunk_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks; a router that merges tokens into one chunk shows in them."""
        return [
            after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)
        ]


@dataclass(frozen=True)
class Workload:
    """What is sent: fixed lengths, a prefix that all prompts share, random ids after it."""

    prompts: list[list[int]]
    output_tokens: int

    @classmethod
    def draw(cls, args: argparse.Namespace, vocab_size: int) -> Workload:
        draw = random.Random(args.seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocab_size) for _ in range(count)]

        prefix = tokens(args.shared_prefix_tokens)
        rest = args.prompt_tokens - args.shared_prefix_tokens
        return cls([prefix + tokens(rest) for _ in range(args.requests)], args.output_tokens)


async def measure(client: httpx.AsyncClient, prompt: list[int], output_tokens: int) -> Measured:
    """Stream one completion and time its chunks."""
    measured = Measured(len(prompt))
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    finish_reason = None
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                measured.problem = f"HTTP {response.status_code}"
                return measured
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    measured.problem = chunk["error"]["message"]
                for choice in chunk.get("choices", ()):
                    measured.chunk_s.append(time.perf_counter() - start)
                    measured.num_tokens += len(choice["token_ids"])
                    finish_reason = choice["finish_reason"] or finish_reason
    except httpx.HTTPError as error:
        measured.problem = f"{type(error).__name__}: {error}"
    if not measured.problem and (measured.num_tokens, finish_reason) != (output_tokens, "length"):
        measured.problem = f"{measured.num_tokens} tokens, finish_reason {finish_reason}"
    return measured


async def load(url: str, workload: Workload, concurrency: int) -> tuple[list[Measured], float]:
    """Run the whole workload; return every request and the seconds it took in all."""
    waiting = iter(workload.prompts)
    done: list[Measured] = []
    limits = httpx.Limits(max_connections=concurrency)
    progress = tqdm(total=len(workload.prompts), unit="req", disable=not sys.stderr.isatty())
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one_client() -> None:
            for prompt in waiting:
                done.append(await measure(client, prompt, workload.output_tokens))
                progress.update()

        await asyncio.gather(*[one_client() for _ in range(concurrency)])
    progress.close()
    return done, time.perf_counter() - start


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean, p50, p90, p99 and maximum, in milliseconds."""
    ordered = sorted(values) or [0.0]

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    mean = round(1000 * sum(ordered) / len(ordered), 3)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}


def summary(done: list[Measured], seconds: float) -> dict[str, Any]:
    """The figures of a run whose every answer was whole."""
    tokens = sum(measured.num_tokens for measured in done)
    return {
        "requests": len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "prompt_tokens_per_s": round(sum(m.prompt_tokens for m in done) / seconds, 1),
        "ttft_ms": percentiles([measured.ttft_s for measured in done]),
        "itl_ms": percentiles([gap for measured in done for gap in measured.itl_s]),
        "e2e_ms": percentiles([measured.chunk_s[-1] for measured in done]),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the router")
    parser.add_argument("--concurrency", type=int, default=8, help="clients at a time")
    parser.add_argument("--requests", type=int, default=64, help="requests in all")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="length of each prompt")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens asked for")
    parser.add_argument(
        "--shared-prefix-tokens", type=int, default=0, help="how much of the prompt all share"
    )
    parser.add_argument("--vocab-size", type=int, default=1000, help="ids are drawn below this")
    parser.add_argument("--warmup", type=int, default=4, help="requests before the clock starts")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write the result and every request here")
    args = parser.parse_args()
    if not 0 <= args.shared_prefix_tokens < args.prompt_tokens:
        parser.error("--shared-prefix-tokens must be at least 0 and below --prompt-tokens")
    return args


def main() -> int:
    args = arguments()
    workload = Workload.draw(args, args.vocab_size)
    warmup = Workload(workload.prompts[: args.warmup], workload.output_tokens)
    asyncio.run(load(args.url, warmup, args.concurrency))
    done, seconds = asyncio.run(load(args.url, workload, args.concurrency))
    problems = [measured.problem for measured in done if measured.problem]
    if problems:
        print(f"{len(problems)} of {len(done)} answers are wrong; the first: {problems[0]}")
        return 1
    result = summary(done, seconds)
    print(json.dumps(result, indent=2))
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        requests = [asdict(measured) for measured in done]
        args.json.write_text(json.dumps({"settings": settings, **result, "each": requests}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
