from __future__ import annotations

from itertools import islice, pairwise

import pytest

from router.core.request import Request
from router.core.state import Attempt, RequestIds, new_tokens
from tests.router.core.states import state
from tests.router.scripted import worker
from wire.frames import Role
from wire.options import Options
from wire.payloads import PrefillResult, Usage
from wire.prefix import prefix_hashes

EPOCH = 7
MANY = 5_000


@pytest.mark.parametrize(
    ("asked", "max_tokens", "expected"),
    [(None, None, None), (5, None, 5), (None, 5, 4), (5, 3, 2), (1, 9, 1), (0, None, 0)],
)
def test_the_smaller_of_both_limits_holds_and_workers_are_told(
    asked: int | None, max_tokens: int | None, expected: int | None
) -> None:
    request = Request((1,), Options(max_tokens=max_tokens), asked)
    assert new_tokens(request) == expected
    prefill = worker(Role.PREFILL)
    told = Attempt(1, state(request), prefill, None).options(10.0).max_tokens
    assert told == (None if expected is None else expected + 1)


def test_a_later_attempt_is_told_what_is_generated_and_what_time_is_left() -> None:
    request = Request((1, 2, 3), Options(deadline_ms=10_000, prompt_logprobs=0, max_tokens=9), 8)
    it = state(request)
    first = Attempt(1, it, None, None)
    assert first.options(10.0) == request.options and first.seq_len == 3
    it.generated = [7, 8]
    assert (it.token_ids, it.num_left) == ((1, 2, 3, 7, 8), 7)
    second = Attempt(2, it, None, None, num_generated=2)
    assert second.seq_len == 5
    assert second.options(16.0) == Options(deadline_ms=4000, max_tokens=9, generated_tokens=2)


def test_workers_learn_the_tenant_of_a_request_whatever_its_client_claims() -> None:
    def tenant(client: str, claimed: int = 0) -> int:
        request = Request((1,), Options(tenant=claimed), client=client)
        return Attempt(1, state(request), None, None).options(10.0).tenant

    assert tenant("alice") == tenant("alice", claimed=tenant("bob")) != tenant("bob")
    # The same in every process of every router.
    assert tenant("alice") == 4966672586037949734
    assert 0 < tenant("alice") < 2**63
    assert tenant("", claimed=5) == 0


def test_hashes_are_of_tokens_and_salt_and_workers_get_the_salt() -> None:
    prompt = tuple(range(32))
    it = state(Request(prompt, Options(cache_salt="a"), 9))
    assert it.hashes(16) == prefix_hashes(prompt, 16, "a") != prefix_hashes(prompt, 16)
    it.generated = [5] * 16
    assert it.hashes(16) == prefix_hashes([*prompt, *it.generated], 16, "a")
    assert Attempt(1, it, None, None, num_generated=16).options(10.0).cache_salt == "a"


def test_an_end_tells_the_whole_story() -> None:
    it = state(Request((1, 2, 3), Options(), 9, client="me"))
    it.placed_at, it.first_at, it.generated = 11.0, 13.0, [5, 6]
    it.first = PrefillResult(token_id=5, cached_tokens=2)
    end = it.end(17.0, None, Usage(finish_reason="stop", kv_bytes=64, kv_skipped_tokens=1))
    assert (end.outcome, end.code, end.client) == ("stop", None, "me")
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (3, 2, 2)
    assert (end.kv_bytes, end.kv_skipped_tokens) == (64, 1)
    assert (end.queue_s, end.ttft_s, end.decode_s, end.total_s) == (1.0, 3.0, 4.0, 7.0)


def test_no_id_comes_twice_and_all_are_of_the_epoch() -> None:
    ids = list(islice(RequestIds(EPOCH), MANY))
    assert len(set(ids)) == MANY
    assert {each >> 32 for each in ids} == {EPOCH}


def test_ids_cannot_be_guessed_from_others() -> None:
    ids = list(islice(RequestIds(EPOCH), MANY))
    steps = {(later - earlier) % 2**32 for earlier, later in pairwise(ids)}
    assert len(steps) > 0.99 * MANY, "no step is a rule"
    again = list(islice(RequestIds(EPOCH), MANY))
    assert len(set(ids) & set(again)) < MANY / 100, "another process draws another key"
