"""Run a closed-loop load on a running router; measure latency and check every response.

Each of --concurrency clients sends its next request when its last one has ended.  Every response
must have exactly the requested number of tokens and finish_reason "length"; after a single wrong
response the run prints no figures and exits with 1.  With --long-every-s, a request with a long
prompt is sent in addition at this fixed interval.

    python scripts/bench_serve.py --concurrency 8 --requests 64 --prompt-tokens 256 \
        --output-tokens 64 --shared-prefix-tokens 128 --json result.json

With --peer, the same load is run on another OpenAI server too, alternately in --rounds, and the
figures of both are printed side by side, with their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.connections import COMPLETIONS, HttpConnection, open_url
from scripts.bench.tables import Table


@dataclass
class Measured:
    """One request: the times of its chunks with tokens, in seconds from its start, and counts."""

    prompt_tokens: int
    chunk_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def itl_s(self) -> list[float]:
        """The times between chunks, which are longer if a router merges tokens into one chunk."""
        return [after - before for before, after in pairwise(self.chunk_s)]


@dataclass(frozen=True)
class Workload:
    """The prompts, of equal length: a shared prefix, then random token ids."""

    prompts: list[list[int]]
    output_tokens: int
    long_prompts: list[list[int]] = field(default_factory=list)
    long_every_s: float = 0.0

    @classmethod
    def draw(
        cls,
        *,
        seed: int,
        requests: int,
        prompt_tokens: int,
        output_tokens: int,
        vocab_size: int,
        shared_prefix_tokens: int = 0,
        long_prompt_tokens: int = 0,
        long_every_s: float = 0.0,
    ) -> Workload:
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocab_size) for _ in range(count)]

        prefix = tokens(shared_prefix_tokens)
        prompts = [prefix + tokens(prompt_tokens - len(prefix)) for _ in range(requests)]
        # More prompts than any run needs.
        long_prompts = [tokens(long_prompt_tokens) for _ in range(1000 if long_every_s else 0)]
        return cls(prompts, output_tokens, long_prompts, long_every_s)


class Client:
    """A client for an OpenAI server, which uses one connection at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = ""
        self._connection: HttpConnection | None = None

    async def measure(self, prompt: list[int], output_tokens: int, **fields: Any) -> Measured:
        """Stream one completion and time its chunks."""
        measured = Measured(len(prompt))
        try:
            connection = await self._connected()
            body = {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                **fields,
            }
            await connection.post(COMPLETIONS, body)
            if connection.status != 200:
                measured.problem = f"HTTP {connection.status}"
                return measured
            finish_reason = _read(connection, measured)
        except OSError as error:
            measured.problem = f"{type(error).__name__}: {error}"
            return measured
        found = measured.num_tokens, finish_reason
        if not measured.problem and found != (output_tokens, "length"):
            measured.problem = f"{measured.num_tokens} tokens, finish_reason {finish_reason}"
        return measured

    def close(self) -> None:
        if self._connection is not None:
            self._connection.transport.close()

    async def _connected(self) -> HttpConnection:
        if self._connection is None or self._connection.transport.is_closing():
            self._connection = await open_url(self._url)
        if not self._model:
            await self._connection.request("GET", "/v1/models")
            [(_, models)] = self._connection.events()
            self._model = models["data"][0]["id"]
        return self._connection


def _read(connection: HttpConnection, measured: Measured) -> str | None:
    """Store the chunks of a response in `measured`, and return its finish_reason."""
    finish_reason, counted = None, 0
    # For servers that send no token ids, use all chunks and the number of tokens in `usage`.
    all_s: list[float] = []
    for at, chunk in connection.events():
        if "error" in chunk:
            measured.problem = chunk["error"]["message"]
        if usage := chunk.get("usage"):
            counted = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            measured.cached_tokens = details.get("cached_tokens") or 0
        for choice in chunk.get("choices", ()):
            all_s.append(at - connection.sent_at)
            token_ids = choice.get("token_ids") or ()
            if token_ids:
                measured.chunk_s.append(all_s[-1])
            measured.num_tokens += len(token_ids)
            measured.token_ids += token_ids
            finish_reason = choice["finish_reason"] or finish_reason
    if not measured.num_tokens:
        measured.chunk_s, measured.num_tokens = all_s, counted
    return finish_reason


@dataclass
class Run:
    """One run of a workload on a server: its requests, long prompts apart, and its duration."""

    done: list[Measured]
    long: list[Measured]
    seconds: float

    @property
    def problems(self) -> list[str]:
        return [measured.problem for measured in self.done + self.long if measured.problem]


