"""KV for other workers takes half of the blocks at most, where KV of others comes in."""

from __future__ import annotations

import pytest

from worker.engine.blocks import BlockPool
from worker.engine.engine import Engine
from worker.engine.outgoing import Outgoing
from worker.engine.outputs import Started
from worker.engine.sequence import Sequence
from worker.executor.hash import create

OTHERS = range(100, 140)


def sequence(request_id: int, num_tokens: int, *, transfer: bool = True) -> Sequence:
    token_ids = [request_id, *OTHERS][:num_tokens]
    return Sequence(request_id, token_ids, transfer=transfer)


def test_one_sequence_may_hold_more_than_the_part() -> None:
    pool = BlockPool(8, 4)
    outgoing = Outgoing(pool, receives_kv=True)
    large = sequence(1, 32)
    assert outgoing.has_room(large)
    large.block_table.extend(pool.allocate(8))
    outgoing.add(large)
    assert not outgoing.has_room(sequence(2, 1))
    assert outgoing.has_room(sequence(3, 32, transfer=False))
    outgoing.discard(large)
    assert outgoing.has_room(sequence(2, 1))


@pytest.mark.parametrize(
    ("receives_kv", "started"), [(True, [[1, 4], [2], [3]]), (False, [[1, 2, 3, 4], [], []])]
)
def test_transfers_start_in_order_and_others_pass(
    *, receives_kv: bool, started: list[list[int]]
) -> None:
    """Of 16 blocks the first needs 4, the second 8 and the third 1; the fourth stays here."""
    engine = Engine(create(), num_blocks=16, block_size=4, receives_kv=receives_kv)
    for request_id, num_tokens in ((1, 16), (2, 32), (3, 4)):
        engine.add(sequence(request_id, num_tokens))
    engine.add(sequence(4, 4, transfer=False))
    for request_id, expected in zip((1, 2, 3), started, strict=True):
        found = [it.request_id for it in engine.step() if isinstance(it, Started)]
        assert found == expected
        engine.release(request_id)
    for request_id in (1, 2, 3, 4):
        engine.cancel(request_id)
    engine.check()
