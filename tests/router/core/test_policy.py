from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet import Worker, WorkerState
from router.core.policy import (
    SEQUENCE_COST,
    PrefixIndex,
    can_ever_fit,
    pick_decode,
    pick_prefill,
)
from tests.router.scripted import load, worker
from wire.frames import Role
from wire.prefix import prefix_hashes

PROMPT = tuple(range(100))


def index_of(workers: list[Worker]) -> PrefixIndex:
    index = PrefixIndex()
    for each in workers:
        index.add(each.identity, each.detail.num_blocks)
    return index


def decode(workers: list[Worker], index: PrefixIndex | None = None, new: int | None = 10) -> int:
    choice = pick_decode(workers, PROMPT, new, index or index_of(workers), 256)
    return -1 if choice is None else choice.worker.rank


def test_prefill_goes_where_the_fewest_prompt_tokens_wait() -> None:
    workers = [worker(Role.PREFILL, rank) for rank in range(3)]
    workers[0].prompt_tokens, workers[1].prompt_tokens, workers[2].prompt_tokens = 10, 5, 5
    workers[1].num_active, workers[2].num_active = 3, 2
    assert pick_prefill(workers, 10, 256) is workers[2]
    workers[2].state = WorkerState.DRAINING
    assert pick_prefill(workers, 10, 256) is workers[1]
    assert pick_prefill(workers, 10, 3) is workers[0]
    assert pick_prefill(workers, 2000, 256) is None
    assert pick_prefill([], 1, 256) is None


def test_a_later_attempt_goes_to_workers_that_compute_alike() -> None:
    prefills = [worker(Role.PREFILL, rank, arithmetic="xyy"[rank]) for rank in range(3)]
    prefills[1].prompt_tokens = prefills[2].prompt_tokens = 100
    assert pick_prefill(prefills, 10, 256) is prefills[0]
    assert pick_prefill(prefills, 10, 256, "y") is prefills[1]
    assert pick_prefill(prefills, 10, 256, "z") is prefills[0]
    decodes = [worker(rank=rank, arithmetic="xyy"[rank]) for rank in range(3)]
    decodes[1].num_active = 3
    index = index_of(decodes)
    picked = [pick_decode(decodes, PROMPT, 10, index, 3, it) for it in ("", "x", "y", "z")]
    assert [choice and choice.worker.rank for choice in picked] == [0, 0, 2, 0]
    decodes[2].num_active = 3  # those that compute alike have no room
    choice = pick_decode(decodes, PROMPT, 10, index, 3, "y")
    assert choice is not None and choice.worker is decodes[0]


def test_a_prompt_needs_room_for_itself_and_one_token() -> None:
    small = worker(num_blocks=4)
    assert can_ever_fit(small, 63) and not can_ever_fit(small, 64)
    short = worker(max_model_len=50)
    assert can_ever_fit(short, 50) and not can_ever_fit(short, 51)


def test_load_outweighs_a_held_prefix() -> None:
    workers = [worker(rank=rank) for rank in range(2)]
    index = index_of(workers)
    index.store(workers[1].identity, prefix_hashes(PROMPT, 16))
    workers[1].num_active = 1
    assert SEQUENCE_COST > 96
    assert decode(workers, index) == 0


def test_a_hot_prefix_spreads_over_the_workers() -> None:
    workers = [worker(rank=rank, num_blocks=4096, max_model_len=4096) for rank in range(4)]
    index = index_of(workers)
    prompt = tuple(range(1024))
    for _ in range(64):
        choice = pick_decode(workers, prompt, 8, index, 256)
        assert choice is not None
        choice.worker.num_active += 1
        index.store(choice.worker.identity, choice.hashes)
    counts = [each.num_active for each in workers]
    assert sum(counts) == 64 and max(counts) - min(counts) <= 8


def test_workers_may_differ_in_block_size() -> None:
    workers = [worker(rank=0, block_size=16), worker(rank=1, block_size=32, num_blocks=32)]
    index = index_of(workers)
    index.store(workers[1].identity, prefix_hashes(PROMPT, 32))
    choice = pick_decode(workers, PROMPT, 10, index, 256)
    assert choice is not None and (choice.worker.rank, choice.num_blocks) == (1, 4)


def test_decode_is_admitted_by_blocks() -> None:
    workers = [worker(rank=0), worker(rank=1)]
    workers[0].on_load(load(64, used=58))
    assert decode(workers) == 1
    workers[1].promise(1, 58)
    assert decode(workers) == -1
    workers[0].on_load(load(64, used=52, cached=6))
    assert decode(workers) == 0
    assert decode(workers, new=None) == -1  # 256 more are assumed.


def test_a_request_larger_than_a_worker_waits_until_it_is_empty() -> None:
    only = worker(num_blocks=8)
    assert decode([only], new=100_000) == 0
    only.promise(1, 1)
    assert decode([only], new=100_000) == -1


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 50), max_size=20)), max_size=30))
def test_no_worker_is_taken_to_hold_more_than_it_has_blocks(
    steps: list[tuple[bool, list[int]]],
) -> None:
    index = PrefixIndex()
    index.add(b"d", 7)
    for is_stored, hashes in steps:
        if is_stored:
            index.store(b"d", hashes)
            if len(set(hashes)) == len(hashes):
                assert index.longest(b"d", hashes) == min(7, len(hashes))
        else:
            index.evict(b"d", hashes)
            assert not hashes or index.longest(b"d", hashes) == 0
        assert index.size(b"d") <= 7


def test_decode_counts_what_other_routers_placed() -> None:
    workers = [worker(rank=rank) for rank in range(3)]
    workers[0].num_others, workers[1].num_active = 2, 1
    assert decode(workers[:2]) == 1
    workers[1].num_others = 2
    assert decode(workers[:2]) == 0
    assert decode(workers) == 2


def test_among_equals_it_is_the_one_whose_turn_it_is() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        workers = [worker(role, rank) for rank in range(3)]
        workers[0].turn = 1
        if role is Role.DECODE:
            assert decode(workers) == 1
        else:
            assert pick_prefill(workers, 10, 256) is workers[1]