async def load(url: str, workload: Workload, concurrency: int) -> Run:
    """Run a workload on a server."""
    waiting = iter(workload.prompts)
    done: list[Measured] = []
    long: list[Measured] = []
    start = time.perf_counter()

    async def one_client() -> None:
        client = Client(url)
        for prompt in waiting:
            measured = await client.measure(prompt, workload.output_tokens)
            done.append(measured)
        client.close()

    async def one_long(prompt: list[int]) -> None:
        client = Client(url)
        long.append(await client.measure(prompt, 1))
        client.close()

    async def long_prompts(group: asyncio.TaskGroup) -> None:
        for prompt in workload.long_prompts:
            await asyncio.sleep(workload.long_every_s)
            group.create_task(one_long(prompt))

    async with asyncio.TaskGroup() as group:
        beside = group.create_task(long_prompts(group))
        await asyncio.gather(*[one_client() for _ in range(concurrency)])
        seconds = time.perf_counter() - start
        beside.cancel()
    return Run(done, long, seconds)


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the mean, p50, p90, p99 and maximum, in milliseconds."""
    ordered = sorted(values) or [0.0]

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    mean = round(1000 * sum(ordered) / len(ordered), 3)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}


def summary(runs: list[Run]) -> dict[str, Any]:
    """Return the figures of several runs without problems."""
    done = [measured for run in runs for measured in run.done]
    seconds = sum(run.seconds for run in runs)
    tokens = sum(measured.num_tokens for measured in done)
    figures = {
        "requests": len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "prompt_tokens_per_s": round(sum(m.prompt_tokens for m in done) / seconds, 1),
        "ttft_ms": percentiles([measured.ttft_s for measured in done]),
        "itl_ms": percentiles([gap for measured in done for gap in measured.itl_s]),
        "e2e_ms": percentiles([measured.chunk_s[-1] for measured in done]),
    }
    if long := [measured.ttft_s for run in runs for measured in run.long]:
        figures["long_ttft_ms"] = percentiles(long)
    return figures


def show_beside(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Print each figure of both servers, and their ratio."""
    table = Table("figure:<24", "ours:>11.1f", "peer:>11.1f", "ratio:>7.2f")

    def show(name: str, left: float, right: float) -> None:
        table.row(name, left, right, left / right)

    rate = "output_tokens_per_s"
    show(rate, ours[rate], theirs[rate])
    for name in ("ttft_ms", "itl_ms", "e2e_ms", "long_ttft_ms"):
        for key in ("p50", "p99"):
            if name in ours and name in theirs:
                show(f"{name} {key}", ours[name][key], theirs[name][key])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the router")
    parser.add_argument("--peer", metavar="URL", help="an OpenAI server to measure as well")
    parser.add_argument("--rounds", type=int, default=1, help="times the load is run, by turns")
    parser.add_argument("--concurrency", type=int, default=8, help="clients at a time")
    parser.add_argument("--requests", type=int, default=64, help="requests in all")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="length of each prompt")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens asked for")
    parser.add_argument(
        "--shared-prefix-tokens", type=int, default=0, help="how much of the prompt all share"
    )
    parser.add_argument(
        "--long-every-s", type=float, default=0.0, help="a long prompt so often; 0: none"
    )
    parser.add_argument("--long-prompt-tokens", type=int, default=1024, help="its length")
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
    runs: dict[str, list[Run]] = {url: [] for url in (args.url, args.peer) if url}
    drawn = partial(
        Workload.draw,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        vocab_size=args.vocab_size,
        shared_prefix_tokens=args.shared_prefix_tokens,
        long_prompt_tokens=args.long_prompt_tokens,
    )
    for url in runs:  # other prompts, so that no measured prefix is cached
        warmup = drawn(seed=args.seed - 1, requests=args.warmup)
        asyncio.run(load(url, warmup, args.concurrency))
    for number in range(args.rounds):
        workload = drawn(
            seed=args.seed + number, requests=args.requests, long_every_s=args.long_every_s
        )
        for url, of in runs.items():
            of.append(run := asyncio.run(load(url, workload, args.concurrency)))
            if run.problems:
                count = len(run.done) + len(run.long)
                print(f"{len(run.problems)} of {count} answers are wrong; ", end="")
                print(f"the first, of {url}: {run.problems[0]}")
                return 1
    results = {url: summary(of) for url, of in runs.items()}
    result = results[args.url]
    print(json.dumps(result, indent=2))
    if args.peer:
        show_beside(result, results[args.peer])
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        requests = [asdict(measured) for run in runs[args.url] for measured in run.done]
        peer = results.get(args.peer)
        args.json.write_text(
            json.dumps({"settings": settings, **result, "peer": peer, "each": requests})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
