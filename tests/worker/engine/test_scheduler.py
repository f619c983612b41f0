"""The policy, without any engine: plans are objects one can read."""

from typing import Any

import pytest

from wire.options import Options
from worker.engine.batch import Chunk
from worker.engine.blocks import BlockPool
from worker.engine.scheduler import Plan, Scheduler
from worker.engine.sequence import Sequence, Status
from worker.engine.settings import EngineSettings
from worker.engine.swap import SwapSpace
from worker.engine.windows import Windows
from worker.executor.batch import BatchType
from worker.executor.hash import HashKVCache


class Queue:
    """A scheduler, and just enough of an engine to carry its plans out."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        swap_bytes: int = 0,
        enough_tokens: int | None = None,
        windows: Windows | None = None,
        **config: int | bool,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, windows=windows)
        cache = HashKVCache(num_blocks, block_size)
        self.swap = SwapSpace(cache, swap_bytes)
        batch_config = EngineSettings(**config)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.pool, batch_config, self.swap, enough_tokens)
        self.now = 0.0
        self.sequences: dict[int, Sequence] = {}

    def add(
        self,
        request_id: int,
        num_tokens: int,
        priority: int = 0,
        *,
        transfer: bool = False,
        deadline_ms: int | None = None,
        like: int | None = None,
        tenant: int = 0,
        salt: str = "",
    ) -> Sequence:
        """Queue a prompt; it begins as those that are `like` the same request."""
        return self.enqueue(
            Sequence(
                request_id,
                self._prompt(request_id if like is None else like, num_tokens),
                Options(priority=priority, deadline_ms=deadline_ms, tenant=tenant, cache_salt=salt),
                transfer=transfer,
            )
        )

    def reserve(
        self,
        request_id: int,
        num_tokens: int,
        *,
        is_claimed: bool = True,
        peer: str = "prefill-0-1",
    ) -> Sequence:
        """Queue for KV, by default what a router has asked for."""
        prompt = self._prompt(request_id, num_tokens)
        sequence = Sequence(request_id, prompt, offered_by=peer, status=Status.RESERVING)
        sequence.is_claimed = is_claimed
        return self.enqueue(sequence)

    def _prompt(self, request_id: int, num_tokens: int) -> list[int]:
        return [1000 * request_id + index for index in range(num_tokens)]

    def enqueue(self, sequence: Sequence) -> Sequence:
        sequence.arrive(len(self.sequences), self.now)
        self.sequences[sequence.request_id] = sequence
        self.scheduler.enqueue(sequence)
        return sequence

    def begin(self, sequence: Sequence) -> None:
        sequence.resume([*sequence.token_ids, 7], Options(), None)
        self.scheduler.run(sequence)

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        self.swap.carry_out(plan.swapped_out)
        self.swap.carry_in(plan.swapped_in)
        for chunk in plan.chunks:
            chunk.sequence.look_ahead(chunk.num_rows, self.pool)
        for chunk in plan.chunks:
            sequence, num_tokens = chunk.sequence, chunk.num_tokens
            sequence.num_computed_tokens += num_tokens
            sequence.register(self.pool)
            sequence.look_ahead(0, self.pool)
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(7)
        self.pool.check([s.block_table for s in self.sequences.values()])
        self.pool.audit()
        if self.pool.windows is not None:
            sequences = self.sequences.values()
            reached = (s.reached for s in sequences)
            self.pool.windows.check(reached, (len(s.block_table) for s in sequences))
        return plan


def sizes(plan: Plan) -> tuple[list[int], list[tuple[int, int]]]:
    return (
        [chunk.sequence.request_id for chunk in plan.decode],
        [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan.prefill],
    )


def test_a_prompt_is_read_in_chunks_then_generates() -> None:
    queue = Queue(max_ubatch_tokens=5)
    queue.add(1, 12)
    plans = [queue.step() for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [
        ([], [(1, 5)]),
        ([], [(1, 5)]),
        ([], [(1, 2)]),
        ([1], []),
    ]
    assert [plan.kind for plan in plans] == [BatchType.PREFILL] * 3 + [BatchType.DECODE]
    assert [plan.num_tokens for plan in plans] == [5, 5, 2, 1]
    assert [len(plan.started) for plan in plans] == [1, 0, 0, 0]


def test_generation_goes_first_and_prompts_fill_the_budget() -> None:
    queue = Queue(max_ubatch_tokens=6)
    queue.add(1, 3)
    queue.step()
    queue.add(2, 4)
    queue.add(3, 9)
    plan = queue.step()
    assert sizes(plan) == ([1], [(2, 4), (3, 1)]) and plan.kind is BatchType.MIXED
    assert sizes(queue.step()) == ([1, 2], [(3, 4)])


def test_no_prompt_begins_in_a_step_that_has_enough_of_them() -> None:
    queue = Queue(max_ubatch_tokens=40, enough_tokens=12)
    for request_id in (1, 2, 3, 4):
        queue.add(request_id, 6)
    # The second makes it enough; the others are read in a step that answers the first two sooner.
    assert sizes(queue.step()) == ([], [(1, 6), (2, 6)])
    assert sizes(queue.step()) == ([1, 2], [(3, 6), (4, 6)])
    # A long one takes all there is, whatever is enough.
    queue.add(5, 60)
    queue.add(6, 6)
    assert sizes(queue.step()) == ([1, 2, 3, 4], [(5, 36)])
    assert sizes(queue.step()) == ([1, 2, 3, 4], [(5, 24)])
    assert sizes(queue.step()) == ([1, 2, 3, 4, 5], [(6, 6)])


def test_a_static_batch_begins_whole_however_much_is_enough() -> None:
    queue = Queue(max_ubatch_tokens=40, enough_tokens=10, dynamic_batching=False)
    for request_id in (1, 2, 3):
        queue.add(request_id, 10)
    assert sizes(queue.step()) == ([], [(1, 10), (2, 10), (3, 10)])


def test_no_more_sequences_run_than_allowed() -> None:
    queue = Queue(max_sbatch_sequences=2)
    for request_id in range(4):
        queue.add(request_id, 2)
    assert sizes(queue.step())[1] == [(0, 2), (1, 2)]
    queue.scheduler.finish(queue.sequences[0])
    assert sizes(queue.step()) == ([1], [(2, 2)])


def test_generation_never_fills_the_budget_so_that_a_prompt_starves() -> None:
    queue = Queue(max_ubatch_tokens=2, max_sbatch_sequences=8)
    for request_id in range(3):
        queue.add(request_id, 4)
    for _ in range(6):
        queue.step()
    assert [s.request_id for s in queue.scheduler.running] == [0, 1]
    assert all(s.is_decoding for s in queue.scheduler.running)


def test_higher_priority_first_then_first_come() -> None:
    queue = Queue(max_sbatch_sequences=1)
    for request_id, priority in ((1, 0), (2, 5), (3, 5), (4, -5)):
        queue.add(request_id, 2, priority)
    started = []
    for _ in range(4):
        (sequence,) = queue.step().started
        started.append(sequence.request_id)
        queue.scheduler.finish(sequence)
    assert started == [2, 3, 1, 4]


def test_the_last_in_order_is_preempted_and_comes_back_first() -> None:
    queue = Queue(num_blocks=4)
    queue.add(1, 8)
    queue.add(2, 8)
    queue.step()
    queue.add(3, 1)
    plan = queue.step()  # both need a third block, there are none
    assert [s.request_id for s in plan.preempted] == [2]
    assert sizes(plan) == ([1], []) and not plan.started
    assert [s.request_id for s in queue.scheduler.waiting] == [2, 3]
    queue.scheduler.finish(queue.sequences[1])
    plan = queue.step()
    assert sizes(plan)[1][0] == (2, 5), "its first block is still in the prefix cache"
    assert [s.request_id for s in plan.started] == [3]


def test_a_transfer_is_never_preempted() -> None:
    queue = Queue(num_blocks=4, max_ubatch_tokens=8)
    queue.add(1, 8)
    queue.step()
    queue.add(2, 8, transfer=True)
    plan = queue.step()
    assert [s.request_id for s in plan.preempted] == [] and sizes(plan)[0] == [1]
    assert not plan.started  # 1 took the third block
    queue.scheduler.finish(queue.sequences[1])
    queue.step()
    assert queue.sequences[2].status is Status.RUNNING
    queue.add(3, 8)
    for _ in range(3):
        queue.step()
    assert queue.sequences[2].status is Status.RUNNING
    assert queue.sequences[2].num_preemptions == 0


def test_a_sequence_that_outgrows_the_empty_pool_is_failed() -> None:
    queue = Queue(num_blocks=2)
    sequence = queue.add(1, 8)
    queue.step()
    plan = queue.step()
    assert plan.failed == [sequence] and sequence.status is Status.FINISHED
    assert queue.pool.num_used == 0


def test_a_reservation_goes_ahead_of_new_work_whatever_its_priority() -> None:
    queue = Queue(num_blocks=4)
    holder = queue.add(1, 12)
    queue.step()
    queue.add(2, 4, priority=9)
    reservation = queue.reserve(3, 8)
    assert queue.step().reserved == []
    queue.scheduler.finish(holder)
    plan = queue.step()
    assert plan.reserved == [reservation]
    assert len(reservation.block_table) == 3, "8 tokens and room for one more"
    assert [s.request_id for s in plan.started] == [2]


def test_unclaimed_kv_gives_way_to_what_was_asked_for() -> None:
    queue = Queue(num_blocks=8)
    large = queue.reserve(1, 20, is_claimed=False)
    assert queue.step().reserved == [large]
    asked = queue.reserve(2, 15)
    assert queue.step().displaced == [1]
    assert queue.step().displaced == [], "it is said once"
    queue.scheduler.finish(large)
    assert queue.step().reserved == [asked]


def test_pure_batches_alternate_while_there_are_prompts() -> None:
    queue = Queue(max_ubatch_tokens=4, prefer_pure_decode=True)
    queue.add(1, 3)
    queue.step()
    queue.add(2, 8)
    kinds = [queue.step().kind for _ in range(5)]
    assert kinds == [
        BatchType.DECODE,
        BatchType.PREFILL,
        BatchType.DECODE,
        BatchType.PREFILL,
        BatchType.DECODE,
    ]
    assert sizes(queue.step()) == ([1, 2], [])


def test_static_batches_start_when_the_last_has_ended() -> None:
    queue = Queue(dynamic_batching=False)
    queue.add(1, 2)
    queue.add(2, 2)
    assert len(queue.step().started) == 2
    queue.add(3, 2)
    queue.scheduler.finish(queue.sequences[1])
    assert not queue.step().started
    queue.scheduler.finish(queue.sequences[2])
    assert len(queue.step().started) == 1


# Ageing.


def test_waiting_ages_into_priority() -> None:
    queue = Queue(max_sbatch_sequences=1, ageing_s=2)
    queue.add(1, 2)
    queue.step()
    queue.add(2, 2, priority=0)
    queue.now = 9.0
    queue.add(3, 2, priority=5)  # stands as if it had come 10 s earlier
    queue.now = 11.0
    queue.add(4, 2, priority=5)
    order = []
    for request_id in (1, 3, 2):
        queue.scheduler.finish(queue.sequences[request_id])
        order += [sequence.request_id for sequence in queue.step().started]
    assert order == [3, 2, 4]


def test_reservations_pass_new_work_for_a_bounded_time() -> None:
    queue = Queue(num_blocks=4, ageing_s=1)
    holder = queue.reserve(0, 4)
    queue.step()
    queue.add(1, 12)
    for request_id in range(2, 400):
        queue.now = float(request_id)
        queue.reserve(request_id, 4)
        plan = queue.step()
        if not plan.reserved:
            assert request_id >= 101, "the new work goes first from now on"
            queue.scheduler.finish(holder)
            assert [s.request_id for s in queue.step().started] == [1]
            return
        queue.scheduler.finish(holder)
        (holder,) = plan.reserved
    raise AssertionError("the new work starved")


# Tenants.


def test_the_prompt_of_another_tenant_is_read_in_the_next_step() -> None:
    queue = Queue(max_ubatch_tokens=8)
    for request_id in range(1, 6):
        queue.add(request_id, 12, tenant=1)
    queue.step()
    queue.add(9, 3, priority=-100, tenant=2)
    assert sizes(queue.step()) == ([], [(1, 4), (2, 1), (9, 3)])


# Deadlines.


def test_an_overdue_sequence_leaves_in_any_state() -> None:
    queue = Queue(num_blocks=3)
    running = queue.add(1, 8, deadline_ms=1000)
    queue.step()
    waiting = queue.add(2, 8, deadline_ms=500)
    assert queue.step().overdue == []
    queue.now = 0.5
    assert queue.step().overdue == [waiting]
    queue.now = 1.0
    plan = queue.step()
    assert plan.overdue == [running] and not plan.chunks
    assert running.status is waiting.status is Status.FINISHED
    assert queue.pool.num_used == 0 and queue.scheduler.deadlines.next_s is None


# Swap.


def swapping(num_blocks: int = 4, **config: Any) -> Queue:
    queue = Queue(num_blocks=num_blocks, swap_bytes=1 << 20, **config)
    queue.swap.costs.copy_bytes_per_s = 1e12
    return queue


def test_a_preempted_sequence_is_swapped_and_goes_on_where_it_was() -> None:
    queue = swapping()
    first, second = queue.add(1, 8), queue.add(2, 8)
    queue.step()
    plan = queue.step()
    assert plan.preempted == [second]
    assert [(s.sequence, s.token_start, s.num_tokens) for s in plan.swapped_out] == [(second, 0, 8)]
    queue.scheduler.finish(first)
    plan = queue.step()
    assert [(s.sequence, s.token_start, s.num_tokens) for s in plan.swapped_in] == [(second, 4, 4)]
    assert sizes(plan) == ([2], []), "its first block was still cached, nothing is computed again"
    assert len(queue.swap) == 0 and second.num_computed_tokens == 9


def test_prompts_with_one_prefix_compute_it_once() -> None:
    queue = Queue(max_ubatch_tokens=64)
    for request_id, num_tokens in ((1, 9), (2, 9), (3, 14)):
        queue.add(request_id, num_tokens, like=0)
    assert sizes(queue.step()) == ([], [(1, 9)])
    assert sizes(queue.step()) == ([1], [(2, 1), (3, 6)])
    assert [queue.sequences[i].num_cached_tokens for i in (1, 2, 3)] == [0, 8, 8]


def test_only_prompts_with_one_salt_share_a_prefix() -> None:
    queue = Queue(max_ubatch_tokens=64)
    for request_id, salt in enumerate(("a", "a", "", "", "b"), 1):
        queue.add(request_id, 9, like=0, salt=salt)
    assert sizes(queue.step()) == ([], [(1, 9), (3, 9), (5, 9)])
    assert sizes(queue.step()) == ([1, 3, 5], [(2, 1), (4, 1)])
    assert [queue.sequences[i].num_cached_tokens for i in range(1, 6)] == [0, 8, 0, 8, 0]
    assert len({queue.sequences[i].block_table[0] for i in range(1, 6)}) == 3


@pytest.mark.parametrize("num_tokens", [3, 4])
def test_prompts_do_not_wait_for_a_block_that_is_not_full_or_not_shared(num_tokens: int) -> None:
    queue = Queue(max_ubatch_tokens=64)
    queue.add(1, num_tokens, like=0)
    queue.add(2, num_tokens, like=0)
    assert sizes(queue.step()) == ([], [(1, num_tokens), (2, num_tokens)])


SEQUENCE = Sequence(1, range(9))


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "max_ubatch_tokens", "is_mostly"),
    [
        (0, 32, 64, True),
        (32, 32, 64, True),
        (0, 31, 64, False),  # small
        (300, 256, 1024, False),  # most of it generates
        (0, 256, 1024, True),  # large enough, though the budget is larger
        (0, 1, 1, True),
    ],
)
def test_only_large_steps_are_mostly_prefill(
    num_decode: int, num_prefill: int, max_ubatch_tokens: int, is_mostly: bool
) -> None:
    long = Sequence(2, range(num_prefill))
    plan = Plan([Chunk(SEQUENCE, 1)] * num_decode, [Chunk(long, num_prefill)])
    assert plan.num_prefill_tokens == num_prefill
    assert plan.is_mostly_prefill(max_ubatch_tokens) is is_mostly


def test_there_is_a_block_for_each_that_runs() -> None:
    queue = Queue(num_blocks=5, block_size=4)
    assert queue.scheduler.has_block_for_each()
    queue.add(1, 4)
    queue.add(2, 4)
    queue.step()
    assert queue.scheduler.has_block_for_each(), "three blocks are left for two"
    queue.add(3, 4)
    queue.step()
    assert not queue.scheduler.has_block_for_each(), "none is left for the third"
    queue.scheduler.finish(queue.sequences[2])
    assert queue.scheduler.has_block_for_each()
    queue.sequences[3].token_ids += [7] * 9
    assert not queue.scheduler.has_block_for_each(), "two are left, and it lacks three"
