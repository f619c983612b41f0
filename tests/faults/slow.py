"""Clients that read slowly or not at all, beside clients that read at once.

Slow ones are bare sockets with small receive buffers, so that the router feels them early.  They
ask for logprobs, which makes each token about a kilobyte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass
from functools import partial
from typing import Final

from scripts.bench.pairs import Pairs
from tests.cluster import Cluster, until
from tests.faults.clients import Record
from tests.faults.cluster import metrics
from tests.faults.load import draw_requests, send_all

ROUTER_ARGS: Final = ("--heartbeat-ms", "200")
# Two clusters with 74 streams each must leave room on two cores.
WORKER_ARGS: Final = ("--hash-step-ms", "50")
CLIENTS: Final = 8
ANSWER: Final = 600
CHOICES: Final = 2
RECEIVE_BYTES: Final = 4096
# Who never reads asks for small segments: the kernel bounds its side by them, by megabytes else.
SEGMENT_BYTES: Final = 536
READ_EVERY_S: Final = 0.1
# Far more than is read before the run is over.
ENDLESS: Final = 30_000
# The buffers on the way fill first, then the router's timer runs.
CUT_IN_S: Final = 90.0
BODY: Final[dict[str, object]] = {
    "prompt": [1, 2, 3],
    "max_tokens": ENDLESS,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 5,
}


@dataclass
class SlowClient:
    """An HTTP client that reads `bytes_per_s`; 0: never, so it does not hear of its end either."""

    bytes_per_s: int
    num_choices: int = 1  # more fill the buffers on the way sooner
    read_bytes: int = 0
    was_cut: bool = False

    async def run(self, cluster: Cluster) -> None:
        """Ask for an endless stream and read it so, until cancelled or cut off."""
        host, _, port = cluster.http.removeprefix("http://").rpartition(":")
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            if not self.bytes_per_s:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, _request(host, self.num_choices))
            while True:
                await asyncio.sleep(READ_EVERY_S)
                if not self.bytes_per_s:
                    continue
                try:
                    got = await loop.sock_recv(sock, int(self.bytes_per_s * READ_EVERY_S))
                except ConnectionError:
                    got = b""
                self.read_bytes += len(got)
                if not got:
                    self.was_cut = True
                    return


def num_cut(cluster: Cluster) -> int:
    """How many clients the router has cut off because they did not read."""
    return int(metrics(cluster)["baton_slow_clients_total"])


def enter(pairs: Pairs, records: list[Record], *, is_tried: bool) -> None:
    """Enter the time between one token and the next, at the second of the latter."""
    for record in records:
        for at, gap_s in zip(record.token_s[1:], record.gaps_s, strict=True):
            pairs.add(at, gap_s, is_tried=is_tried)


async def beside(
    cluster: Cluster, others: list[SlowClient], *, seed: int, clients: int, answer: int
) -> list[Record]:
    """Run `clients` that read at once beside `others`; each gets one text of `answer` tokens.

    If one of the others never reads, this returns when somebody has been cut, or gives up on it.
    """
    num_before = num_cut(cluster)
    tasks = [asyncio.create_task(other.run(cluster)) for other in others]
    try:
        if tasks:
            await asyncio.sleep(2.0)  # their streams run, and the first buffers are full
        records = draw_requests(seed, clients, prompt=(20, 40), answer=(answer, answer))
        await send_all(cluster, records, clients=clients)
        if any(not other.bytes_per_s for other in others):
            with contextlib.suppress(TimeoutError):
                await asyncio.to_thread(
                    until, lambda: num_cut(cluster) > num_before, "one is cut", CUT_IN_S
                )
        return records
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def side_by_side(
    tried: Cluster, calm: Cluster, others: list[SlowClient], *, seed: int
) -> tuple[list[Record], list[Record]]:
    """The same texts at both in the same seconds: beside `others`, beside as many that read."""
    one = partial(beside, seed=seed, clients=CLIENTS, answer=ANSWER)
    return await asyncio.gather(one(tried, others), one(calm, readers()))


def readers() -> list[SlowClient]:
    """Sixty-five that read all there is."""
    return [SlowClient(10_000_000, CHOICES), *[SlowClient(10_000_000) for _ in range(64)]]


def slow_ones() -> list[SlowClient]:
    """One that never reads and 64 that read 2 kB/s; they ask for the same as `readers`."""
    return [SlowClient(0, CHOICES), *[SlowClient(2000) for _ in range(64)]]


def _request(host: str, num_choices: int) -> bytes:
    body = json.dumps(BODY | {"n": num_choices}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
