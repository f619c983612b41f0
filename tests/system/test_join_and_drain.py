"""A decode worker joins a running cluster by one command, gets work, and leaves without a loss."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import httpx

from tests.cluster import START_S, Cluster, until
from tests.faults.checks import problems
from tests.faults.clients import Record, TcpClient
from wire.options import Options

NUM_TOKENS = 50  # a second at 20 ms a step


async def test_a_worker_joins_gets_work_and_drains_on_sigterm(tmp_path: Path) -> None:
    args = ("--lease-ms", "600000", "--worker-args", "--hash-step-ms 20")
    with Cluster(tmp_path, local="1,1", executor="hash", args=args) as cluster:
        joined = cluster.worker("decode", 3, "--hash-step-ms", "20")
        options = Options(ignore_eos=True)
        records = [Record([n, 7, 9] * 20, options, NUM_TOKENS, "tcp") for n in range(40)]
        client = await TcpClient.connect(*cluster.tcp)
        ids = [await client.begin(record) for record in records]
        await asyncio.gather(*[record.until_tokens(1) for record in records])
        row = await asyncio.to_thread(cluster.ready, "decode", 3)
        assert row["placed"] > 1
        for request_id in ids[::2]:
            client.go_on(request_id)
        await asyncio.gather(*[record.until_tokens(2) for record in records[::2]])
        joined.send_signal(signal.SIGTERM)
        # It holds what it has been given, and has to go on with it.
        await asyncio.to_thread(until, lambda: cluster.find("decode", 3, "draining"), "it drains")
        for request_id in ids[1::2]:
            client.go_on(request_id)
        await asyncio.gather(*[record.until_tokens(NUM_TOKENS + 1) for record in records])
        await client.close()
        assert problems(records) == []
        metrics = await asyncio.to_thread(httpx.get, f"{cluster.http}/metrics", trust_env=False)
        assert re.search(r'failovers_total{code="draining"} [1-9]', metrics.text)  # handed over
        assert await asyncio.to_thread(joined.wait, START_S) == 0
        until(lambda: cluster.find("decode", 3) is None, "decode-3 gone")
        cluster.until_idle()


def test_a_second_signal_ends_streams_with_an_error_and_at_once(tmp_path: Path) -> None:
    """The parent process passes both signals on to its router processes."""
    args = ("--worker-args", "--hash-step-ms 20", "--processes", "2")
    with Cluster(tmp_path, executor="hash", args=args) as cluster:
        body = {"model": "demo", "prompt": [1, 2], "max_tokens": 2000, "stream": True}
        url = f"{cluster.http}/v1/completions"
        with httpx.stream("POST", url, json=body | {"ignore_eos": True}, timeout=60) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: {")
            cluster.router.send_signal(signal.SIGTERM)  # the same twice might come as one
            cluster.router.send_signal(signal.SIGINT)
            *_, error, done = [line for line in events if line]
        assert '"code":"draining"' in error and done == "data: [DONE]"
        assert cluster.router.wait(START_S) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert "Traceback" not in cluster.log_path.read_text()
