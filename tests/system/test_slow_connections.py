"""Idle and dribbling connections cost the others nothing and are closed by their timers, each face.

`scripts/bench_slow_clients.py` measures 2,200 of them; here are 220, and timers of a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import psutil

from scripts.tcp_client import connect
from tests.cluster import ROOT, Cluster, until
from tests.held_up import again_if_held_up
from wire.frames import NO_RANK, PrefillDone, PrefillRequest
from wire.options import Options
from wire.payloads import encode_prompt

IDLE, DRIBBLING = 200, 20


@again_if_held_up(0.5)  # who says nothing for a second is one of the crowd
async def ask(cluster: Cluster, face: str) -> None:
    """Ask for one token, over a connection that is closed again."""
    if face == "http":
        body = {"prompt": [1, 2], "max_tokens": 1}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as web:
            answer = await web.post(cluster.http + "/v1/completions", json=body)
        assert answer.status_code == 200
        return
    client = await connect(*cluster.tcp)
    client.send(PrefillRequest(1, 2, NO_RANK), encode_prompt([1, 2], Options(max_tokens=1)))
    message = await client.next_message()
    assert message is not None and isinstance(message.frame, PrefillDone)
    await client.close()


async def test_a_crowd_is_closed_and_leaves_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, executor="hash", args=("--grace-s", "1")) as cluster:
        await crowd_of(cluster, "http")
        await crowd_of(cluster, "tcp")


async def crowd_of(cluster: Cluster, face: str) -> None:
    host, _, port = cluster.endpoints[face].rpartition("//")[2].rpartition(":")
    router = psutil.Process(cluster.router.pid)
    before = router.num_fds()
    crowd = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "scripts/bench/crowd.py"), host, port, "--face", face),
        *("--idle", str(IDLE), "--dribbling", str(DRIBBLING), "--interval-s", "0.4"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert crowd.stdout is not None
    turns = [json.loads(await crowd.stdout.readline())]
    await ask(cluster, face)
    turns += [json.loads(line) async for line in crowd.stdout]
    assert await crowd.wait() == 0
    *first, last = [turn["turn"] for turn in turns]
    assert (sorted(first), last) == (["connected", "first closed"], "all closed")
    assert (turns[-1]["refused"], turns[-1]["left"]) == (0, 0)
    until(lambda: router.num_fds() <= before + 1, "descriptors are back, less the one that asks")
