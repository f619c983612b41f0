"""Planted reasons for a miss, on a whole cluster: real caches, evictions, restarts and API keys."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import ROOT, Cluster, until

KEYS = ("sk-anna-0123456789abcdef", "sk-ben-0123456789abcdef")
NUM_BLOCKS = 128
SYSTEM = "You are the assistant of a museum of clocks. Be polite, be brief, and never guess a date."
TURNS = (
    "Which clock is the oldest one that still runs in the great hall?",
    "And which one did the king wind up himself every evening after dinner?",
    "How long does a visit of all rooms take with small children?",
)


# Python imports this at its start: a router that hears of every change of a cache at once, but
# forgets none, as it would after three missed heartbeats, because a worker has to wait for a core.
PATIENT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
if "router" in sys.orig_argv:
    from router.core import fleet
    fleet.SUSPECT_BEATS = fleet.MISSED_BEATS = 100
"""


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description}}


TOOLS = [
    tool("find_clock", "Find a clock by its name or by the room where it stands."),
    tool("opening_hours", "Tell when the museum opens and closes on a day of the week."),
]


def patient(directory: Path, worker_args: str, *args: str, api_key: str = "") -> Cluster:
    """One prefill and one decode worker whose heartbeats come often."""
    (directory / "sitecustomize.py").write_text(PATIENT)
    args = ("--heartbeat-ms", "100", "--worker-args", worker_args, *args)
    cluster = Cluster(directory, executor="hash", args=args, api_key=api_key)
    cluster.environ = {"PYTHONPATH": str(directory)}
    return cluster


@pytest.fixture(scope="module")
def museum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("museum")
    keys = directory / "api_keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    blocks = f"--num-blocks {NUM_BLOCKS} --block-size 16"
    with patient(directory, blocks, "--api-keys", str(keys), api_key=KEYS[0]) as cluster:
        yield cluster


