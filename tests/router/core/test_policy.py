from __future__ import annotations

from collections.abc import Mapping

import pytest

from router.core.fleet import Worker, WorkerState
from router.core.policy import (
    Choice,
    Prompt,
    can_decode,
    can_ever_fit,
    can_prefill,
    cheapest_decode,
    cheapest_prefill,
    choose,
    prefill_s,
    remote_s,
)
from tests.router.scripted import load, worker
from wire.frames import Role

TOKEN_S, STEP_S, SEQUENCE_S, BYTE_S = 1e-4, 1e-2, 5e-4, 1e-9


def measured(role: Role = Role.DECODE, rank: int = 0, **changes: object) -> Worker:
    """A worker whose costs are known."""
    made = worker(role, rank, **changes)
    made.token_s, made.step_s, made.sequence_s = TOKEN_S, STEP_S, SEQUENCE_S
    made.byte_s = BYTE_S
    return made


def prefills(num: int, **changes: object) -> list[Worker]:
    return [measured(Role.PREFILL, rank, **changes) for rank in range(num)]


def decodes(num: int, **changes: object) -> list[Worker]:
    return [measured(Role.DECODE, rank, **changes) for rank in range(num)]


def measured_any(num: int, **changes: object) -> list[Worker]:
    return [measured(Role.ANY, rank, **changes) for rank in range(num)]


def pick_prefill(workers: list[Worker], prompt: Prompt, max_running: int = 256) -> Worker | None:
    free = [it for it in workers if can_prefill(it, prompt.num_tokens, max_running)]
    return cheapest_prefill(free, prompt)


def pick_decode(workers: list[Worker], prompt: Prompt, max_running: int = 256) -> Worker | None:
    size = prompt.num_tokens, prompt.new_tokens
    free = [it for it in workers if can_decode(it, *size, max_running)]
    return cheapest_decode(free, prompt, remote_s)


def prompt(
    num_tokens: int = 100, held: Mapping[Worker, int] | None = None, **changes: object
) -> Prompt:
    by_identity = {worker.identity: num for worker, num in (held or {}).items()}
    fields: dict[str, object] = {"now": 50.0, "new_tokens": 10, "answer_tokens": 10.0}
    fields |= {"num_tokens": num_tokens, "held": by_identity, "kv_bytes": 1e5}
    return Prompt(**(fields | changes))  # type: ignore[arg-type]


def read(worker: Worker, num_tokens: int, since: float = 50.0) -> None:
    """Let a worker have one more prompt to read."""
    if not worker.num_in_prefill:
        worker.prefill_since = since
    worker.num_active += 1
    worker.num_in_prefill += 1
    worker.prefill_tokens += num_tokens


def test_a_prompt_waits_for_what_is_left_of_those_before_it() -> None:
    busy, lately = prefills(2)
    read(busy, 1000, since=50.0 - 0.09)
    assert prefill_s(busy, prompt(100), 0.0) == pytest.approx(0.01 + 0.01)
    read(lately, 500)
    assert pick_prefill([busy, lately], prompt(100)) is busy
    # A worker that takes longer than expected reads one prompt at most meanwhile.
    read(busy, 1000)
    busy.prefill_since = 0.0
    assert prefill_s(busy, prompt(100), 0.0) == pytest.approx(0.1 + 0.01)


def test_a_held_prefix_is_worth_the_time_to_read_it_and_no_more() -> None:
    holder, other = prefills(2)
    held = {holder: 800}
    assert pick_prefill([other, holder], prompt(1000, held)) is holder
    read(holder, 700)
    assert pick_prefill([other, holder], prompt(1000, held)) is holder
    read(holder, 2000)
    assert pick_prefill([other, holder], prompt(1000, held)) is other


def test_reading_weighs_more_where_many_wait() -> None:
    holder, other = prefills(2)
    held = {holder: 800}
    read(holder, 1500)
    assert pick_prefill([other, holder], prompt(1000, held)) is other
    for _ in range(3):
        other.num_active += 1
        holder.num_active += 1
    assert pick_prefill([other, holder], prompt(1000, held)) is holder


