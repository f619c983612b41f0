from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.core.fleet import Fleet
from router.core.placement import Placement
from router.core.prefixes import PrefixIndex
from router.core.request import Request
from router.core.state import Attempt, Limits, RequestIds, RequestState
from tests.router.core import states
from tests.router.scripted import detail, fleet, load
from wire.errors import ErrorCode, WireError
from wire.frames import Heartbeat, Hello, Role
from wire.identity import Identity
from wire.options import Options

EPOCH = 7


def state(prompt: int = 40, new: int | None = 8) -> RequestState:
    return states.state(Request(tuple(range(prompt)), Options(), new))


def cluster(*roles: Role, local_prefill: bool = False) -> tuple[Fleet, Placement]:
    table, index = fleet(), PrefixIndex()
    for rank, role in enumerate(roles):
        identity = f"{role.name.lower()}-{rank}-1".encode()
        table.hello(identity, Hello(1, rank, role), detail(), 0.0)
        table.heartbeat(identity, Heartbeat(0, 0, 0), load(), 0.0)
        index.add(identity, 64)
    limits = Limits(local_prefill=local_prefill)
    return table, Placement(table, index, limits=limits, request_ids=RequestIds(EPOCH))


def books(table: Fleet) -> list[tuple[int, int, int, int]]:
    return [
        (len(each.attempts), each.num_active, each.prefill_tokens, each.promised_blocks)
        for each in table
    ]


def placed(placement: Placement, each: RequestState | None = None) -> Attempt:
    attempt = placement.place(each or state(), 0.0)
    assert attempt is not None
    return attempt


@pytest.mark.parametrize("num_generated", [0, 3])
def test_the_limit_of_a_transfer_is_of_what_was_generated_too(num_generated: int) -> None:
    table, placement = cluster(Role.PREFILL)
    each = state()
    each.generated.extend(range(num_generated))
    enough = detail().layout.transfer_bytes(40 + num_generated)
    for rank, most in enumerate((enough - 1, enough)):
        identity = Identity(Role.DECODE, rank, 1).name
        table.hello(identity, Hello(1, rank, Role.DECODE), detail(max_kv_transfer_bytes=most), 0.0)
        table.heartbeat(identity, Heartbeat(0, 0, 0), load(), 0.0)
        assert (placement.place(each, 0.0) is None) == (most < enough)


def test_a_prompt_alone_may_be_as_long_as_the_context() -> None:
    """The one token after it is not read by anybody."""
    table, placement = cluster()
    alone, longer, more = state(40, 0), state(41, 0), state(40, 1)
    table.hello(b"prefill-0-1", Hello(1, 0, Role.PREFILL), detail(max_model_len=40), 0.0)
    table.heartbeat(b"prefill-0-1", Heartbeat(0, 0, 0), load(), 0.0)
    placement.check(alone)
    assert placement.place(alone, 0.0) is not None
    for each in (longer, more):
        with pytest.raises(WireError) as caught:
            placement.check(each)
        assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_both_workers_are_charged_and_released() -> None:
    table, placement = cluster(Role.PREFILL, Role.DECODE)
    attempt = placed(placement)
    assert attempt.request_id >> 32 == EPOCH
    assert books(table) == [(1, 1, 40, 0), (1, 1, 0, 3)]
    placement.finish_prefill(attempt)
    placement.finish_prefill(attempt)
    assert books(table) == [(1, 0, 0, 0), (1, 1, 0, 3)]
    assert placement.release_prefill(attempt) is not None
    assert placement.release_prefill(attempt) is None
    assert books(table) == [(0, 0, 0, 0), (1, 1, 0, 3)]
    assert placement.release_decode(attempt) is not None
    assert placement.release_decode(attempt) is None
    assert books(table) == [(0, 0, 0, 0)] * 2


