"""Copy the inputs of a step to the fixed addresses from which its program reads them.

Token ids, positions and slots arrive in new arrays each step, while the addresses in a program are
fixed.  `StepInputs.set` records the addresses of the new arrays; the program's first operation
copies them and computes the rotation of each position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.cpu.intrinsics import floats_at, ints_at
from kernels.cpu.program import Operation
from kernels.cpu.tasks import inner, layout_of, records_at
from kernels.cpu.threads import take


class _Given(NamedTuple):
    """Addresses of the arrays of a step."""

    token_ids: int
    positions: int
    slots: int
    rows: int


class _Arguments(NamedTuple):
    num_tokens: int
    num_rows: int
    given: int
    token_ids: int
    slots: int
    rows: int
    rotations: int
    rotation_bytes: int  # from one kind of rotation to the next
    frequencies: int
    num_rotations: int
    half: int  # D / 2
    taken: int = 0


class StepInputs:
    """Buffers for the inputs of a step of up to `num_tokens` tokens.

    Attributes:
        token_ids: [T] int32; `slots` has the same shape, and `rows` the tokens whose logits are
            wanted.
        rotations: [W, T, 2, D / 2] float32 cosines and sines of each token's position, for W kinds
            of rotation.
    """

    def __init__(self, num_tokens: int, frequencies: torch.Tensor) -> None:
        """`frequencies`: [W, D / 2] float32 angles per position, for W kinds of rotation."""
        self.token_ids, self.slots, self.rows = torch.empty(3, num_tokens, dtype=torch.int32)
        num_rotations, half = frequencies.shape
        self.rotations = torch.empty(num_rotations, num_tokens, 2, half)
        self._frequencies = frequencies.contiguous()
        self._given = np.zeros(1, layout_of(_Given))
        self._kept: tuple[torch.Tensor, ...] = ()

    def set(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Set the tensors that the next run of `load` copies, all contiguous int32.

        Args:
            token_ids: [T], like `positions` and `slots`.
            rows: [R] indices of the tokens whose logits are wanted, R <= T.
        """
        self._kept = (token_ids, positions, slots, rows)
        self._given[0] = _Given(
            token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr(), rows.data_ptr()
        )

    def load(self, num_tokens: int, num_rows: int) -> Operation:
        """Return the operation that loads the inputs; run it before those that read them."""
        num_rotations, half = self._frequencies.shape
        arguments = _Arguments(
            num_tokens=num_tokens,
            num_rows=num_rows,
            given=self._given.ctypes.data,
            token_ids=self.token_ids.data_ptr(),
            slots=self.slots.data_ptr(),
            rows=self.rows.data_ptr(),
            rotations=self.rotations.data_ptr(),
            rotation_bytes=self.rotations.stride(0) * 4,
            frequencies=self._frequencies.data_ptr(),
            num_rotations=num_rotations,
            half=half,
        )
        return Operation(_load, arguments, (self,))


_given_at = records_at(_Given)


def _load(a: _Arguments, _thread: int) -> None:
    given, half = _given_at(a.given), a.half
    while True:
        token = take(a, 1)
        if token >= a.num_tokens:
            return
        ints_at(a.token_ids)[token] = ints_at(given.token_ids)[token]
        ints_at(a.slots)[token] = ints_at(given.slots)[token]
        if token < a.num_rows:
            ints_at(a.rows)[token] = ints_at(given.rows)[token]
        position = ints_at(given.positions)[token]
        for way in range(a.num_rotations):
            rotation = a.rotations + way * a.rotation_bytes + token * half * 8
            _rotate(rotation, position, a.frequencies + way * half * 4, half)


@inner
def _rotate(rotation: int, position: int, frequencies: int, size: int) -> None:
    """Write the cosines, then the sines, of a position's angles."""
    cosines, sines = floats_at(rotation), floats_at(rotation + size * 4)
    for i in range(size):
        angle = np.float32(position) * floats_at(frequencies)[i]
        cosines[i] = np.cos(angle)
        sines[i] = np.sin(angle)
