"""Clients that read slowly or not at all, beside clients that read at once.

Slow ones are bare sockets with small receive buffers, so that the router feels them early.  They
ask for logprobs, which makes each token about a kilobyte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from typing import Final

from scripts.faults.clients import Record
from scripts.faults.cluster import metrics
from scripts.faults.load import draw_requests, send_all
from tests.cluster import Cluster, until

ROUTER_ARGS: Final = ("--heartbeat-ms", "200")
WORKER_ARGS: Final = ("--hash-step-ms", "20")
RECEIVE_BYTES: Final = 4096
READ_EVERY_S: Final = 0.1
# Far more than is read before the run is over.
ENDLESS: Final = 30_000
# Megabytes of the kernel's buffers fill first, then the router's timer runs.
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


@dataclass
class Beside:
    """What the clients that read at once saw."""

    records: list[Record] = field(default_factory=list)

    @property
    def p99_gap_s(self) -> float:
        gaps = sorted(gap for record in self.records for gap in record.gaps_s)
        return gaps[int(0.99 * len(gaps))]


async def beside(
    cluster: Cluster, others: list[SlowClient], *, seed: int, clients: int, answer: int
) -> Beside:
    """Run `clients` that read at once beside `others`; each gets one text of `answer` tokens.

    If one of the others never reads, this returns when somebody has been cut, or gives up on it.
    """
    tasks = [asyncio.create_task(other.run(cluster)) for other in others]
    try:
        if tasks:
            await asyncio.sleep(2.0)  # their streams run, and the first buffers are full
        result = Beside(draw_requests(seed, clients, prompt=(20, 40), answer=(answer, answer)))
        await send_all(cluster, result.records, clients=clients)
        if any(not other.bytes_per_s for other in others):
            with contextlib.suppress(TimeoutError):
                await asyncio.to_thread(until, lambda: num_cut(cluster), "one is cut", CUT_IN_S)
        return result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _request(host: str, num_choices: int) -> bytes:
    body = json.dumps(BODY | {"n": num_choices}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
