"""What a step's tokens change, case by case; whole texts are in `test_engine.py`."""

from __future__ import annotations

from wire.options import Options
from worker.engine.batch import Chunk
from worker.engine.blocks import BlockPool
from worker.engine.commit import commit
from worker.engine.outputs import Computed, Output, Token
from worker.engine.sequence import Sequence, Status
from worker.engine.stats import Counters
from worker.executor.contract import SampledToken

IGNORE_EOS = Options(ignore_eos=True)


class Step:
    """A pool with blocks of 4, and what `commit` made of a step."""

    def __init__(self) -> None:
        self.pool = BlockPool(16, 4)
        self.counters = Counters()
        self.outputs: list[Output] = []
        self.ended: list[Sequence] = []

    def sequence(
        self, num_tokens: int, computed: int, limit: int = 50, *, transfer: bool = False
    ) -> Sequence:
        prompt = list(range(num_tokens))
        it = Sequence(1, prompt, IGNORE_EOS, limit, transfer=transfer, status=Status.RUNNING)
        it.block_table.extend(self.pool.allocate(4))
        it.num_computed_tokens = computed
        return it

    def commit(self, chunk: Chunk, *token_ids: int) -> list[int]:
        """Return the ids of the tokens told."""
        drawn = [SampledToken(token_id) for token_id in token_ids]
        self.outputs, self.ended = commit([chunk], drawn, self.pool, self.counters)
        return [it.token_id for it in self.outputs if isinstance(it, Token)]


def test_a_chunk_in_the_middle_of_a_prompt_has_kv_and_no_token() -> None:
    step = Step()
    sequence = step.sequence(12, 0)
    assert step.commit(Chunk(sequence, 9)) == [] and step.outputs == []
    assert sequence.num_computed_tokens == 9 and sequence.num_registered_blocks == 2


def test_a_transfer_says_how_far_it_is_and_ends_with_its_token() -> None:
    step = Step()
    sequence = step.sequence(6, 4, transfer=True)
    assert step.commit(Chunk(sequence, 2), 7) == [7]
    assert step.outputs[0] == Computed(1, 6) and step.ended == [sequence]


def test_accepted_drafts_have_kv_and_the_rest_gives_back_its_blocks() -> None:
    step = Step()
    sequence = step.sequence(7, 6)
    sequence.drafts = (50, 51, 52, 53, 54, 55)
    assert step.commit(Chunk(sequence, 1, sequence.drafts), 50, 51, 9, 9, 9, 9, 9) == [50, 51, 9]
    assert sequence.num_computed_tokens == 9 and sequence.num_tokens == 10
    assert sequence.num_registered_blocks == 2 and len(sequence.block_table) == 3
    assert not sequence.drafts and sequence.draft_window == 3
    counters = step.counters
    assert (counters.decode_tokens, counters.drafted_tokens, counters.accepted_tokens) == (3, 6, 2)


def test_nothing_follows_the_last_token_though_drafts_were_right() -> None:
    step = Step()
    sequence = step.sequence(7, 6, limit=2)
    assert step.commit(Chunk(sequence, 1, (50, 51)), 50, 51, 52) == [50, 51]
    last = step.outputs[-1]
    assert isinstance(last, Token) and last.finish_reason == "length"
    assert step.ended == [sequence] and sequence.num_computed_tokens == 8
    assert sequence.num_registered_blocks == 2, "the next request finds the drafts' KV as well"
