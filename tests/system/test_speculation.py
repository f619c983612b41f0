"""A draft model of a decode worker changes how many steps a text takes, and nothing else."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path
from typing import Any

from scripts.models.make_model import make_model
from tests.cluster import START_S, Cluster

VOCAB_SIZE = 512


def answers(cluster: Cluster) -> list[list[int]]:
    """Several greedy texts and one drawn one, all at once."""
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 90)]
    fields = {"max_tokens": 24, "ignore_eos": True}
    choices = cluster.choices(prompts, temperature=0, **fields)
    choices += cluster.choices(prompts, temperature=0.8, seed=7, **fields)
    return [choice["token_ids"] for choice in choices]


def stop(cluster: Cluster, worker: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Stop a worker; return what it says last."""
    cluster.until_idle()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(START_S) == 0
    return cluster.events("worker stopped")[-1]


def test_the_text_is_that_of_a_worker_without_drafts(tmp_path: Path) -> None:
    """The draft model is a smaller one with other weights, so some drafts are wrong."""
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_heads": 4, "num_kv_heads": 2}
    target = make_model(tmp_path / "target", num_layers=3, **shape)
    smaller = make_model(tmp_path / "draft", num_layers=1, seed=1, **shape)
    args = ("--dtype", "float32")
    with Cluster(tmp_path, local="0,0", model=str(target)) as cluster:
        cluster.worker("prefill", 0, *args, "--speculate", f"draft:3:{target}")  # to no effect
        plain = cluster.worker("decode", 0, *args)
        expected = answers(cluster)
        stop(cluster, plain)
        drafting = cluster.worker("decode", 1, *args, "--speculate", f"draft:3:{smaller}")
        assert answers(cluster) == expected
        counts = stop(cluster, drafting)
        assert 0 < counts["accepted_tokens"] < counts["drafted_tokens"] > 100
