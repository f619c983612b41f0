"""How a step is cut into work items."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernels import PagedBatch
from kernels.cpu.program import Program
from kernels.cpu.work_items import MAX_ROWS, WorkItems
from tests.kernels.scenes import scene


def cut(batch: PagedBatch, shared: int) -> list[tuple[int, ...]]:
    """Return (sequence, first token, queries, position of the first) of each item."""
    items = WorkItems(shared)
    items.set(batch)
    Program([items.plan()]).run()
    return items.items.tolist()  # type: ignore[no-any-return]


def test_the_longest_item_comes_first() -> None:
    items = cut(scene([(5, 1), (270, 250), (90, 1)]).batch, 2)
    assert items[0] == (1, 1 + 96, 96, 20 + 96)
    whole = [(0, 0, 1, 4), (2, 251, 1, 89)]
    parts = [(1, 1, 96, 20), (1, 97, 96, 116), (1, 193, 58, 212)]
    assert sorted(items) == sorted(whole + parts)
    costs = [(position + count) * count for _, _, count, position in items]
    assert costs == sorted(costs, reverse=True)


@given(
    lens=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 120)), min_size=1, max_size=4),
    shared=st.integers(1, 120),
)
def test_every_query_is_in_one_item(lens: list[tuple[int, int]], shared: int) -> None:
    batch = scene([(past + new, new) for past, new in lens], head_dim=2, num_kv_heads=1).batch
    covered: list[int] = []
    for sequence, token, count, position in cut(batch, shared):
        assert count * shared <= MAX_ROWS or count == 1
        first = int(batch.query_starts[sequence])
        assert position - lens[sequence][0] == token - first
        covered += range(token, token + count)
    assert sorted(covered) == list(range(int(batch.query_starts[-1])))
