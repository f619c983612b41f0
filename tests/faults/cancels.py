"""Cancels at every moment of a request's life, by every way a client has: a storm of them.

By raw TCP: a CANCEL frame or a connection that closes; over HTTP: a stream that is given up.  Each
comes at once, while the prompt is read, between the first token and DECODE_REQUEST, or while tokens
come.  Beside the storm a few clients finish what they ask, so that there is someone to disturb.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import httpx

from tests.cluster import Cluster
from tests.faults.clients import Record, TcpClient, body_of
from tests.faults.load import draw_request, draw_requests, send_all

ROUTER_ARGS: Final = ("--heartbeat-ms", "200")
WORKER_ARGS: Final = ("--hash-step-ms", "2", "--max-ubatch-tokens", "256")
PROMPT: Final = (20, 2000)
LONG_ANSWER: Final = (300, 400)  # nobody waits for the end of these
# Longer than a prompt takes under this load: some cancels come before the first token, some after.
MAX_DELAY_S: Final = 0.08
MAX_WAIT_S: Final = 2.0
# A connection is given back after so many requests: closing it is a cancel too.
REQUESTS_PER_CONNECTION: Final = 8


@dataclass
class Storm:
    """How many cancels came when; `bystanders` were not cancelled; `last_at` is the last one."""

    cancels: Counter[str] = field(default_factory=Counter)
    bystanders: list[Record] = field(default_factory=list)
    last_at: float = 0.0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.cancels.values())


async def storm(
    cluster: Cluster, count: int, *, seed: int, clients: int = 48, bystanders: int = 4
) -> Storm:
    """Cancel `count` requests, `clients` at a time; the bystanders have ended when it returns."""
    result, draw, start = Storm(), random.Random(seed), time.monotonic()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=cluster.http, timeout=60, limits=limits, trust_env=False
    ) as http:

        async def one_client() -> None:
            while result.total < count:
                if draw.random() < 0.1:
                    await _give_up_http(http, draw, result)
                else:
                    await _one_connection(cluster, draw, result, count)

        stop = asyncio.Event()
        watchers = asyncio.create_task(_finish_some(cluster, result, seed, bystanders, stop))
        # The bystanders end before the last cancels do: what is held then is the storm's.
        await asyncio.gather(*[one_client() for _ in range(clients)])
        stop.set()
        await watchers
        await _one_connection(cluster, draw, result, result.total + REQUESTS_PER_CONNECTION)
    result.last_at = time.monotonic()
    result.seconds = result.last_at - start
    return result


async def _finish_some(
    cluster: Cluster, result: Storm, seed: int, clients: int, stop: asyncio.Event
) -> None:
    """Send requests nobody cancels until it is enough."""
    rounds = 0
    while not stop.is_set() and clients:
        rounds += 1
        records = draw_requests(seed + rounds, clients, prompt=PROMPT, answer=(10, 40))
        result.bystanders += records
        await send_all(cluster, records, clients=clients)


async def _one_connection(cluster: Cluster, draw: random.Random, result: Storm, count: int) -> None:
    """Cancel one request after the other, then hang up in the middle of several."""
    tcp = await TcpClient.connect(*cluster.tcp)
    try:
        for _ in range(draw.randrange(REQUESTS_PER_CONNECTION)):
            if result.total >= count:
                return
            name = draw.choice(list(MOMENTS))
            request_id, record = await _begin(tcp, draw)
            await MOMENTS[name](tcp, request_id, record, draw)
            result.cancels[name if record.num_ends == 0 else "after its end"] += 1
            tcp.cancel(request_id)
        for _ in range(min(draw.randint(1, 3), count - result.total)):
            request_id, _ = await _begin(tcp, draw)
            tcp.go_on(request_id)
            result.cancels["connection closed"] += 1
        await asyncio.sleep(draw.uniform(0.0, MAX_DELAY_S))
    finally:
        await tcp.close()


async def _begin(tcp: TcpClient, draw: random.Random) -> tuple[int, Record]:
    record = draw_request(draw, prompt=PROMPT, answer=LONG_ANSWER)
    return await tcp.begin(record), record


async def _at_once(tcp: TcpClient, request_id: int, record: Record, draw: random.Random) -> None:
    if draw.random() < 0.5:
        tcp.go_on(request_id)


async def _any_time(tcp: TcpClient, request_id: int, record: Record, draw: random.Random) -> None:
    tcp.go_on(request_id)
    await asyncio.sleep(draw.uniform(0.0, MAX_DELAY_S))


async def _held(tcp: TcpClient, request_id: int, record: Record, draw: random.Random) -> None:
    await _until_tokens(record, 1)
    await asyncio.sleep(draw.uniform(0.0, MAX_DELAY_S / 4))


async def _asked(tcp: TcpClient, request_id: int, record: Record, draw: random.Random) -> None:
    await _until_tokens(record, 1)
    tcp.go_on(request_id)


async def _generating(tcp: TcpClient, request_id: int, record: Record, draw: random.Random) -> None:
    tcp.go_on(request_id)
    await _until_tokens(record, draw.randint(1, 30))


MOMENTS: Final[dict[str, Callable[[TcpClient, int, Record, random.Random], Awaitable[None]]]] = {
    "at once": _at_once,
    "at any time": _any_time,
    "before DECODE_REQUEST": _held,
    "right after DECODE_REQUEST": _asked,
    "while tokens come": _generating,
}


async def _until_tokens(record: Record, count: int) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(record.until_tokens(count), MAX_WAIT_S)


async def _give_up_http(http: httpx.AsyncClient, draw: random.Random, result: Storm) -> None:
    record = draw_request(draw, prompt=PROMPT, answer=LONG_ANSWER)
    num_lines = draw.choice([0, 0, 1, 10])
    try:
        async with asyncio.timeout(MAX_WAIT_S if num_lines else draw.uniform(0.0, MAX_DELAY_S)):
            async with http.stream("POST", "/v1/completions", json=body_of(record)) as response:
                lines = response.aiter_lines()
                for _ in range(num_lines or 1_000_000):
                    await anext(lines)
    except (TimeoutError, httpx.HTTPError, StopAsyncIteration):
        pass  # Given up, or it ended: one stream less either way.
    result.cancels["HTTP stream given up"] += 1
