"""Workers of several processes: the tokens of one process, and none left when one of them dies."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from router.command.keys import make_keys
from scripts.models.make_model import make_model
from tests.cluster import START_S, Cluster, until
from tests.expected import NUM_TOKENS, VOCAB_SIZE, Expected, expectations
from worker.app import EXIT_CRASHED

TENSOR, PIPELINE = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
# family (with windows, with states), how prefill and decode workers are divided
CASES = [
    ("gpt_oss", TENSOR, PIPELINE),
    pytest.param(
        *("qwen3_next", TENSOR + PIPELINE, TENSOR),
        marks=pytest.mark.full("states between workers that are divided differently"),
    ),
]
FLOAT32 = ("--dtype", "float32", "--device", "cpu")


def checkpoint(directory: Path, family: str, lengths: Sequence[int]) -> tuple[str, list[Expected]]:
    # Of every four layers of Qwen3-Next one has attention, and each stage needs one.
    layers = 8 if family == "qwen3_next" else 3
    path = make_model(
        directory / family, family=family, num_hidden_layers=layers, vocab_size=VOCAB_SIZE
    )
    return str(path), expectations(path, random.Random(family), lengths)


def complete(cluster: Cluster, prompt: list[int], num_tokens: int) -> list[int]:
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def is_placed(cluster: Cluster, role: str, rank: int) -> Callable[[], bool]:
    def has_work() -> bool:
        row = cluster.find(role, rank)
        return row is not None and row["placed"] > 0

    return has_work


def descendants(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(("family", "prefill", "decode"), CASES)
def test_tokens_are_those_of_one_process(
    family: str, prefill: tuple[str, ...], decode: tuple[str, ...], tmp_path: Path
) -> None:
    """Through transfers, chunks and prefixes that are there already."""
    model, expected = checkpoint(tmp_path, family, (1, 17, 300))
    with Cluster(tmp_path, local="0,0", model=model) as cluster:
        cluster.worker("prefill", 0, *FLOAT32, *prefill, "--max-ubatch-tokens", "256")
        cluster.worker("decode", 0, *FLOAT32, *decode, "--block-size", "8")
        for _ in range(2):
            for prompt, tokens in expected:
                assert complete(cluster, prompt, NUM_TOKENS) == tokens, len(prompt)
        cluster.until_idle()


def test_a_process_that_dies_ends_its_worker_and_no_request(tmp_path: Path) -> None:
    """Another worker goes on with what it had; nothing of it is left; it can be started again."""
    # Each role has prompts of its own: the other worker would hold those that it had before.
    model, answers = checkpoint(tmp_path, "qwen3", range(300, 420, 20))
    flags = (*FLOAT32, *TENSOR, "--max-ubatch-tokens", "64")
    with (
        Cluster(tmp_path, local="0,0", model=model) as cluster,
        ThreadPoolExecutor(len(answers)) as threads,
    ):
        cluster.worker("prefill", 0, *FLOAT32, "--max-ubatch-tokens", "64")
        cluster.worker("decode", 1, *FLOAT32)
        for role, expected in (("decode", answers[::2]), ("prefill", answers[1::2])):
            victim = cluster.worker(role, 2, *flags)
            assert cluster.ready(role, 2)["computes"]["shards"] == 2
            (follower,) = descendants(victim.pid)
            follower.suspend()  # so that the worker has work for as long as it lives
            asked = [threads.submit(complete, cluster, it.prompt, NUM_TOKENS) for it in expected]
            until(is_placed(cluster, role, 2), "it has work")
            follower.kill()
            assert victim.wait(START_S) == EXIT_CRASHED
            assert [it.result() for it in asked] == [it.tokens for it in expected]
            cluster.until_idle()


def test_followers_started_by_hand_exit_with_status_0_when_the_leader_does(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path, "llama", ())
    meeting = ("--rendezvous", f"file://{tmp_path}/meeting")
    command = [sys.executable, "-m", "worker", "--model", model, *FLOAT32, *TENSOR, *meeting]
    with (
        Cluster(tmp_path, local="0,0", model=model) as cluster,
        subprocess.Popen([*command, "--threads", "1", "--process", "1"]) as follower,
    ):
        try:
            leader = cluster.worker("decode", 0, *FLOAT32, *TENSOR, *meeting)
            leader.terminate()
            assert (leader.wait(START_S), follower.wait(START_S)) == (0, 0)
        finally:
            follower.kill()


def knock(port: int, sent: bytes) -> None:
    """Connect to a port of this machine, send bytes, and hang up."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(sent)


def listening(processes: Sequence[psutil.Process]) -> list[int]:
    """Return the ports on which the processes listen."""
    every = (it for process in processes for it in process.net_connections("tcp"))
    return sorted({it.laddr.port for it in every if it.status == psutil.CONN_LISTEN})


def test_unauthenticated_connections_change_nothing_and_no_process_outlives_its_leader(
    tmp_path: Path,
) -> None:
    """Such connections cost no descriptor, no process, no response, and no room in the log."""
    model, [expected] = checkpoint(tmp_path, "llama", (17,))
    make_keys(tmp_path / "keys", ["router", "prefill-0", "decode-0"])
    keys = ("--keys", str(tmp_path / "keys"))
    with Cluster(tmp_path, local="0,0", model=model, args=keys) as cluster:
        cluster.worker("prefill", 0, *FLOAT32, *keys)
        leader = cluster.worker("decode", 0, *FLOAT32, *TENSOR, *PIPELINE, *keys)
        assert complete(cluster, expected.prompt, NUM_TOKENS) == expected.tokens
        processes = [psutil.Process(leader.pid), *descendants(leader.pid)]
        ports, before = listening(processes), [it.num_fds() for it in processes]
        num_lines = len(cluster.log().splitlines())
        draw = random.Random(7)
        for port in ports:
            for _ in range(100):
                knock(port, bytes(8))
            for _ in range(20):
                knock(port, draw.randbytes(draw.randrange(1, 4096)))
        assert complete(cluster, expected.prompt, NUM_TOKENS) == expected.tokens
        until(  # closed soon; a few may be of connections for KV
            lambda: all(it.num_fds() < n + 9 for it, n in zip(processes, before, strict=True)),
            "descriptors are back",
        )
        assert [it.pid for it in descendants(leader.pid)] == [it.pid for it in processes[1:]]
        assert len(cluster.log().splitlines()) < num_lines + 30
        # The only ports are those for KV, which its leader guards; see test_security.
        assert listening(processes[1:]) == [] and len(ports) == 2
        assert len(processes) == 4
        leader.kill()
        assert psutil.wait_procs(processes[1:], timeout=60)[1] == []