def test_what_is_read_into_a_full_cache_costs_what_it_drives_out() -> None:
    free, full = prefills(2)
    full.on_load(load(64, cached=64))
    assert pick_prefill([full, free], prompt(reuse=2.0)) is free
    assert prefill_s(full, prompt(reuse=2.0), 0.0) == pytest.approx(3 * 100 * TOKEN_S)


def test_an_idle_worker_that_waited_longest_is_next() -> None:
    workers = prefills(3)
    for each, since in zip(workers, (30.0, 10.0, 20.0), strict=True):
        each.prefill_since = since
    assert pick_prefill(workers, prompt()) is workers[1]
    workers[1].state = WorkerState.DRAINING
    assert pick_prefill(workers, prompt()) is workers[2]
    workers[2].num_active = 256
    assert pick_prefill(workers, prompt()) is workers[0]
    assert pick_prefill(workers, prompt(2000)) is None
    assert pick_prefill([], prompt()) is None


def test_a_slow_worker_gets_what_is_quick_there_all_the_same() -> None:
    slow, quick = prefills(2)
    slow.token_s = 4 * TOKEN_S
    assert pick_prefill([slow, quick], prompt(1000, {slow: 700})) is quick
    assert pick_prefill([slow, quick], prompt(1000, {slow: 800})) is slow


def test_kv_is_sent_where_that_costs_less_than_one_more_sequence_there() -> None:
    # The KV of 1000 tokens takes 0.1 s; one sequence more 2 x 10 steps of 0.5 ms.
    busy, idle = workers = decodes(2)
    held = {busy: 900}
    busy.num_active = 8
    assert pick_decode(workers, prompt(1000 - 16, held)) is busy
    busy.num_others = 4
    assert pick_decode(workers, prompt(1000 - 16, held)) is idle


def test_a_hot_prefix_spreads_over_the_workers() -> None:
    workers = decodes(4, num_blocks=4096, max_model_len=4096)
    held = {workers[0]: 1008}
    for _ in range(64):
        chosen = pick_decode(workers, prompt(1024, held, answer_tokens=100.0))
        assert chosen is not None
        chosen.num_active += 1
        held[chosen] = 1008
    counts = [each.num_active for each in workers]
    assert sum(counts) == 64 and max(counts) - min(counts) <= 1


def test_without_measurements_the_least_loaded_worker_is_chosen() -> None:
    first, second, third = workers = [worker(rank=rank) for rank in range(3)]
    first.num_others, second.num_active = 2, 1
    assert pick_decode(workers[:2], prompt()) is second
    second.num_others = 2
    assert pick_decode(workers[:2], prompt()) is first
    assert pick_decode(workers, prompt()) is third
    readers = [worker(Role.PREFILL, rank) for rank in range(2)]
    read(readers[0], 10)
    assert pick_prefill(readers, prompt()) is readers[1]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_among_equals_it_is_the_one_whose_turn_it_is(role: Role) -> None:
    workers = [worker(role, rank) for rank in range(3)]
    workers[0].turn = 1
    pick = pick_prefill if role is Role.PREFILL else pick_decode
    assert pick(workers, prompt()) is workers[1]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_later_attempt_goes_to_workers_that_compute_alike(role: Role) -> None:
    workers = [measured(role, rank, arithmetic="xyy"[rank]) for rank in range(3)]
    workers[1].num_active = 3
    pick = pick_prefill if role is Role.PREFILL else pick_decode
    picked = [pick(workers, prompt(arithmetic=each), 3) for each in ("", "x", "y", "z")]
    assert [each and each.rank for each in picked] == [0, 0, 2, 0]
    workers[2].num_active = 3  # those that compute alike have no room
    assert pick(workers, prompt(arithmetic="y"), 3) is workers[0]


