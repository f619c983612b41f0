"""`baton bench`: tokens/s and latencies of a running server, at several numbers of clients.

    baton bench                                              # the router of this machine
    baton bench --concurrency 1,64 --prompt-tokens 2000 --shared-prefix-tokens 1500
    baton bench --peer http://127.0.0.1:9000 --rounds 3      # beside another server, by turns

Each client sends its next request when its last one has ended.  Every response must have exactly
its number of tokens and end once; after a wrong one, no figures are printed.  Prompts are random
token ids, other ones in each run, so that no prefix is cached but the shared one.

Ctrl-C cancels the open requests, and prints what was measured until then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from router.command.bench.load import Run, Target, Workload, load, percentiles, summary
from router.command.bench.table import Table
from router.command.client import RequestError, read_api_key
from router.command.operator import client_parser
from router.command.terminal import StatusLine, printable, say

REFRESH_S: Final = 0.2
# If no server says how many token ids its model has.
VOCAB_SIZE: Final = 1000
LEGEND: Final = (
    "tokens/s: generated, of all clients; TTFT: time to the first token; ITL: time between tokens"
)


def run(argv: Sequence[str]) -> int:
    """Measure, and return the exit status: 1 if a response was wrong or a server is missing."""
    given = _arguments(argv)
    try:
        if given.json:
            given.json.write_text("")  # fails now, not after minutes
        return Benchmark(given).run()
    except (RequestError, OSError) as error:
        sys.stderr.write(f"baton bench: {printable(str(error))}\n")
        return 1


class Benchmark:
    """All runs that the flags ask for.

    Raises:
        RequestError: A server does not answer, or does not serve the model.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        key = read_api_key(given.api_key_file)
        self._targets = {"router": Target.find(given.url, key, given.model)}
        if given.peer:  # which must not see the router's key
            key = read_api_key(given.peer_api_key_file) if given.peer_api_key_file else ""
            self._targets["peer"] = Target.find(given.peer, key)
        sizes = [each.vocab_size for each in self._targets.values() if each.vocab_size]
        self._draw = partial(
            Workload.draw,
            prompt_tokens=given.prompt_tokens,
            output_tokens=given.output_tokens,
            vocab_size=given.vocab_size or min(sizes, default=VOCAB_SIZE),
            shared_prefix_tokens=given.shared_prefix_tokens,
            long_prompt_tokens=given.long_prompt_tokens,
        )
        self._seeds = count(given.seed)
        # The key of each latency in a summary, by its heading.
        self._latencies = {"TTFT": "ttft_ms", "ITL": "itl_ms"}
        if given.long_every_s:
            self._latencies["long TTFT"] = "long_ttft_ms"
        self._status = StatusLine(sys.stderr)
        self._results: list[dict[str, Any]] = []

    def run(self) -> int:
        """Measure, print a table, and write the JSON; return the exit status.

        Raises:
            RequestError: A response is wrong.
            OSError: The JSON cannot be written.
        """
        given, status = self._given, 0
        for name, target in self._targets.items():
            say(printable(f"{name}: {target.model} at {target.url}"))
        say(f"prompts: {given.prompt_tokens} tokens; responses: {given.output_tokens} tokens")
        say(f"{LEGEND}\n")
        headings = [f"{it} ms p50:>{len(it) + 7},.2f" for it in self._latencies]
        latencies = [column for first in headings for column in (first, "p99:>9,.2f")]
        table = Table("server:<6", "clients:>7,", "requests:>8,", "tokens/s:>9,.1f", *latencies)
        try:
            workload = self._draw(seed=next(self._seeds), requests=given.warmup)
            for target in self._targets.values():
                self._load(target, workload, given.warmup, Run(), "warming up")
            for clients in given.concurrency:
                self._measure(clients, table)
        except KeyboardInterrupt:
            sys.stderr.write("baton bench: interrupted\n")
            status = 128 + signal.SIGINT
        if given.json:
            result = {"settings": vars(given), "complete": not status, "results": self._results}
            given.json.write_text(json.dumps(result, default=str))
        return status

    def _measure(self, clients: int, table: Table) -> None:
        """Run the load with this number of clients, and print the figures, even if interrupted."""
        given = self._given
        num_requests = given.requests or max(16, 4 * clients)
        runs: dict[str, list[Run]] = {name: [] for name in self._targets}
        try:
            for number in range(1, given.rounds + 1):
                workload = self._draw(
                    seed=next(self._seeds), requests=num_requests, long_every_s=given.long_every_s
                )
                doing = f"{clients} clients, round {number} of {given.rounds}"
                for name, target in self._targets.items():
                    runs[name].append(run := Run())
                    self._load(target, workload, clients, run, doing)
        except KeyboardInterrupt:
            self._report(clients, runs, table)
            raise
        self._report(clients, runs, table)

    def _load(self, target: Target, workload: Workload, clients: int, run: Run, doing: str) -> None:
        """Fill `run`, and show its progress.  Raises RequestError if a response is wrong."""

        async def loaded() -> None:
            loading = asyncio.create_task(load(target, workload, clients, run))
            while not loading.done():
                if sys.stderr.isatty():
                    done = f"{len(run.done)} of {len(workload.prompts)} responses"
                    self._status.show(f"{target.url}, {doing}: {done}")
                await asyncio.wait([loading], timeout=REFRESH_S)
            await loading

        try:
            asyncio.run(loaded())  # if interrupted, it cancels the load too, and waits for that
        finally:
            self._status.show("")
            if problems := run.problems:
                raise RequestError(
                    f"{len(problems)} of {len(run.done + run.long)} requests to {target.url} "
                    f"failed with {clients} clients; the first: {problems[0]}"
                )

    def _report(self, clients: int, runs: dict[str, list[Run]], table: Table) -> None:
        """Print a row for each server that has responses, and the ratio of both."""
        rows = list[list[float]]()
        for name, target in self._targets.items():
            responses = [asdict(measured) for run in runs[name] for measured in run.done]
            if not responses:
                continue
            figures = summary(runs[name])
            about = {"clients": clients, "url": target.url, "model": target.model}
            self._results.append({**about, **figures, "each": responses})
            # 0 where nothing was measured, as with one token there is no time between tokens.
            latencies = [figures.get(key, percentiles([])) for key in self._latencies.values()]
            shares = [latency[share] for latency in latencies for share in ("p50", "p99")]
            rows.append([figures["output_tokens_per_s"], *shares])
            table.row(name, clients, len(responses), *[cell or "-" for cell in rows[-1]])
        if len(rows) > 1:
            pairs = zip(*rows, strict=True)
            table.row("ratio", "", "", *[f"{a / b:.2f}" if b else "-" for a, b in pairs])


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = client_parser("bench", __doc__)
    add = parser.add_argument
    number: dict[str, Any] = {"type": _number, "metavar": "N"}
    seed = random.SystemRandom().getrandbits(32)
    add("--model", default="", help="the model to ask for [default: the first of the server]")
    clients = "1,8,32"
    add(
        "--concurrency", type=_numbers, default=clients, metavar="LIST", help=f"clients [{clients}]"
    )
    add("--requests", **number, help="of each run [default: 4 a client, at least 16]")
    add("--prompt-tokens", **number, default=256, help="length of each prompt [default 256]")
    add("--output-tokens", **number, default=64, help="length of each response [default 64]")
    add("--shared-prefix-tokens", type=int, default=0, metavar="N", help="that all prompts share")
    add("--long-every-s", type=float, default=0.0, metavar="S", help="also a long prompt so often")
    add("--long-prompt-tokens", **number, default=1024, help="its length [default 1024]")
    add("--rounds", **number, default=1, help="runs of each load [default 1]")
    add("--warmup", type=int, default=4, metavar="N", help="requests before all [default 4]")
    add("--peer", metavar="URL", help="another OpenAI server, measured by turns with the router")
    add("--peer-api-key-file", type=Path, metavar="FILE", help="file with the API key of the peer")
    add("--vocab-size", **number, help="token ids are below it [default: the model's, or 1000]")
    add("--seed", type=int, default=seed, metavar="N", help="of the prompts [default: a new one]")
    add("--json", type=Path, metavar="FILE", help="write all figures and every response here")
    given = parser.parse_args(argv)
    if not 0 <= given.shared_prefix_tokens < given.prompt_tokens:
        parser.error("--shared-prefix-tokens must be at least 0 and below --prompt-tokens")
    if given.long_every_s < 0:
        parser.error("--long-every-s must be at least 0")
    return given


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]
