"""Workers of two processes each, any of which may be killed at any moment, under load."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from tests.cluster import until
from tests.faults.checks import problem
from tests.faults.clients import Record
from tests.faults.cluster import FaultyCluster, Key
from tests.faults.load import send_all

# With these workers all compute alike, so whoever goes on with a text goes on with the same one.
WORKER_ARGS: Final = (
    *("--device", "cpu", "--dtype", "float32", "--max-ubatch-tokens", "128"),
    *("--tensor-parallel", "2"),
)
PER_ROUND: Final = 12
ENDED_S: Final = 1.0  # how long a worker may live that has lost a process


@dataclass
class Sweep:
    """The kills, how long workers lived without the process, and the problems."""

    kills: Counter[str] = field(default_factory=Counter)
    ended_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    problems: list[str] = field(default_factory=list)


def model(directory: Path) -> str:
    """Make a checkpoint that takes some milliseconds a step."""
    from scripts.models.make_model import make_model  # here, for importing torch takes a second

    return str(make_model(directory, family="qwen3", num_hidden_layers=6, vocab_size=1024))


async def texts(cluster: FaultyCluster, records: Sequence[Record]) -> list[list[int]]:
    """Return what is answered without a fault."""
    fresh = [_fresh(record) for record in records]
    await send_all(cluster, fresh, clients=4)
    assert not any(record.error for record in fresh), [record.error for record in fresh]
    return [record.tokens for record in fresh]


async def sweep(
    cluster: FaultyCluster, records: Sequence[Record], num_kills: int, seed: int
) -> Sweep:
    """Kill so many processes, one of a prefill and one of a decode worker in each round."""
    draw, result = random.Random(seed), Sweep()
    wanted = await texts(cluster, records)
    while sum(result.kills.values()) < num_kills:
        chosen = draw.sample(range(len(records)), PER_ROUND)
        asked = [_fresh(records[it]) for it in chosen]
        load = asyncio.create_task(send_all(cluster, asked, clients=6))
        for role in draw.sample(("prefill", "decode"), 2):
            await asyncio.sleep(draw.uniform(0.0, 0.6))
            await asyncio.to_thread(_kill_one, cluster, (role, draw.randrange(2)), draw, result)
        await load
        result.num_requests += len(asked)
        found = (problem(one, wanted[it]) for one, it in zip(asked, chosen, strict=True))
        result.problems += filter(None, found)
        await asyncio.to_thread(cluster.until_whole)
    return result


def left_over(cluster: FaultyCluster, path: str) -> list[int]:
    """Return the processes that have this model and are nobody's."""
    known = {process.pid for process in cluster.workers.values()} | {cluster.router.pid}
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "ppid"])
        if path in " ".join(process.info["cmdline"] or ())
        and not known & {process.pid, process.info["ppid"]}
    ]


def _fresh(record: Record) -> Record:
    return Record(record.prompt, record.options, record.num_tokens, record.face)


def _kill_one(cluster: FaultyCluster, key: Key, draw: random.Random, result: Sweep) -> None:
    leader = cluster.workers[key]
    followers = psutil.Process(leader.pid).children()
    is_leader = not followers or draw.random() < 0.3
    result.kills[f"{key[0]}: {'leads' if is_leader else 'follows'}"] += 1
    start = time.monotonic()
    (leader if is_leader else followers[0]).kill()
    until(lambda: leader.poll() is not None, "the worker ends")
    until(lambda: not any(map(_is_alive, followers)), "the processes that followed end")
    result.ended_s.append(time.monotonic() - start)


def _is_alive(process: psutil.Process) -> bool:
    try:
        is_zombie: bool = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie  # whoever inherits it may be slow to look
    except psutil.NoSuchProcess:
        return False
