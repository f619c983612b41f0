"""A load on an OpenAI server: measures latencies, and checks every response.

Each of several clients sends its next request when its last one has ended.  Every response must
have exactly the requested number of tokens, and end once, with finish_reason "length".
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from router.command.bench.connection import COMPLETIONS, HttpConnection, open_url
from router.command.client import TIMEOUT_S, Client, RequestError
from router.command.operator import REQUEST_S


@dataclass(frozen=True)
class Target:
    """An OpenAI server and its model; `vocab_size` is None if the server does not say it."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    vocab_size: int | None = None

    @classmethod
    def find(cls, url: str, api_key: str = "", model: str = "") -> Target:
        """Ask a server for its models, and return it with `model`, or with the first.

        Raises:
            RequestError: The server does not answer, or does not serve the model.
        """
        answer = Client(url, api_key, REQUEST_S).call("/v1/models")
        try:
            cards = {card["id"]: card for card in answer["data"]}
        except (LookupError, TypeError):
            raise RequestError(f"{url}/v1/models lists no models: is it an OpenAI API?") from None
        name = model or next(iter(cards), "")
        if name not in cards:
            raise RequestError(f"{url} has no model {name!r}: --model is one of {list(cards)}")
        return cls(url, name, api_key, cards[name].get("vocab_size"))


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


class LoadClient:
    """A client of a target, which uses one connection at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: HttpConnection | None = None

    async def measure(self, prompt: list[int], output_tokens: int, **fields: Any) -> Measured:
        """Stream one completion and time its chunks."""
        measured = Measured(len(prompt))
        body = {
            "model": self._target.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **fields,
        }
        try:
            connection = await self._connected()
            await _answered(connection, connection.post(COMPLETIONS, body))
            if connection.status != 200:
                measured.problem = f"HTTP {connection.status}: {_message(connection)}"
                return measured
            ends = _read(connection, measured)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            measured.problem = f"{type(error).__name__}: {error}"
            return measured
        if not measured.problem and (measured.num_tokens, ends) != (output_tokens, ["length"]):
            measured.problem = (
                f"{measured.num_tokens} of {output_tokens} tokens, "
                f"finish_reason {', '.join(ends) or 'none'}"
            )
        return measured

    def close(self) -> None:
        if self._connection is not None:
            self._connection.transport.close()

    async def _connected(self) -> HttpConnection:
        if self._connection is None or self._connection.transport.is_closing():
            self._connection = await open_url(self._target.url, self._target.api_key)
        return self._connection


async def _answered(connection: HttpConnection, response: asyncio.Future[None]) -> None:
    """Wait for the whole response.  Raises TimeoutError if nothing comes for `TIMEOUT_S`."""
    num_chunks = -1
    try:
        while not response.done():
            if num_chunks == len(connection.chunks):
                raise TimeoutError(f"the server sent nothing for {TIMEOUT_S:g} s")
            num_chunks = len(connection.chunks)
            await asyncio.wait([response], timeout=TIMEOUT_S)
        response.result()
    finally:
        response.cancel()


def _message(connection: HttpConnection) -> str:
    """Return the message of an error, or else the beginning of the response."""
    try:
        [(_, answer)] = connection.events()
        return str(answer["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return repr(connection.body[:200])


def _read(connection: HttpConnection, measured: Measured) -> list[str]:
    """Store the chunks of a response in `measured`, and return every finish_reason."""
    finish_reasons, counted = list[str](), 0
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
            if reason := choice["finish_reason"]:
                finish_reasons.append(reason)
    if not measured.num_tokens:
        measured.chunk_s, measured.num_tokens = all_s, counted
    return finish_reasons


@dataclass
class Run:
    """One run of a workload on a target: its responses, long prompts apart, and its duration."""

    done: list[Measured] = field(default_factory=list)
    long: list[Measured] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        return [measured.problem for measured in self.done + self.long if measured.problem]


async def load(target: Target, workload: Workload, concurrency: int, run: Run | None = None) -> Run:
    """Run a workload on a target; cancel it to cancel its open requests.

    `run` is filled as responses end, so it has those that ended before a cancellation.
    """
    run = run or Run()
    waiting = iter(workload.prompts)
    start = time.perf_counter()

    async def one_client() -> None:
        with closing(LoadClient(target)) as client:
            for prompt in waiting:
                run.done.append(await client.measure(prompt, workload.output_tokens))
                run.seconds = time.perf_counter() - start

    async def one_long(prompt: list[int]) -> None:
        with closing(LoadClient(target)) as client:
            run.long.append(await client.measure(prompt, 1))

    async def long_prompts(group: asyncio.TaskGroup) -> None:
        for prompt in workload.long_prompts:
            await asyncio.sleep(workload.long_every_s)
            group.create_task(one_long(prompt))

    async with asyncio.TaskGroup() as group:
        beside = group.create_task(long_prompts(group))
        await asyncio.gather(*[one_client() for _ in range(concurrency)])
        beside.cancel()
    return run


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
