"""The load under which faults are tried: seeded requests, each client one after another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Final

import httpx

from tests.cluster import Cluster
from tests.faults.clients import Record, TcpClient, ask_http
from wire.options import Options

VOCAB_SIZE: Final = 1000  # ids below it are in every vocabulary


def draw_request(
    draw: random.Random, *, prompt: tuple[int, int], answer: tuple[int, int]
) -> Record:
    """One request: lengths from the ranges, greedy or sampled, HTTP or raw TCP."""
    options = Options(
        temperature=draw.choice([0.0, 0.0, 1.0]),
        seed=draw.randrange(1000),
        ignore_eos=draw.random() < 0.8,
    )
    token_ids = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(*prompt))]
    return Record(token_ids, options, draw.randint(*answer), draw.choice(["http", "tcp"]))


def draw_requests(
    seed: int, count: int, *, prompt: tuple[int, int], answer: tuple[int, int]
) -> list[Record]:
    draw = random.Random(seed)
    return [draw_request(draw, prompt=prompt, answer=answer) for _ in range(count)]


async def send_all(
    cluster: Cluster, records: list[Record], *, clients: int, hold_s: float = 0.0
) -> None:
    """Send every record, each client its next one when its last one ended.

    `hold_s` is how long raw TCP clients wait between the first token and asking for the rest.
    """
    waiting = iter(records)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(
        base_url=cluster.http, timeout=120, limits=limits, trust_env=False
    ) as http:
        await asyncio.gather(
            *[_one_client(cluster, http, waiting, hold_s=hold_s) for _ in range(clients)]
        )


async def _one_client(
    cluster: Cluster, http: httpx.AsyncClient, waiting: Iterator[Record], *, hold_s: float
) -> None:
    tcp: TcpClient | None = None
    try:
        for record in waiting:
            if record.face == "http":
                await ask_http(http, record)
                continue
            # Not before there is something to say: a router hangs up on silent newcomers.
            tcp = tcp or await TcpClient.connect(*cluster.tcp)
            await tcp.ask(record, hold_s=hold_s)
    finally:
        if tcp is not None:
            await tcp.close()
