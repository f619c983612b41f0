"""A draft model of a decode worker changes how many steps a text takes, and nothing else."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

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


@pytest.mark.parametrize("seed", [0, 1])
def test_the_text_is_that_of_a_worker_without_drafts(tmp_path: Path, seed: int) -> None:
    """Drafts of the same model are all right, those of a smaller one with other weights are not."""
    shape: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_heads": 4, "num_kv_heads": 2}
    target = make_model(tmp_path / "target", num_layers=3, **shape)
    draft = make_model(tmp_path / "draft", num_layers=1, seed=seed, **shape) if seed else target
    args = ("--dtype", "float32")
    with Cluster(tmp_path, local="0,0", model=str(target)) as cluster:
        drafts = ("--speculate", f"draft:3:{draft}")
        cluster.worker("prefill", 0, *args, *drafts)
        plain = cluster.worker("decode", 0, *args)
        expected = answers(cluster)
        plain.send_signal(signal.SIGTERM)
        assert plain.wait(START_S) == 0
        drafting = cluster.worker("decode", 1, *args, *drafts)
        assert answers(cluster) == expected
        cluster.until_idle()
        drafting.send_signal(signal.SIGTERM)
        assert drafting.wait(START_S) == 0
        stopped = [
            event
            for event in map(json.loads, cluster.log().splitlines())
            if event["event"] == "worker stopped"
        ]
    drafted, accepted = stopped[-1]["drafted_tokens"], stopped[-1]["accepted_tokens"]
    assert drafted > 100
    assert accepted == drafted if seed == 0 else accepted < drafted
