"""The plan of a decode step in device memory at fixed addresses, for CUDA graphs.

A graph repeats its launches with the pointers and the grids with which it was captured.  So buffers
are large enough for the most sequences, work items and partial results that a graph of its size can
have.  Sequences that a step lacks generate into a spare block; work items that it lacks have
sequence -1, and their thread blocks end at once.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from kernels.contract import PagedBatch
from kernels.cuda import tiling
from kernels.cuda.launch import OnDevice, Planned, is_tiled, on_device

NOTHING = -1


class FixedPlan:
    """A plan for decode steps of `num_sequences`, one token each; call `tables` before each step.

    Attributes:
        batch: The argument of the operators.  Its scratch memory already has the tables that they
            would otherwise upload.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        num_sequences: int,
        num_columns: int,
        num_heads: int,
        windows: Collection[int | None],
        *,
        spare_block: int,
        gpu: tiling.Gpu,
    ) -> None:
        """Allocate the plan on the pool's device.

        Args:
            num_columns: Columns of the block tables: the blocks of the longest sequence.
            spare_block: A block of the pool that no sequence has.
        """
        self._pool = pool
        self._group = num_heads // pool.shape[3]
        self._spare_slot = spare_block * pool.shape[4]
        self._starts = np.arange(num_sequences + 1, dtype=np.int32)
        tables = torch.full((num_sequences, num_columns), spare_block, dtype=torch.int32)
        self.batch = PagedBatch(
            slots=torch.full((num_sequences,), self._spare_slot, dtype=torch.int32),
            query_starts=torch.from_numpy(self._starts),
            context_lens=torch.ones(num_sequences, dtype=torch.int32),
            block_tables=tables,
        )
        held, device = self.batch.scratch.of(OnDevice), pool.device
        held.tensors["slots"] = self.batch.slots.to(device)
        held.tensors["starts"] = self.batch.query_starts.to(device)
        held.tensors["contexts"] = self.batch.context_lens.to(device)
        held.tensors["tables"] = tables.to(device)
        head_dim = pool.shape[5]
        few, many = tiling.few_rows_tile(head_dim), tiling.many_rows_tile(head_dim, gpu)
        self._tile: tiling.AnyTile = few if self._group <= few.rows else many
        self._wanted_blocks = gpu.wanted_blocks(self._tile, head_dim)
        self._rooms: dict[int | None, Planned] = {}
        if is_tiled(pool.dtype, head_dim):
            for window in windows:
                room = self._rooms[window] = self._room(num_sequences)
                held.works[window, num_heads] = [room]

    def _room(self, num_sequences: int) -> Planned:
        """Allocate buffers for the most work items that there can be."""
        num_kv_heads = self._pool.shape[3]
        most_tiles = num_sequences * -(-self._group // self._tile.rows)
        most_items = max(most_tiles, self._wanted_blocks // num_kv_heads)
        items = np.full((most_items, tiling.ITEM), NOTHING, np.int32)
        return on_device(self._tile, tiling.Work(items, most_items), self._pool)

    def tables(self, batch: PagedBatch) -> list[tuple[torch.Tensor, tiling.Ints]]:
        """Plan a step of at most `num_sequences` sequences with one token each.

        Returns:
            (device tensor, table) pairs: the caller writes each table to its tensor (`pinned.put`)
            before the next call.
        """
        mine, count = self.batch, len(batch.slots)
        columns = batch.block_tables.shape[1]
        mine.slots[:count], mine.slots[count:] = batch.slots, self._spare_slot
        mine.context_lens[:count], mine.context_lens[count:] = batch.context_lens, 1
        mine.block_tables[:count, :columns] = batch.block_tables
        mine.block_tables[count:, 0] = self._spare_slot // self._pool.shape[4]
        tensors = mine.scratch.of(OnDevice).tensors
        tables = [
            (tensors["slots"], mine.slots.numpy()),
            (tensors["contexts"], mine.context_lens.numpy()),
            (tensors["tables"][:, :columns], mine.block_tables[:, :columns].numpy()),
        ]
        for window, room in self._rooms.items():
            work = tiling.work(
                self._starts,
                mine.context_lens.numpy(),
                np.arange(len(mine.slots)),
                group=self._group,
                num_kv_heads=self._pool.shape[3],
                tile=self._tile,
                window=window,
                wanted_blocks=self._wanted_blocks,
            )
            items, count = room.work.items, len(work.items)
            items[:count], items[count:] = work.items, NOTHING
            tables.append((room.items, items))
        return tables
