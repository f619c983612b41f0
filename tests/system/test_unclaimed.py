"""KV that no router asked for, offered to a real decode worker by a prefill worker gone bad.

There are no keys: whoever reaches the KV socket of this cluster may call itself a prefill worker.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, kv_endpoint
from tests.faults.clients import Record, TcpClient
from tests.oracle import hash_oracle
from tests.worker.scripted import ScriptedPrefill
from wire.errors import ErrorCode
from wire.frames import Error
from wire.options import Options

OPTIONS = Options(ignore_eos=True)
PROMPT = [(13 * i) % 1000 for i in range(200)]
NUM_BLOCKS = 512
LEASE_S = 6.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    """A cluster, and where its one decode worker takes KV in."""
    with Cluster(tmp_path_factory.mktemp("unclaimed"), local="1,0", executor="hash") as cluster:
        settings = (
            "--num-blocks",
            str(NUM_BLOCKS),
            "--lease-s",
            str(LEASE_S),
            "--kv-segment-port",
            "off",
        )
        yield cluster, kv_endpoint(cluster.worker("decode", 0, *settings))


async def answer(cluster: Cluster, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that a client gets for this prompt."""
    client = await TcpClient.connect(*cluster.tcp)
    record = Record(prompt, OPTIONS, num_tokens, "tcp")
    await client.ask(record)
    await client.close()
    return record.tokens


def blocks_at_rest(cluster: Cluster) -> dict[str, int]:
    """The decode worker's blocks when nothing is under way; every one is somewhere."""
    cluster.until_idle()
    blocks: dict[str, int] = cluster.ready("decode", 0)["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["used"] == blocks["total"] == NUM_BLOCKS
    return blocks


async def test_kv_under_an_id_that_nobody_issued_reaches_nobody(
    target: tuple[Cluster, str],
) -> None:
    cluster, endpoint = target
    before = blocks_at_rest(cluster)
    async with ScriptedPrefill(endpoint, b"prefill-9-1") as bad:
        bad.offer(77, PROMPT)
        await bad.ack()
        bad.segment(77, range(len(PROMPT)))  # zeros, which are the KV of no text
        assert (await bad.ack())[1].ready
        for _ in range(2):
            assert await answer(cluster, PROMPT, 8) == hash_oracle(PROMPT, 8, OPTIONS)
        assert await bad.error() == (77, ErrorCode.TRANSFER_FAILED)
    after = blocks_at_rest(cluster)
    assert after["cached"] - before["cached"] == (len(PROMPT) + 7) // 16, "the client's, once"


async def test_offers_without_bytes_keep_nobody_waiting(target: tuple[Cluster, str]) -> None:
    cluster, endpoint = target
    async with ScriptedPrefill(endpoint, b"prefill-9-2") as bad:
        for request_id in range(100, 164):  # 8 blocks each: all that there are
            bad.offer(request_id, [request_id] * 127)
        for _ in range(16):  # a quarter
            await bad.ack()
        prompt = [5, *PROMPT]
        assert await answer(cluster, prompt, 8) == hash_oracle(prompt, 8, OPTIONS)
        assert bad.is_quiet, "none of them had to end for it"
        ended = list[int]()
        while len(ended) < 16:  # and those behind them get their turn meanwhile
            frame = (await bad.receive()).frame
            if isinstance(frame, Error):
                ended.append(frame.code)
        assert set(ended) == {ErrorCode.TRANSFER_FAILED}
    blocks_at_rest(cluster)