@pytest.mark.parametrize("role", [Role.PREFILL, Role.ANY])
def test_blocks_are_reserved_where_answers_need_them_until_a_heartbeat_counts_them(
    role: Role,
) -> None:
    """40 tokens take 3 blocks, and so do 8 more."""
    table, placement = cluster(role, Role.DECODE)
    attempt = placed(placement)
    assert {attempt.prefill, attempt.decode} == set(table)
    promised = {it.identity: 3 for it in table if it.role is not Role.PREFILL}
    assert {it.identity: it.promised_blocks for it in table if it.promised} == promised
    for each in table:
        table.heartbeat(each.identity, Heartbeat(0, 1, 0), load(), 0.0)
    assert {it.identity: it.promised_blocks for it in table if it.promised} == promised
    placement.on_prefill_done(attempt, 0, 1.0)
    for each in table:
        table.heartbeat(each.identity, Heartbeat(0, 1, 0), load(), 0.0)
        assert not each.promised and not each.promised_blocks


@pytest.mark.parametrize(
    ("others", "reason"), [((), "no_prefill_worker"), ((Role.PREFILL,), "cost")]
)
def test_the_reason_of_a_local_attempt_does_not_count_the_worker_itself(
    others: tuple[Role, ...], reason: str
) -> None:
    table, placement = cluster(Role.ANY, *others)
    for other in table.live[1:]:
        other.num_in_prefill, other.prefill_tokens, other.token_s = 1, 5000, 1.0
    each = state()
    assert placed(placement, each).is_local
    assert each.local_reasons == [reason]


def test_one_token_needs_no_decode_worker() -> None:
    _, placement = cluster(Role.PREFILL)
    assert placement.missing_worker(state(new=0)) is None
    assert "decode" in str(placement.missing_worker(state()))
    _, placement = cluster(Role.DECODE)
    assert "prefill" in str(placement.missing_worker(state(new=0)))
    _, placement = cluster(Role.ANY)
    assert placement.missing_worker(state()) is None


@pytest.mark.parametrize("beats", [True, False])
def test_with_local_prefill_a_prefill_worker_that_joins_is_there(*, beats: bool) -> None:
    table = fleet()
    limits = Limits(local_prefill=True)
    placement = Placement(table, PrefixIndex(), limits=limits, request_ids=RequestIds(EPOCH))
    placement.has_lost_role(0.0)
    peer = Identity(Role.PREFILL, 0, 1).name
    table.hello(peer, Hello(1, 0, Role.PREFILL), detail(), 0.0)
    if beats:
        table.heartbeat(peer, Heartbeat(0, 0, 0), load(), 0.0)
    placement.check_workers(state(new=0), 40.0)
    assert (placement.missing_worker(state(new=0)) is None) == beats
    with pytest.raises(WireError, match="no worker that can decode"):
        placement.check_workers(state(), 40.0)
    table.drain(peer)
    assert "no worker that can decode" in str(placement.missing_worker(state(new=0)))
    with pytest.raises(WireError, match="no worker that can decode"):
        placement.check_workers(state(new=0), 40.0)


