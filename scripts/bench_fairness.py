#!/usr/bin/env python3
"""Measure how much one API key can slow down another, with each of six kinds of floods.

    scripts/bench_fairness.py                            # all loads
    scripts/bench_fairness.py --rows schemas choices --seconds 20 --json table.json
    scripts/bench_fairness.py --root ../older            # the router of another checkout

For each load, starts a new demo cluster with two API keys, as a user would.  One key, the victim,
sends small requests, one at a time with a pause after each: first alone, then while another process
floods the router with the other key (`bench/flood.py`).  Each row is for one kind of the victim's
requests under one load; `ratio` compares the 99th percentiles.  Below the rows of a load, the
responses to the flood are counted, because a router could pass by refusing all of it.  Every
response to the victim must equal the one without the flood; if one is wrong or missing, the exit
status is 1.  Start a new checkout once before: its first start compiles kernels and would time out.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.command.bench.connection import CHAT, HttpConnection, open_http
from router.command.bench.table import Table
from router.command.keys import make_api_key
from scripts.bench.flood import LOADS, WORDS
from scripts.bench.processes import ROOT, router

# The largest acceptable ratio.
TARGET: Final = 2.0
# The pause between two requests of the victim.
PAUSE_S: Final = 0.02
# The timeout of a request of the victim.
PATIENCE_S: Final = 60.0
WARM_UP_ROUNDS: Final = 3
COLOUR: Final = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "number": {"type": "integer"}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}


def chat(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a short streamed chat."""
    return CHAT, _chat(stream=True, max_tokens=8, ignore_eos=True)


def known_schema(number: int) -> tuple[str, dict[str, Any]]:
    """Return a chat constrained to a schema that the cluster has cached."""
    return CHAT, _chat(max_tokens=16, structured_outputs={"json": COLOUR})


def new_schema(number: int) -> tuple[str, dict[str, Any]]:
    """Return a chat constrained to a schema that is new: the same with another title."""
    return CHAT, _chat(max_tokens=16, structured_outputs={"json": COLOUR | {"title": f"{number}"}})


