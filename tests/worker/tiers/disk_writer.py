"""Writes blocks to a folder until it is killed; `of` says what the KV of a block has to be."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b
from itertools import count
from pathlib import Path

from tests.worker.tiers.chains import chain
from worker.tiers.disk import Disk
from worker.tiers.keys import BlockKey
from worker.tiers.records import Checksum, RecordFormat

KV_BYTES = 64 << 10
NUM_SLOTS = 24


def of(key: BlockKey) -> bytes:
    """The KV of this block, which nothing else has."""
    return blake2b(key.digest).digest() * (KV_BYTES // 64)


def open_disk(folder: Path) -> Disk:
    record = RecordFormat(1, KV_BYTES, b"kills", Checksum())
    return Disk(folder, record, NUM_SLOTS * record.total_bytes)


def main(folder: str, seed: int) -> None:
    disk, draw = open_disk(Path(folder)), random.Random(seed)
    for number in count(1):
        slots = draw.sample(range(NUM_SLOTS), draw.randint(1, 6))
        keys = [chain(draw.randrange(1 << 30))[0] for _ in slots]
        disk.write([(slot, key, of(key)) for slot, key in zip(slots, keys, strict=True)])
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