def test_a_prompt_needs_room_for_itself_and_one_token() -> None:
    small = worker(num_blocks=4)
    assert can_ever_fit(small, 63) and not can_ever_fit(small, 64)
    short = worker(max_model_len=50)
    assert can_ever_fit(short, 50) and not can_ever_fit(short, 51)


def test_decode_is_admitted_by_blocks() -> None:
    first, second = workers = decodes(2)
    first.on_load(load(64, used=58))
    assert pick_decode(workers, prompt()) is second
    second.promise(1, 58)
    assert pick_decode(workers, prompt()) is None
    first.on_load(load(64, used=52, cached=6))
    assert pick_decode(workers, prompt()) is first
    assert pick_decode(workers, prompt(new_tokens=None)) is None  # 256 more are assumed.


def test_a_request_larger_than_a_worker_waits_until_it_is_empty() -> None:
    only = worker(num_blocks=8)
    assert pick_decode([only], prompt(new_tokens=100_000)) is only
    only.promise(1, 1)
    assert pick_decode([only], prompt(new_tokens=100_000)) is None


def test_one_token_needs_no_decode_worker() -> None:
    [prefill], [decode] = prefills(1), decodes(1)
    alone = prompt(new_tokens=0, local_prefill=True)
    assert choose([prefill], [decode], alone) == Choice(prefill, None)
    assert choose([prefill], [], alone) == Choice(prefill, None)
    assert choose([], [decode], alone) == Choice(decode, None)


def test_both_workers_need_room() -> None:
    [prefill], [decode] = prefills(1), decodes(1)
    assert choose([prefill], [decode], prompt()) == Choice(prefill, decode)
    assert choose([], [decode], prompt()) is None
    assert choose([prefill], [], prompt(local_prefill=True)) is None


def test_an_idle_decode_worker_reads_what_would_take_long_to_send() -> None:
    [prefill], [decode] = prefills(1), decodes(1)
    local = prompt(500, local_prefill=True)
    assert choose([prefill], [decode], local) == Choice(None, decode)
    assert choose([prefill], [decode], prompt(500)) == Choice(prefill, decode)
    # Each that generates there would wait as long as the reading takes.
    decode.num_active = 2
    assert choose([prefill], [decode], local) == Choice(prefill, decode)
    # Unless it holds most of the prompt, or the prefill worker is busy, or not there.
    held = prompt(500, {decode: 480}, local_prefill=True)
    assert choose([prefill], [decode], held) == Choice(None, decode)
    read(prefill, 5000)
    assert choose([prefill], [decode], local) == Choice(None, decode)
    assert choose([], [decode], local) == Choice(None, decode)


def test_a_worker_of_any_role_is_never_both_workers_of_a_pair() -> None:
    [only], [prefill], [decode] = measured_any(1), prefills(1), decodes(1)
    assert choose([only], [only], prompt()) == Choice(None, only)
    read(only, 5000)
    assert choose([only, prefill], [only], prompt()) == Choice(prefill, only)
    assert choose([only], [only, decode], prompt()) == Choice(only, decode)
    # A second one is chosen where the first is best at both, but may not serve the request alone.
    first, second = measured_any(2)
    asked = prompt(is_decode_asked=False)
    pair = choose([first, second], [first, second], asked)
    assert pair is not None and {pair.prefill, pair.decode} == {first, second}


def test_one_worker_prefills_while_the_number_of_tokens_is_unknown() -> None:
    [only], [decode] = measured_any(1), decodes(1)
    asked = prompt(is_decode_asked=False)
    assert choose([only], [only], asked) == Choice(only, None)
    assert choose([], [decode], asked) is None
    assert choose([], [decode], asked._replace(local_prefill=True)) == Choice(decode, None)


def test_an_idle_worker_prefills_for_one_that_generates() -> None:
    busy, idle = measured_any(2)
    busy.num_active = 8
    choice = choose([busy, idle], [busy, idle], prompt(1000))
    assert choice == Choice(None, idle)
    session = prompt(1000, {busy: 992}, kv_bytes=1e4)
    assert choose([busy, idle], [busy, idle], session) == Choice(busy, idle)