def post(cluster: Cluster, path: str, key: str, **body: Any) -> dict[str, Any]:
    fields = {"model": "demo", "max_tokens": 4, "temperature": 0, "baton_usage": True} | body
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=cluster.http, headers=headers, timeout=60, trust_env=False) as http:
        answer = http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        [choice] = http.get(f"/v1/requests/{answer.json()['id']}").json()["choices"]
    cluster.until_idle()  # and heartbeats have reported what is cached now
    usage = answer.json()["usage"]
    cache: dict[str, Any] = choice["cache"]
    brief = usage["baton"]["cache"]
    assert {name: cache[name] for name in ("reason", "longest_match")} == {
        name: brief[name] for name in ("reason", "longest_match")
    }
    assert cache["prefill_worker_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    return cache | {"prompt_tokens": usage["prompt_tokens"]}


def chat(
    cluster: Cluster,
    *turns: str,
    system: str = SYSTEM,
    key: str = KEYS[0],
    **fields: Any,
) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return post(cluster, "/v1/chat/completions", key, messages=messages, **fields)


def complete(cluster: Cluster, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return post(cluster, "/v1/completions", KEYS[0], prompt=prompt, **fields)


def test_what_was_changed_is_named(museum: Cluster) -> None:
    whole = chat(museum, *TURNS, tools=TOOLS)
    assert (whole["reason"], whole["part"]) == ("first_seen", None) or whole["part"] == "system"
    again = chat(museum, *TURNS, tools=TOOLS)
    assert (again["reason"], again["diverged_at"]) == ("hit", None)

    other_tool = [TOOLS[0], tool("opening_hours", "Tell when the museum is open.")]
    last_turn = (*TURNS[:2], TURNS[2].replace("long", "much time"))
    middle_turn = (TURNS[0], TURNS[1].replace("king", "queen"), TURNS[2])
    for part, changed in (
        ("tools", chat(museum, *TURNS, tools=other_tool)),
        ("messages[3]", chat(museum, *last_turn, tools=TOOLS)),
        ("messages[2]", chat(museum, *middle_turn, tools=TOOLS)),
        ("system", chat(museum, *TURNS, tools=TOOLS, system=SYSTEM.replace("clocks", "shoes"))),
    ):
        assert (changed["reason"], changed["part"]) == ("diverged", part)
        assert 0 < changed["diverged_at"] == changed["longest_match"] < changed["prompt_tokens"]
        assert changed["prefill_worker_tokens"] == changed["longest_match"] // 16 * 16
        assert part == "tools" or changed["diverged_at"] != whole["diverged_at"]


def test_a_session_s_answer_is_at_the_decode_worker(museum: Cluster) -> None:
    prompt = list(range(300, 340))
    [choice] = museum.choices(prompt, max_tokens=40, temperature=0, ignore_eos=True)
    museum.until_idle()
    longer = [*prompt, *choice["token_ids"], 9]
    cache = complete(museum, longer)
    assert (cache["reason"], cache["because"]) == ("elsewhere", "role")
    assert cache["worker"] == "decode-0"
    assert cache["longest_match"] == 80 and cache["prefill_worker_tokens"] == 32
    assert cache["decode_worker_tokens"] >= 64


def test_a_prompt_that_is_scored_or_short_or_has_another_salt(museum: Cluster) -> None:
    prompt = list(range(700, 760))
    assert complete(museum, prompt)["reason"] == "first_seen"
    assert complete(museum, prompt, prompt_logprobs=0)["reason"] == "prompt_logprobs"
    assert complete(museum, prompt[:16])["reason"] == "shorter_than_a_block"
    assert complete(museum, prompt, cache_salt="pepper")["reason"] == "other_salt"
    assert complete(museum, prompt, cache_salt="pepper")["reason"] == "hit"


def test_what_is_evicted_is_told_with_the_time(museum: Cluster) -> None:
    prompt = list(range(1000, 1100))
    complete(museum, prompt)
    start = time.time()
    for number in range(3):
        complete(museum, [1310 + number, *range(NUM_BLOCKS * 16 // 2)])
    cache = complete(museum, prompt)
    assert (cache["reason"], cache["worker"]) == ("evicted", "prefill-0")
    assert cache["tier"] == "kv_cache"
    assert start - 1 < cache["at"] < time.time()
    assert (cache["reusable"], cache["longest_match"]) == (96, 100)


def test_what_a_tier_evicts_is_told_with_its_name(tmp_path: Path) -> None:
    worker_args = "--num-blocks 32 --block-size 16 --host-kv-bytes 65536"
    with patient(tmp_path, worker_args) as cluster:
        prompt = list(range(1000, 1100))
        complete(cluster, prompt)
        for number in range(4):
            complete(cluster, [number, *range(24 * 16)])
        cache = complete(cluster, prompt)
    assert (cache["reason"], cache["worker"], cache["tier"]) == ("evicted", "prefill-0", "host")
    assert cache["explanation"].endswith("from its host memory")


def test_a_worker_that_was_restarted(museum: Cluster) -> None:
    prompt = list(range(1200, 1300))
    complete(museum, prompt)
    old = museum.ready("prefill", 0)
    os.kill(museum.local_pids("prefill", 0)[-1], signal.SIGKILL)
    until(
        lambda: (now := museum.find("prefill", 0)) and now["epoch"] != old["epoch"],
        "prefill-0 is back",
        60,
    )
    cache = complete(museum, prompt)
    assert (cache["reason"], cache["worker"]) == ("worker_restarted", "prefill-0")


def test_a_key_is_told_nothing_of_another(museum: Cluster) -> None:
    turns = ("Do you sell any books about the clock of the cathedral of Strasbourg?",)
    answer = httpx.post(
        f"{museum.http}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": turns[0]}], "max_tokens": 2},
        headers={"authorization": f"Bearer {KEYS[0]}"},
        timeout=60,
    )
    path = f"{museum.http}/v1/requests/{answer.json()['id']}"
    for key, status in ((KEYS[0], 200), (KEYS[1], 404)):
        found = httpx.get(path, headers={"authorization": f"Bearer {key}"}, timeout=60)
        assert found.status_code == status
    chat(museum, *turns)
    cache = chat(museum, *turns, key=KEYS[1])
    assert (cache["longest_match"], cache["earlier_id"], cache["diverged_at"]) == (0, None, None)
