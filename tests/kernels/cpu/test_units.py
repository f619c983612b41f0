"""How a step is cut into units; `test_operators` has what they compute."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract import PagedBatch
from kernels.cpu.program import Program
from kernels.cpu.units import COUNT, MAX_ROWS, Units
from tests.kernels.scenes import scene


def cut(batch: PagedBatch, shared: int) -> list[list[int]]:
    units = Units(shared)
    units.set(batch)
    Program([units.cut()]).run()
    return units.memory[: units.words[COUNT]].tolist()  # type: ignore[no-any-return]


def test_the_longest_unit_comes_first() -> None:
    units = cut(scene([(5, 1), (150, 130), (90, 1)]).batch, 2)
    assert units[0] == [1, 1 + 48, 48, 20 + 48]
    whole = [[0, 0, 1, 4], [2, 131, 1, 89]]
    pieces = [[1, 1, 48, 20], [1, 49, 48, 68], [1, 97, 34, 116]]
    assert sorted(units) == sorted(whole + pieces)
    costs = [(position + count) * count for _, _, count, position in units]
    assert costs == sorted(costs, reverse=True)


@settings(deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 120)), min_size=1, max_size=4),
    shared=st.integers(1, 120),
)
def test_every_query_is_in_one_unit(lens: list[tuple[int, int]], shared: int) -> None:
    batch = scene([(past + new, new) for past, new in lens], head_dim=2, num_kv_heads=1).batch
    covered: list[int] = []
    for sequence, token, count, position in cut(batch, shared):
        assert count * shared <= MAX_ROWS or count == 1
        first = int(batch.query_starts[sequence])
        assert position - lens[sequence][0] == token - first
        covered += range(token, token + count)
    assert sorted(covered) == list(range(int(batch.query_starts[-1])))
