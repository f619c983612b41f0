"""Pieces of a step together are the step: every token, seen by whom it was, and every row."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import PagedBatch
from kernels.contract import Scratch
from tests.worker.paged import Text, batch_of
from worker.executor.torch import Step
from worker.parallel.microbatches import MIN_TOKENS, in_order, num_microbatches, split

BLOCK_SIZE = 4
NUM_COLUMNS = 9


class Query(NamedTuple):
    """The forward pass's view of one token: the blocks that it sees, and its own slot."""

    token_id: int
    position: int
    slot: int
    num_seen: int
    blocks: tuple[int, ...]


def queries(step: Step) -> list[Query]:
    batch = step.batch
    starts = batch.query_starts.tolist()
    found = []
    for sequence, (start, end) in enumerate(pairwise(starts)):
        for token in range(start, end):
            # The queries of a sequence are the last tokens of its context.
            num_seen = int(batch.context_lens[sequence]) - (end - 1 - token)
            blocks = batch.block_tables[sequence].tolist()
            arrays = step.token_ids, step.positions, batch.slots
            token_id, position, slot = (int(it[token]) for it in arrays)
            seen = tuple(blocks[: -(-num_seen // BLOCK_SIZE)])
            found.append(Query(token_id, position, slot, num_seen, seen))
    return found


def step_of(chunks: list[tuple[Text, int]], rows: list[int], microbatches: int) -> Step:
    batch = batch_of(chunks, BLOCK_SIZE)
    paged = PagedBatch(
        slots=torch.from_numpy(batch.slots),
        query_starts=torch.from_numpy(batch.query_starts),
        context_lens=torch.from_numpy(batch.context_lens),
        block_tables=torch.from_numpy(batch.block_tables),
    )
    token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
    chosen = torch.tensor(rows, dtype=torch.int32)
    windowed = replace(paged, scratch=Scratch())
    return Step(token_ids, positions, chosen, paged, microbatches, windowed=windowed)


@st.composite
def texts(draw: st.DrawFn) -> list[tuple[Text, int]]:
    """Sequences of any length, whose next tokens are the step's, with blocks of their own."""
    lens = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=5))
    blocks = draw(st.permutations(range(NUM_COLUMNS * len(lens))))
    chunks = []
    for number, (computed, count) in enumerate(lens):
        token_ids = draw(st.lists(st.integers(0, 255), min_size=count, max_size=count))
        own = blocks[number * NUM_COLUMNS : (number + 1) * NUM_COLUMNS]
        chunks.append((Text([0] * computed + token_ids, own, computed), count))
    return chunks


@st.composite
def steps(draw: st.DrawFn) -> Step:
    chunks = draw(texts())
    num_tokens = sum(count for _, count in chunks)
    some = st.lists(st.integers(0, num_tokens - 1), unique=True).map(sorted)
    sampled, scored = draw(some), draw(some)
    return step_of(chunks, [*sampled, *scored], draw(st.integers(1, num_tokens)))


@given(steps())
def test_each_token_sees_what_it_saw_in_the_whole_step(step: Step) -> None:
    batch = step.batch
    other = replace(batch, slots=batch.slots + 100, block_tables=batch.block_tables + 25)
    step = step._replace(windowed=other)
    microbatches = split(step)
    in_windows = [it._replace(batch=it.windowed) for it in microbatches if it.windowed is not None]
    assert [it for microbatch in in_windows for it in queries(microbatch)] == queries(
        step._replace(batch=other)
    )
    assert len(microbatches) == step.num_microbatches
    assert [query for microbatch in microbatches for query in queries(microbatch)] == queries(step)
    for microbatch in microbatches:
        starts, lens = microbatch.batch.query_starts, microbatch.batch.context_lens
        assert starts[0] == 0 and starts[-1] == len(microbatch.token_ids) > 0
        assert (starts.diff() > 0).all() and (lens > 0).all()
        assert len(microbatch.batch.block_tables) == len(lens)
        assert all(
            it.dtype == torch.int32 for it in (starts, lens, microbatch.rows, microbatch.token_ids)
        )


@given(steps())
def test_rows_come_in_the_order_of_the_step_those_that_are_scored_last(step: Step) -> None:
    logits, start = [], 0
    for microbatch in split(step):
        logits.append((microbatch.rows + start).float()[:, None].expand(-1, 3))
        start += len(microbatch.token_ids)
    assert in_order(step, logits)[:, 0].int().tolist() == step.rows.tolist()


def test_small_steps_and_those_of_one_stage_or_with_states_are_not_cut() -> None:
    def microbatches(num_tokens: int, num_stages: int) -> int:
        return num_microbatches(num_tokens, num_stages, has_states=False)

    assert [microbatches(tokens, 1) for tokens in (1, 1 << 20)] == [1, 1]
    assert [microbatches(it, 2) for it in (1, 2 * MIN_TOKENS - 1, 2 * MIN_TOKENS)] == [1, 1, 2]
    assert [microbatches(1 << 20, stages) for stages in (2, 3, 8)] == [4, 6, 16]
    assert num_microbatches(1 << 20, 2, has_states=True) == 1
