"""The plan of a step is the same plan with room: what is not there is marked or spare."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels import PagedBatch
from kernels.cuda.launch import OnDevice
from kernels.cuda.pinned import put
from kernels.cuda.plan import NOTHING, FixedPlan
from kernels.cuda.tiling import Gpu
from tests.kernels.shim.copies import LateCopies

NUM_SEQUENCES, COLUMNS, SPARE, BLOCK_SIZE = 6, 64, 9, 16


def batch_of(lens: list[int]) -> PagedBatch:
    count = len(lens)
    return PagedBatch(
        slots=torch.arange(count, dtype=torch.int32),
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=torch.arange(count * 3, dtype=torch.int32).view(count, 3),
    )


@given(
    steps=st.lists(
        st.lists(st.integers(1, 1000), min_size=1, max_size=NUM_SEQUENCES), min_size=1, max_size=3
    ),
    group=st.integers(1, 150),  # many heads share one: they are several tiles
    wanted=st.integers(1, 100),
)
@example(steps=[[5] * NUM_SEQUENCES], group=150, wanted=1)  # items are tiles alone
def test_every_step_fits_its_room(steps: list[list[int]], group: int, wanted: int) -> None:
    pool = torch.zeros(10, 1, 2, 2, BLOCK_SIZE, 64, dtype=torch.bfloat16)
    windows = (None, 100)
    plan = FixedPlan(
        pool,
        NUM_SEQUENCES,
        COLUMNS,
        2 * group,
        windows,
        spare_block=SPARE,
        gpu=Gpu(wanted, 100 << 10),
    )
    held = plan.batch.scratch.of(OnDevice)
    pointers = {name: it.data_ptr() for name, it in held.tensors.items()}
    for lens in steps:
        put(plan.tables(batch_of(lens)))
        count = len(lens)
        assert held.tensors["contexts"].tolist() == lens + [1] * (NUM_SEQUENCES - count)
        slots = held.tensors["slots"].tolist()
        assert slots == [*range(count), *[SPARE * BLOCK_SIZE] * (NUM_SEQUENCES - count)]
        tables = held.tensors["tables"]
        assert tables[:count, :3].flatten().tolist() == list(range(3 * count))
        assert (tables[count:, 0] == SPARE).all()
        for window in windows:
            ((_, _, items, parts, tickets),) = held.works[window, 2 * group]
            rows = items[items[:, 0] != NOTHING].tolist()
            covered = {
                i: sum(r[3] - r[2] for r in rows if r[0] == i and r[1] == 0) for i in range(6)
            }
            for index, length in enumerate(lens):
                assert covered[index] == (min(length, window) if window else length)
            used = [row[4] for row in rows if row[4] != NOTHING]
            assert sorted(used) == list(range(len(used)))
            assert not used or (max(used) + 1) * 2 <= len(parts) == len(tickets)
            assert not tickets.any()
    assert pointers == {name: held.tensors[name].data_ptr() for name in pointers}


def test_a_step_reads_its_own_tables_though_the_next_has_been_planned() -> None:
    pool = torch.zeros(10, 1, 2, 2, BLOCK_SIZE, 64, dtype=torch.bfloat16)
    gpu = Gpu(20, 100 << 10)
    plan = FixedPlan(pool, NUM_SEQUENCES, COLUMNS, 8, (None,), spare_block=SPARE, gpu=gpu)
    held = plan.batch.scratch.of(OnDevice)
    (room,) = held.works[None, 8]
    there = [*held.tensors.values(), room.items]

    def alone(lens: list[int]) -> list[torch.Tensor]:
        put(plan.tables(batch_of(lens)))
        return [tensor.clone() for tensor in there]

    steps = [[5, 700, 33], [900, 2]]
    want = [alone(lens) for lens in steps]
    seen = [[torch.empty_like(tensor) for tensor in there] for _ in steps]
    with LateCopies() as copies:
        for lens, sights in zip(steps, seen, strict=True):
            put(plan.tables(batch_of(lens)))
            for sight, tensor in zip(sights, there, strict=True):
                sight.copy_(tensor)
        copies.finish()
    for wanted, sights in zip(want, seen, strict=True):
        for tensor, sight in zip(wanted, sights, strict=True):
            assert torch.equal(tensor, sight)