def text(number: int) -> tuple[str, dict[str, Any]]:
    """Return a request to tokenize a text of 20 KB."""
    return "/tokenize", {"prompt": WORDS * (20_000 // len(WORDS))}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **fields}


KINDS: Final[dict[str, Callable[[int], tuple[str, dict[str, Any]]]]] = {
    "chat": chat,
    "known schema": known_schema,
    "new schema": new_schema,
    "tokenize": text,
}
# For a stream, the time to its first token is recorded too, under this name.
FIRST: Final = "chat, first token"


@dataclass
class Times:
    """The times of the victim's requests in seconds by kind, and the problems of failed ones."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, seconds: float) -> None:
        self.seconds.setdefault(kind, []).append(seconds)


class Victim:
    """A client that sends small requests, one at a time."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = (host, port, key)
        self._connection: HttpConnection | None = None
        self._numbers = itertools.count()
        # The response to the first request of each kind, sent before the flood.
        self._expected: dict[str, Any] = {}

    async def measure(self, until: Callable[[], bool]) -> Times:
        """Send one request of each kind, and repeat this until `until` returns True."""
        times = Times()
        while True:
            for kind in KINDS:
                await asyncio.sleep(PAUSE_S)
                await self._measure(kind, times)
            if until():
                return times

    async def _measure(self, kind: str, times: Times) -> None:
        connection = self._connection
        if connection is None or connection.transport.is_closing():
            connection = self._connection = await open_http(*self._address)
        problem = await self._problem(kind, connection)
        if problem:
            times.problems.append((kind, problem))
            connection.transport.abort()
        now = time.monotonic()
        if kind == "chat":
            times.add(FIRST, (connection.first_at or now) - connection.sent_at)
        times.add(kind, now - connection.sent_at)

    async def _problem(self, kind: str, connection: HttpConnection) -> str:
        """Send a request; return the problem with its response, or ""."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await connection.post(*KINDS[kind](next(self._numbers)))
        except (TimeoutError, ConnectionError) as error:
            return str(error) or f"no answer in {PATIENCE_S:g} s"
        if connection.status != 200:
            return f"{connection.status}: {connection.body.decode()}"
        found = answer_in(connection)
        expected = self._expected.setdefault(kind, found)
        return "" if found == expected else f"answered {found!r}, alone {expected!r}"


def answer_in(connection: HttpConnection) -> list[Any]:
    """Return the choices of a response, without ids and times, which differ each time."""
    bodies = [body for _, body in connection.events()]
    # A tokenizer's response has no choices, but nothing in it differs.
    return [choice for each in bodies for choice in each.get("choices", [each])]


@dataclass(frozen=True)
class Row:
    """The figures for one kind of request under one load; `ratio` compares the p99s."""

    load: str
    kind: str
    samples: int
    p50_alone_s: float
    p50_s: float
    p99_alone_s: float
    p99_s: float
    ratio: float
    failed: int

    def cells(self) -> list[str | float]:
        times = (self.p50_alone_s, self.p50_s, self.p99_alone_s, self.p99_s)
        over = "" if self.ratio <= TARGET else f"over {TARGET:g}"
        milliseconds = [1000 * seconds for seconds in times]
        return [self.load, self.kind, self.samples, *milliseconds, self.ratio, self.failed, over]


COLUMNS: Final = (
    *("load:<15", "request:<18", "n:>4", "p50 alone:>10.1f", "p50 ms:>10.1f"),
    *("p99 alone:>10.1f", "p99 ms:>10.1f", "ratio:>7.1f", "failed:>7", ":<6"),
)


def rows_of(load: str, alone: Times, under: Times) -> list[Row]:
    """Compare the times with and without a load, and return a row for each kind."""
    rows = []
    for kind, calm in alone.seconds.items():
        some = under.seconds[kind]
        p50_alone_s, p50_s, p99_alone_s, p99_s = [
            _quantile(seconds, share) for share in (0.5, 0.99) for seconds in (calm, some)
        ]
        rows.append(
            Row(
                load=load,
                kind=kind,
                samples=len(some),
                p50_alone_s=p50_alone_s,
                p50_s=p50_s,
                p99_alone_s=p99_alone_s,
                p99_s=p99_s,
                ratio=p99_s / p99_alone_s,
                failed=sum(each == kind.partition(",")[0] for each, _ in under.problems),
            )
        )
    return rows


def _quantile(seconds: list[float], share: float) -> float:
    """Return a quantile, without interpolation: below 100 samples, p99 is the maximum."""
    return float(np.quantile(seconds, share, method="higher"))


@asynccontextmanager
async def flooding(
    host: str, port: int, key: str, load: str, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    """Run a flood for at most `seconds`; its report is in the yielded dict afterwards."""
    report: dict[str, Any] = {}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scripts.bench.flood", host, str(port), load),
        *("--seconds", str(seconds)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    try:
        process.stdin.write(f"{key}\n".encode())
        if await process.stdout.readline() != b"begun\n":
            raise SystemExit(f"{load}: the flood did not begin")
        yield report
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        report.update(json.loads(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def new_key(path: Path) -> str:
    """Add an API key to the file and return the key."""
    with redirect_stdout(io.StringIO()):  # `make_api_key` prints instructions
        make_api_key(path)
    return path.read_text().split()[-1]


async def measure(
    load: str, address: tuple[str, int], keys: list[str], seconds: float
) -> dict[str, Any]:
    """Measure the victim's requests alone, then under a load."""
    victim = Victim(*address, keys[0])
    rounds = itertools.count(1)
    problems = (await victim.measure(lambda: next(rounds) == WARM_UP_ROUNDS)).problems

    def over() -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    alone = await victim.measure(over())
    problems += alone.problems
    if problems:
        raise SystemExit(f"{load}: wrong even without it: {problems[0]}")
    most_s = seconds + len(KINDS) * PATIENCE_S  # the last round may take this long
    async with flooding(*address, keys[1], load, most_s) as other:
        under = await victim.measure(over())
    rows = rows_of(load, alone, under)
    return {"rows": rows, "other": other, "problems": under.problems}


def run(load: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start a cluster and measure one load on it."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "api_keys"
        keys = [new_key(path) for _ in range(2)]
        flags = ["--local", "1,1", "--api-keys", str(path)]
        with router(*flags, root=given.root.resolve()) as server:
            return uvloop.run(measure(load, server.http, keys, given.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=LOADS, default=list(LOADS), help="the loads")
    parser.add_argument("--seconds", type=float, default=10.0, help="alone, and under each load")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to run")
    parser.add_argument("--json", type=Path, help="write the table here too")
    given = parser.parse_args()
    measured = {}
    table = Table(*COLUMNS)
    for load in given.rows:
        found = measured[load] = run(load, given)
        for row in found["rows"]:
            table.row(*row.cells())
        other = found["other"]
        answers = ", ".join(f"{count} x {status}" for status, count in other["answers"].items())
        print(f"  the other key got {answers or 'no answer'} in {other['seconds']:.1f} s")
        if other["error"]:
            print(f"  the first error of the other key: {other['error'][:300]}")
        for kind, problem in found["problems"][:3]:
            print(f"  {kind}: {problem[:300]}")
        sys.stdout.flush()
    if given.json:
        tables = {
            load: found | {"rows": [asdict(row) for row in found["rows"]]}
            for load, found in measured.items()
        }
        given.json.write_text(json.dumps(tables, indent=1))
    sys.exit(any(found["problems"] for found in measured.values()))


if __name__ == "__main__":
    main()