@given(st.lists(st.tuples(st.sampled_from(["", "a"]), st.integers(1, 9)), max_size=6))
def test_a_placement_does_not_depend_on_what_is_asked_under_other_salts(
    others: list[tuple[str, int]],
) -> None:
    def salted(salt: str, first_token: int, num_tokens: int) -> RequestState:
        prompt = tuple(range(first_token, first_token + num_tokens))
        return states.state(Request(prompt, Options(cache_salt=salt), 8))

    def place(first_token: int) -> tuple[bytes, bytes, int]:
        """Others send prompts from this token on, then one of tokens 0 to 143 is placed."""
        _, placement = cluster(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
        for salt, num_blocks in others:
            placed(placement, salted(salt, first_token, 16 * num_blocks))
        attempt = placed(placement, salted("mine", 0, 144))
        assert attempt.prefill is not None and attempt.decode is not None
        return attempt.prefill.identity, attempt.decode.identity, attempt.num_to_prefill

    assert place(0) == place(500)
    assert place(0)[2] == 144, "none of it is cached"


def test_requests_that_can_never_be_served_are_refused() -> None:
    _, placement = cluster(Role.PREFILL, Role.DECODE)
    placement.check(state(991))
    for each, code, advice in (
        (state(0), ErrorCode.INVALID_REQUEST, "no tokens"),
        (state(992), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "lower max_tokens"),
        (state(1000), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "shorten the prompt"),
    ):
        with pytest.raises(WireError, match=advice) as caught:
            placement.check(each)
        assert caught.value.code is code
    _, placement = cluster(Role.DECODE)
    placement.has_lost_role(0.0)
    with pytest.raises(WireError, match="no worker that can prefill"):
        placement.check_workers(state(), 30.0)
    placement.check_workers(state(), 29.0)  # it may come back soon


@pytest.mark.parametrize("small", [Role.PREFILL, Role.DECODE])
def test_a_prompt_that_no_worker_has_blocks_for_is_refused_with_the_number(small: Role) -> None:
    table, placement = cluster(*({Role.PREFILL, Role.DECODE} - {small}))
    peer = Identity(small, 9, 1).name
    table.hello(peer, Hello(1, 9, small), detail(num_blocks=3), 0.0)  # of 16 tokens
    placement.check_workers(state(47), 0.0)
    with pytest.raises(
        WireError, match=f"no worker that can {small.name.lower()} .* for 49 tokens"
    ) as caught:
        placement.check_workers(state(48), 0.0)
    assert caught.value.code is ErrorCode.OUT_OF_BLOCKS


@pytest.mark.parametrize("new", [0, 8])
def test_a_prompt_too_large_for_prefill_workers_waits_for_one_that_does_both(new: int) -> None:
    table, placement = cluster(local_prefill=True)
    table.hello(b"prefill-9-1", Hello(1, 9, Role.PREFILL), detail(num_blocks=3), 0.0)
    placement.has_lost_role(0.0)
    with pytest.raises(WireError, match="no worker that can decode"):
        placement.check_workers(state(48, new), 30.0)
    table.hello(b"decode-9-1", Hello(1, 9, Role.DECODE), detail(), 0.0)
    placement.check_workers(state(48, new), 30.0)


def test_logprobs_of_a_prompt_must_fit_a_frame() -> None:
    _, placement = cluster(Role.PREFILL, Role.DECODE)
    asked = state(6000)
    asked.request = structs.replace(asked.request, options=Options(prompt_logprobs=20))
    with pytest.raises(WireError, match="prompt_logprobs 20 of 6000 tokens") as caught:
        placement.check(asked)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("odd", [{"max_model_len": 10}, {"max_kv_transfer_bytes": 64}])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_one_odd_worker_gets_nothing_and_spoils_nothing(role: Role, odd: dict[str, int]) -> None:
    table, placement = cluster(Role.PREFILL, Role.DECODE)
    peer = Identity(role, 9, 1).name
    table.hello(peer, Hello(1, 9, role), detail(**odd), 0.0)
    table.heartbeat(peer, Heartbeat(0, 0, 0), load(), 0.0)
    for _ in range(5):  # more than would make the other one the more loaded
        each = state()
        placement.check(each)
        attempt = placed(placement, each)
        assert attempt.prefill is not None and attempt.decode is not None
        assert peer not in (attempt.prefill.identity, attempt.decode.identity)
    other = {"max_model_len": 2**31 - 1, "max_kv_transfer_bytes": 2**63 - 1}
    table.hello(peer, Hello(1, 9, role), detail(**other), 0.0)
    with pytest.raises(WireError) as caught:
        placement.check(state(990, 100))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_request_without_transfer_ignores_the_transfer_limit() -> None:
    table, placement = cluster()
    peer = Identity(Role.PREFILL, 0, 1).name
    table.hello(peer, Hello(1, 0, Role.PREFILL), detail(max_kv_transfer_bytes=64), 0.0)
    table.heartbeat(peer, Heartbeat(0, 0, 0), load(), 0.0)
    placement.check(state(new=0))
    assert placed(placement, state(new=0)).prefill is table.get(peer)


def test_a_token_that_the_model_lacks_is_refused_before_a_worker_sees_it() -> None:
    table, _ = cluster(Role.PREFILL, Role.DECODE)
    limits = Limits(vocab_size=40)
    placement = Placement(table, PrefixIndex(), limits=limits, request_ids=RequestIds(EPOCH))
    placement.check(state(40))
    with pytest.raises(WireError, match=r"token id 40 .* 0 to 39") as caught:
        placement.check(state(41))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
