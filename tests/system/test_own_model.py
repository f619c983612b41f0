"""A user's own model, two functions in thirty lines, behind HTTP and over the wire.

Its next token is read from its KV alone, so the right text says that what PrefillFn computed in one
process is what DecodeStepFn was given in another.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster import START_S, Cluster, until
from tests.poisoned_model import POISON


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("own")
    args = ("--worker-args=--block-size 8 --max-ubatch-tokens 48",)
    with Cluster(directory, executor="scripts.examples.own_model:create", args=args) as cluster:
        yield cluster


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """Go on as the text did after the latest earlier occurrence of the last token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        latest = max(i for i in range(1, len(token_ids)) if token_ids[i - 1] == token_ids[-1])
        token_ids.append(token_ids[latest])
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("num_distinct", [3, 20, 150])
def test_the_tokens_are_the_model_s(own_cluster: Cluster, num_distinct: int) -> None:
    distinct = random.Random(num_distinct).sample(range(1, 500), num_distinct)
    prompt = distinct + distinct[:2]
    for _ in range(2):  # the second time with a cached prefix on both sides
        [choice] = own_cluster.choices(prompt, max_tokens=40)
        assert choice["token_ids"] == continuation(prompt, 40)
    status = own_cluster.until_idle()
    assert {worker["blocks"]["used"] for worker in status["workers"]} == {0}


def test_a_bug_of_the_model_ends_one_request_once(tmp_path: Path) -> None:
    """It shows when the prompt is read, and when the text comes to it: on either worker."""
    prompt = [20, 21, 22, 20]
    with Cluster(tmp_path, local="2,2", executor="tests.poisoned_model:create") as cluster:
        for poison in ([1, 2, POISON], [7, POISON, 8, 7]):
            body = {"model": "demo", "prompt": poison, "max_tokens": 9}
            url = cluster.http + "/v1/completions"
            response = httpx.post(url, json=body, trust_env=False, timeout=60)
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["code"] == "model_failed"
            [choice] = cluster.choices(prompt, max_tokens=20)
            assert choice["token_ids"] == continuation(prompt, 20)
        assert len(cluster.until_idle()["workers"]) == 4
        until(lambda: len(cluster.events("request failed")) == 2, "both in the log")
        until(lambda: len(cluster.events("a sequence cannot be computed")) == 2, "both in the log")
        # What fails for every choice of a request is a few lines, and not one a choice.
        body = {"prompt": [7, POISON, 8, 7], "max_tokens": 9, "n": 128}
        response = httpx.post(url, json=body, trust_env=False, timeout=START_S)
        assert response.json()["error"]["code"] == "model_failed"
        cluster.until_idle(START_S)
        for event in ("a sequence cannot be computed", "request failed", "worker refused"):
            # One now and then from each of four workers: more of them where the machine is slow.
            assert 1 <= len(cluster.events(event)) <= 16, event
        assert len(cluster.events("local worker started")) == 4
        assert not cluster.events("child process ended")
    refusals = cluster.events("request failed")[:2]
    assert [event["stage"] for event in refusals] == ["prefill", "decode"], "tried once each"
    for fault in cluster.events("a sequence cannot be computed")[:2]:
        assert fault["exception"][-1]["exc_type"] == "ZeroDivisionError"
