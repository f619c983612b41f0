"""A draft model of a decode worker changes how many steps a text takes, and nothing else."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx

from scripts.models.make_model import make_model
from tests.cluster import START_S, Cluster

VOCAB_SIZE = 512


def answers(cluster: Cluster) -> list[dict[str, Any]]:
    """Several greedy texts and one drawn one, all at once."""
    draw = random.Random(1)
    body: dict[str, Any] = {
        "model": cluster.model,
        "prompt": [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 90)],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    texts = []
    for changes in ({}, {"temperature": 0.8, "seed": 7}):
        response = httpx.post(f"{cluster.http}/v1/completions", json=body | changes, timeout=120)
        assert response.status_code == 200, response.text
        texts += [choice["token_ids"] for choice in response.json()["choices"]]
    return texts


def stop(cluster: Cluster, worker: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Stop a worker; return what it says last."""
    cluster.until_idle()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(START_S) == 0
    events: list[dict[str, Any]] = [json.loads(line) for line in cluster.log().splitlines()]
    return [event for event in events if event["event"] == "worker stopped"][-1]


def test_the_text_is_that_of_a_worker_without_drafts(tmp_path: Path) -> None:
    """Drafts of the same model are all right, those of a smaller one with other weights are not."""
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_heads": 4, "num_kv_heads": 2}
    target = make_model(tmp_path / "target", num_layers=3, **shape)
    smaller = make_model(tmp_path / "draft", num_layers=1, seed=1, **shape)
    args = ("--dtype", "float32")
    with Cluster(tmp_path, local="0,0", model=str(target)) as cluster:
        cluster.worker("prefill", 0, *args, "--speculate", f"draft:3:{target}")  # to no effect
        plain = cluster.worker("decode", 0, *args)
        expected = answers(cluster)
        stop(cluster, plain)
        for rank, draft in enumerate((target, smaller), 1):
            drafting = cluster.worker("decode", rank, *args, "--speculate", f"draft:3:{draft}")
            assert answers(cluster) == expected
            said = stop(cluster, drafting)
            drafted, accepted = said["drafted_tokens"], said["accepted_tokens"]
            assert drafted > 100
            assert accepted == drafted if draft == target else accepted < drafted
