"""What a step is given, laid where the operations of its program look for it.

Arrays come anew each step; a program was written down once.  One call sets the addresses, the first
operation reads them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.cpu.intrinsics import fetch_add, floats_at, ints_at, read
from kernels.cpu.program import Operation
from kernels.cpu.threads import compiled, inner


class Intake:
    """Room for the numbers of a step of up to `num_tokens` tokens.

    Attributes:
        token_ids: [T] int32; `slots` and `rows` (of the tokens whose logits are wanted) likewise.
        rotation: [T, 2, D / 2] float32 cosines and sines of each token's position.
    """

    def __init__(self, num_tokens: int, frequencies: torch.Tensor) -> None:
        """`frequencies`: [D / 2] float32 angles per position."""
        self.token_ids, self.slots, self.rows = torch.empty(3, num_tokens, dtype=torch.int32)
        self.rotation = torch.empty(num_tokens, 2, len(frequencies))
        self._frequencies = frequencies.contiguous()
        self._given = np.zeros(4, np.int64)
        self._kept: tuple[torch.Tensor, ...] = ()

    def set(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Say what the next run of `take_in` takes: [T], [T], [T] and [R] int32, contiguous."""
        self._kept = (token_ids, positions, slots, rows)
        self._given[:] = [array.data_ptr() for array in self._kept]

    def take_in(self, num_tokens: int, num_rows: int) -> Operation:
        """Return the operation that comes before those which need the numbers."""
        words = (
            num_tokens,
            num_rows,
            self._given.ctypes.data,
            self.token_ids.data_ptr(),
            self.slots.data_ptr(),
            self.rows.data_ptr(),
            self.rotation.data_ptr(),
            self._frequencies.data_ptr(),
            len(self._frequencies),
        )
        return Operation(task(), words, (self,))


@cache
def task() -> Any:
    """Return the compiled loop over tokens."""
    return compiled(_take_in)


def _take_in(words, _thread):  # type: ignore[no-untyped-def]
    num_tokens, num_rows, given, size = words[2], words[3], words[4], words[10]
    while True:
        token = fetch_add(words[0], 1)
        if token >= num_tokens:
            return
        ints_at(words[5])[token] = ints_at(read(given))[token]
        ints_at(words[6])[token] = ints_at(read(given + 16))[token]
        if token < num_rows:
            ints_at(words[7])[token] = ints_at(read(given + 24))[token]
        _rotate(words[8] + token * size * 8, ints_at(read(given + 8))[token], words[9], size)


@inner
def _rotate(rotation, position, frequencies, size):  # type: ignore[no-untyped-def]
    """Write the cosines, then the sines, of a position."""
    cosines, sines = floats_at(rotation), floats_at(rotation + size * 4)
    for i in range(size):
        angle = np.float32(position) * floats_at(frequencies)[i]
        cosines[i] = np.cos(angle)
        sines[i] = np.sin(angle)
