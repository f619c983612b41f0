"""Cached prefixes are shared under one salt only: an API key does not find another key's prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.tcp_client import Client, connect
from tests.cluster import Cluster
from tests.system.locked import Locked
from wire.frames import ANY_RANK, DecodeRequest, Hello, PrefillRequest, Tag
from wire.options import Options
from wire.payloads import Usage, decode_map, decode_prefill_result, encode_prompt

BLOCK = 16
NUM_CACHED = 3 * BLOCK  # the last token of a prompt is always computed


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    with Locked(tmp_path_factory.mktemp("locked")) as cluster:
        yield cluster


def prompt_of(number: int) -> list[int]:
    """A prompt of four blocks that no other test uses."""
    return [300 + number, *range(4 * BLOCK - 1)]


def usage(cluster: Cluster, key: str, prompt: list[int], **fields: Any) -> tuple[int, int]:
    """Return the tokens that were cached, and the bytes of KV that were sent, in a completion."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    body |= {"baton_usage": True} | fields
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"{cluster.http}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    cached = found["prompt_tokens_details"]["cached_tokens"]
    return cached, found["baton"]["kv_transfer"]["bytes"]


def test_a_key_finds_its_own_prompts_only(locked: Locked) -> None:
    prompt = prompt_of(1)
    nothing, all_bytes = usage(locked, locked.key, prompt)
    assert nothing == 0 < all_bytes
    again, fewer_bytes = usage(locked, locked.key, prompt)
    assert again == NUM_CACHED and fewer_bytes < all_bytes
    assert usage(locked, locked.other_key, prompt) == (0, all_bytes), "on neither worker"
    assert usage(locked, locked.other_key, prompt) == (again, fewer_bytes)
    assert usage(locked, locked.key, prompt, cache_salt="mine") == (0, all_bytes)
    assert usage(locked, locked.key, prompt, cache_salt="mine") == (again, fewer_bytes)
    assert usage(locked, locked.other_key, prompt, cache_salt="mine") == (0, all_bytes)


def test_scores_of_a_prompt_are_not_cached_for_another_key(locked: Locked) -> None:
    prompt = prompt_of(2)
    scored = {"prompt_logprobs": 0, "cache_salt": "scores"}
    assert usage(locked, locked.key, prompt, **scored)[0] == 0
    assert usage(locked, locked.key, prompt, cache_salt="scores")[0] == NUM_CACHED
    assert usage(locked, locked.other_key, prompt, cache_salt="scores")[0] == 0


def test_keys_that_share_the_cache_find_each_other_s_prompts(tmp_path: Path) -> None:
    with Locked(tmp_path, "--shared-prefix-cache") as shared:
        prompt = prompt_of(3)
        assert usage(shared, shared.key, prompt)[0] == 0
        assert usage(shared, shared.other_key, prompt)[0] == NUM_CACHED
        assert usage(shared, shared.other_key, prompt, cache_salt="mine")[0] == 0
        assert usage(shared, shared.key, prompt, cache_salt="mine")[0] == NUM_CACHED


async def cached(client: Client, request_id: int, prompt: list[int], salt: str) -> tuple[int, int]:
    """Return how many tokens were cached on the prefill and on the decode worker."""
    payload = encode_prompt(prompt, Options(cache_salt=salt, ignore_eos=True))
    client.send(PrefillRequest(request_id, len(prompt), ANY_RANK), payload)
    client.send(DecodeRequest(request_id, 3))
    prefilled = 0
    async for message in client:
        if message.tag is Tag.PREFILL_DONE:
            prefilled = decode_prefill_result(message.body()).cached_tokens
        elif message.tag is Tag.DECODE_DONE:
            return prefilled, decode_map(Usage, message.body()).kv_skipped_tokens
        else:
            assert message.tag is Tag.DECODE_TOKEN, message
    raise AssertionError("the router hung up")


async def test_over_raw_tcp_salts_are_the_keys_too(locked: Locked) -> None:
    prompt = prompt_of(4)
    for key in (locked.key, locked.other_key):
        async with await connect(*locked.tcp) as client:
            client.send(Hello.of_client(), key.encode())
            for number, salt in enumerate(("", "mine")):
                assert await cached(client, 2 * number + 1, prompt, salt) == (0, 0)
                assert await cached(client, 2 * number + 2, prompt, salt) == (NUM_CACHED, 4 * BLOCK)
    assert usage(locked, locked.key, prompt)[0] == NUM_CACHED, "over HTTP it is the same salt"


async def test_without_keys_the_salt_is_the_client_s(hash_cluster: Cluster) -> None:
    prompt = prompt_of(5)
    async with await connect(*hash_cluster.tcp) as client:
        for request_id, salt in enumerate(("", "a", "b"), 1):
            assert await cached(client, request_id, prompt, salt) == (0, 0)
        assert await cached(client, 10, prompt, "a") == (NUM_CACHED, 4 * BLOCK)
    assert usage(hash_cluster, "", prompt, cache_salt="a")[0] == NUM_CACHED
    assert usage(hash_cluster, "", prompt, cache_salt="c")[0] == 0
