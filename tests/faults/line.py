"""Head of line: how long a short prompt waits behind long ones that nobody wants any more."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass

from tests.cluster import Cluster, until
from tests.faults.clients import Record, TcpClient
from tests.faults.load import VOCAB_SIZE
from wire.options import Options


@dataclass
class Waits:
    """Seconds to the first token of a short prompt, and what one chunk of a long one takes."""

    idle_s: float
    after_cancels_s: list[float]
    chunk_s: float

    @property
    def bound_s(self) -> float:
        return self.idle_s + self.chunk_s + 0.1


async def measure(
    cluster: Cluster, *, seed: int, long: int, chunk: int, num_cancelled: int, rounds: int
) -> Waits:
    """Time a short prompt on the idle cluster, then after `num_cancelled` of `long` tokens.

    They are cancelled when the first of them is being read: before any first token, or the round
    does not count.
    """
    draw = random.Random(seed)
    tcp = await TcpClient.connect(*cluster.tcp)

    async def first_token(length: int) -> float:
        record = _record(draw, length)
        request_id = await tcp.begin(record)
        await record.until_tokens(1)
        assert record.tokens, record.error
        tcp.cancel(request_id)
        await asyncio.to_thread(cluster.until_idle)
        return record.ttft_s

    try:
        await first_token(16)  # the first one warms up what the warmup did not
        idle_s = statistics.median([await first_token(16) for _ in range(5)])
        chunk_s = await first_token(long) / (long / chunk)
        after: list[float] = []
        for _ in range(5 * rounds):
            records = [_record(draw, long) for _ in range(num_cancelled)]
            request_ids = [await tcp.begin(record) for record in records]
            await asyncio.to_thread(_until_reading, cluster)
            is_late = any(record.tokens for record in records)
            for request_id in request_ids:
                tcp.cancel(request_id)
            wait_s = await first_token(16)
            after += [] if is_late else [wait_s]
            if len(after) == rounds:
                return Waits(idle_s, after, chunk_s)
        raise RuntimeError(
            "a prompt was read before it could be cancelled, time and again: this machine is too "
            "quick for this model, give a larger one by --model DIR"
        )
    finally:
        await tcp.close()


def _record(draw: random.Random, length: int) -> Record:
    prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]
    return Record(prompt, Options(ignore_eos=True), 8, "tcp")


def _until_reading(cluster: Cluster) -> None:
    def is_reading() -> bool:
        row = cluster.find("prefill", 0)
        return row is not None and row["running"] > 0

    until(is_reading, "a long prompt is being read")
