"""The ids of attempts: none comes twice, and who knows some of them cannot tell the next.

A worker learns the ids of what is placed on it.  Could it count on from there, it might offer KV
under the id of another's request before that request's own prefill worker does (SPEC 6.2).  So the
lower half is a counter under a keyed permutation of 32 bits (four Feistel rounds of BLAKE2b).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

_NUM_ROUNDS: Final = 4


class RequestIds:
    """`epoch` (u32) fills the upper half.  `key` is secret, and drawn anew for each process."""

    def __init__(self, epoch: int, key: bytes | None = None) -> None:
        self.epoch = epoch
        self._key = secrets.token_bytes(16) if key is None else key
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        rounds, number = divmod(next(self._numbers), 1 << 32)
        return (self.epoch + rounds << 32) + self._permute(number)

    def _permute(self, number: int) -> int:
        left, right = divmod(number, 1 << 16)
        for i in range(_NUM_ROUNDS):
            block = bytes((i, right >> 8, right & 0xFF))
            mask = blake2b(block, digest_size=2, key=self._key).digest()
            left, right = right, left ^ int.from_bytes(mask, "little")
        return left << 16 | right
