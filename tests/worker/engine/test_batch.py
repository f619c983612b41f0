"""One step's tokens side by side: every array against a plain loop."""

from wire.options import Options
from worker.engine.batch import Chunk, build
from worker.engine.sequence import Sequence
from worker.executor.batch import BatchType


def sequence(request_id: int, num_tokens: int, computed: int, blocks: list[int]) -> Sequence:
    result = Sequence(
        request_id, [100 * request_id + i for i in range(num_tokens)], Options(seed=request_id)
    )
    result.num_computed_tokens = computed
    result.block_table.extend(blocks)
    return result


CHUNKS = [
    Chunk(sequence(1, 6, 5, [9, 2]), 1),
    Chunk(sequence(2, 13, 2, [4, 7, 3, 8]), 7),
    Chunk(sequence(3, 3, 0, [5]), 3),
]


def test_the_arrays_say_what_a_plain_loop_says() -> None:
    batch = build(BatchType.MIXED, CHUNKS, 4)
    token_ids, positions, slots = [], [], []
    for chunk in CHUNKS:
        start = chunk.sequence.num_computed_tokens
        for position in range(start, start + chunk.num_tokens):
            token_ids.append(chunk.sequence.token_ids[position])
            positions.append(position)
            block = chunk.sequence.block_table[position // 4]
            slots.append(block * 4 + position % 4)
    assert batch.kind is BatchType.MIXED
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.query_starts.tolist() == [0, 1, 8, 11]
    assert batch.context_lens.tolist() == [6, 9, 3]
    assert batch.block_tables.tolist() == [[9, 2, 0, 0], [4, 7, 3, 8], [5, 0, 0, 0]]


def test_only_sequences_that_are_complete_are_sampled() -> None:
    batch = build(BatchType.MIXED, CHUNKS, 4)
    assert batch.sample_rows.tolist() == [0, 10]
    first, last = batch.samplings
    assert (first.request_id, first.position, first.prompt_len) == (1, 6, 6)
    assert (last.request_id, last.options.seed, last.token_ids) == (3, 3, [300, 301, 302])


def test_drafts_follow_their_sequence_and_are_sampled_with_it() -> None:
    chunks = [Chunk(sequence(1, 6, 5, [9, 2, 6]), 1, (71, 72)), CHUNKS[1], CHUNKS[2]]
    batch = build(BatchType.MIXED, chunks, 4)
    assert batch.token_ids.tolist()[:3] == [105, 71, 72]
    assert batch.positions.tolist()[:3] == [5, 6, 7] and batch.slots.tolist()[:3] == [9, 10, 11]
    assert batch.query_starts.tolist() == [0, 3, 10, 13]
    assert batch.context_lens.tolist() == [8, 9, 3]
    assert batch.sample_rows.tolist() == [0, 1, 2, 12]
    first, _ = batch.samplings
    assert first.token_ids == [100 + i for i in range(6)] and first.drafts == (71, 72)
