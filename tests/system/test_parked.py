"""One client has everything prefilled and asks for nothing: others are served all the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx

from scripts.tcp_client import Client, connect
from tests.cluster import Cluster
from wire.errors import ErrorCode
from wire.frames import ANY_RANK, DecodeDone, DecodeRequest, Error, PrefillDone, PrefillRequest
from wire.options import Options
from wire.payloads import encode_prompt

NUM_REQUESTS = 256  # what one connection may have open, and one decode worker may run


async def prefill(client: Client) -> None:
    """Send as many PREFILL_REQUESTs as may be open, and return when all are prefilled."""
    for request_id in range(1, NUM_REQUESTS + 1):
        payload = encode_prompt([request_id, 8, 9], Options(ignore_eos=True))
        client.send(PrefillRequest(request_id, 3, ANY_RANK), payload)
    for _ in range(NUM_REQUESTS):
        message = await client.next_message()
        assert message is not None and isinstance(message.frame, PrefillDone), message


async def count_errors(client: Client, errors: Counter[int]) -> None:
    async for message in client:
        assert isinstance(message.frame, Error)
        errors[message.frame.code] += 1


async def ask_over_http(cluster: Cluster) -> int:
    async with httpx.AsyncClient(base_url=cluster.http, trust_env=False, timeout=None) as client:
        body = {"prompt": [4, 5, 6], "max_tokens": 8, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body)
        return int(response.json()["usage"]["completion_tokens"])


async def ask_over_tcp(cluster: Cluster) -> int:
    num_tokens = 0
    async with await connect(*cluster.tcp) as client:
        payload = encode_prompt([7, 8, 9], Options(ignore_eos=True))
        client.send(PrefillRequest(5, 3, ANY_RANK), payload)
        client.send(DecodeRequest(5, 7))
        async for message in client:
            assert not isinstance(message.frame, Error)
            if isinstance(message.frame, DecodeDone):
                break
            num_tokens += 1
    return num_tokens


async def test_a_client_that_never_asks_on_starves_no_one(tmp_path: Path) -> None:
    errors: Counter[int] = Counter()
    args = ("--lease-ms", "600000")  # nobody can have waited for that
    with Cluster(tmp_path, executor="hash", args=args) as cluster:
        async with await connect(*cluster.tcp) as hog:
            await prefill(hog)
            listening = asyncio.create_task(count_errors(hog, errors))
            served = [await ask(cluster) for ask in (ask_over_http, ask_over_tcp)]
            # A place was made for the first, and that one was free for the second: all others are
            # held until their lease ends.
            assert served == [8, 8]
            assert errors == {ErrorCode.OVERLOADED: 1}
            assert cluster.status()["router"]["running"] == NUM_REQUESTS - 1
            listening.cancel()
        await asyncio.to_thread(cluster.until_idle)
