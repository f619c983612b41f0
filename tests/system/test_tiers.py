"""A session goes on after everything was killed: only its new tokens are read, the text is equal.

`TIER_KILLS` asks for more kills while blocks are being written.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, until
from tests.oracle import hash_oracle
from wire.options import Options
from worker.tiers.records import Checksum, RecordFormat

BLOCK_SIZE = 16
HEADER_BYTES = RecordFormat(BLOCK_SIZE, 0, b"", Checksum()).header_bytes
NUM_TURNS = 4
NUM_KILLS = int(os.environ.get("TIER_KILLS", "2"))
NUM_TOKENS = 20


class Restarting:
    """A cluster of one worker that reads and generates; it can be killed and started again."""

    def __init__(self, directory: Path, executor: str, *args: str) -> None:
        self._directory, self._executor, self._args = directory, executor, args
        self._num_starts = 0

    def start(self) -> Cluster:
        directory = self._directory / str(self._num_starts)
        directory.mkdir()
        self._num_starts += 1
        tiers = f"--disk-kv {self._directory / 'kv'} --disk-kv-bytes {64 << 20}"
        args = ("--local-prefill", "auto", "--worker-args", tiers, *self._args)
        return Cluster(directory, local="0,1", executor=self._executor, args=args)


def ask(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens of the answer, and how many of the prompt's were cached."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"model": cluster.model, "return_token_ids": True, "ignore_eos": True}
    url = f"{cluster.http}/v1/completions"
    answer = httpx.post(url, json=body, timeout=120, trust_env=False).raise_for_status().json()
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


def kill(cluster: Cluster) -> None:
    """SIGKILL the worker, then the router."""
    cluster.kill_local("decode", 0)
    cluster.router.send_signal(signal.SIGKILL)
    cluster.router.wait()


@pytest.mark.parametrize(
    "executor",
    [pytest.param("torch", marks=pytest.mark.full("tiers store the same bytes of both")), "hash"],
)
def test_a_session_goes_on_after_all_were_killed(tmp_path: Path, executor: str) -> None:
    draw = random.Random(3)
    restarting, prompt = Restarting(tmp_path, executor), [draw.randrange(900) for _ in range(300)]
    disk, killed = tmp_path / "kv", tmp_path / "as it was when all were killed"
    with restarting.start() as cluster:
        cluster.ready("decode", 0)
        for _ in range(NUM_TURNS):
            answer, _ = ask(cluster, prompt)
            num_computed = len(prompt) + len(answer) - 1  # the last token has no KV
            prompt += [*answer, *(draw.randrange(900) for _ in range(20))]
        headers = next(disk.rglob("headers"))
        num_bytes = num_computed // BLOCK_SIZE * HEADER_BYTES
        until(lambda: headers.stat().st_size >= num_bytes, "all blocks are written")
        shutil.copytree(disk, killed)
        expected, _ = ask(cluster, prompt)
        kill(cluster)
    shutil.rmtree(disk)
    killed.rename(disk)
    with restarting.start() as cluster:
        cluster.ready("decode", 0)
        found = [event for event in cluster.events("blocks on disk") if event["found"]]
        assert found and not found[0]["skipped"]
        answer, cached_tokens = ask(cluster, prompt)
    assert answer == expected
    assert cached_tokens == num_computed // BLOCK_SIZE * BLOCK_SIZE, "all that was full"


@pytest.mark.timeout(120 + 30 * NUM_KILLS)
def test_nothing_wrong_is_served_after_kills_while_blocks_are_written(tmp_path: Path) -> None:
    """Prompts have beginnings in common; the hash executor's text shows any wrong byte."""
    draw, num_cached = random.Random(4), 0
    restarting = Restarting(tmp_path, "hash")
    heads = [[draw.randrange(900) for _ in range(400)] for _ in range(3)]
    options = Options(ignore_eos=True)

    def check(cluster: Cluster) -> int:
        tail = [draw.randrange(900) for _ in range(5)]
        prompt = draw.choice(heads)[: draw.randint(1, 400)] + tail
        answer, cached_tokens = ask(cluster, prompt)
        assert answer == hash_oracle(prompt, NUM_TOKENS, options)
        return cached_tokens

    def kill_while_it_writes(cluster: Cluster) -> None:
        kv = next((tmp_path / "kv").rglob("kv"))
        before_ns = kv.stat().st_mtime_ns
        check(cluster)
        until(lambda: kv.stat().st_mtime_ns > before_ns, "blocks are being written")
        kill(cluster)

    for _ in range(NUM_KILLS):
        with restarting.start() as cluster:
            cluster.ready("decode", 0)
            num_cached += check(cluster)
            for _ in range(draw.randint(0, 8)):
                check(cluster)
            kill_while_it_writes(cluster)
    with restarting.start() as cluster:
        cluster.ready("decode", 0)
        assert num_cached + check(cluster) > 0
        cluster.until_idle()


def test_two_workers_hand_over_what_their_tiers_gave_back(tmp_path: Path) -> None:
    """Sessions that do not fit the blocks of either worker, with KV that is handed over."""
    draw, num_cached = random.Random(5), 0
    tiers = f"--num-blocks 48 --host-kv-bytes 50000 --disk-kv {tmp_path} --disk-kv-bytes 1000000"
    slow = "--hash-step-ms 4 --max-ubatch-tokens 64"  # else it is quicker to compute than to load
    sessions = [[draw.randrange(900) for _ in range(300)] for _ in range(5)]
    options = Options(ignore_eos=True)
    with Cluster(tmp_path, executor="hash", args=("--worker-args", f"{tiers} {slow}")) as cluster:
        for turn in range(3):
            for session in sessions:
                answer, cached_tokens = ask(cluster, session)
                assert answer == hash_oracle(session, NUM_TOKENS, options)
                num_cached += cached_tokens if turn else 0
                session += [*answer, *(draw.randrange(900) for _ in range(20))]
        workers = cluster.until_idle()["workers"]
    tiers_of = [worker["tiers"] for worker in workers]
    assert all(0 < held["blocks"] <= held["max_blocks"] for it in tiers_of for held in it.values())
    assert sum(it["host"]["loaded_tokens"] + it["disk"]["loaded_tokens"] for it in tiers_of) > 0
    assert num_cached > 0.3 * 2 * sum(map(len, sessions))
