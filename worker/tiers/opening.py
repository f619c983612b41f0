"""Opens the tiers that a worker was configured with."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import structlog

from worker.compute.contract import KVCache
from worker.tiers.copies import BlockCopies
from worker.tiers.disk import Disk
from worker.tiers.disk_tier import DiskTier, HeldPrefixes
from worker.tiers.records import Checksum, Encryption, RecordFormat
from worker.tiers.store import TierStore
from worker.tiers.threads import JobThread, Results

# The version of the files; others are not read.
_FORMAT: Final = 1
_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 256

log = structlog.get_logger("worker")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The room for tiers, and what identifies their blocks.

    Attributes:
        host_bytes: Host memory for blocks; 0 for none.
        disk: The directory of the disk tier; None for none.
        owner: The worker, such as "decode-3": each has a folder of its own.
        model: The fingerprint of the model and whatever else its KV depends on (`contents_of`).
        context_tokens: The length of the model's context.
        secret: The worker's secret key; None to leave the files unencrypted.
    """

    host_bytes: int
    disk: Path | None
    disk_bytes: int
    owner: str
    model: tuple[str, ...]
    context_tokens: int
    secret: bytes | None
    clock: Callable[[], float]

    def open(self, cache: KVCache, prefixes: HeldPrefixes) -> TierStore | None:
        """Open the tiers for a cache; None if its model has windows or states.

        Raises:
            ValueError: The room of a tier does not hold one block.
        """
        if cache.layout.windows or cache.layout.has_state:
            log.warning("no tiers below the KV cache: this model has sliding windows or states")
            return None
        copies, results = BlockCopies(cache), Results()
        if 0 < self.host_bytes < copies.num_bytes:
            raise ValueError(
                f"--host-kv-bytes is {self.host_bytes}, and one block takes {copies.num_bytes}"
            )
        context_blocks = -(-self.context_tokens // cache.block_size)
        disk = self._open_disk(cache, copies.num_bytes, context_blocks, results, prefixes)
        return TierStore(
            copies,
            self.host_bytes,
            disk,
            JobThread("kv-tier-copy", results),
            results,
            prefixes,
            context_blocks=context_blocks,
            clock=self.clock,
        )

    def _open_disk(
        self,
        cache: KVCache,
        block_bytes: int,
        context_blocks: int,
        results: Results,
        prefixes: HeldPrefixes,
    ) -> DiskTier | None:
        """Open the disk tier; without it the worker is slower, so an error is only logged."""
        if self.disk is None:
            return None
        identity = msgspec.json.encode((_FORMAT, self.model, cache.layout, cache.block_size))
        digest = blake2b(identity, digest_size=8).hexdigest()
        name = re.sub(r"[^\w.-]", "_", self.model[0])[:64]
        folder = self.disk / f"{name}-{digest}" / self.owner
        seal = Checksum() if self.secret is None else Encryption(self.secret)
        record = RecordFormat(cache.block_size, block_bytes, identity, seal)
        try:
            disk = Disk(folder, record, self.disk_bytes)
            tier = DiskTier(
                disk,
                JobThread("kv-tier-disk", results),
                prefixes,
                block_bytes=block_bytes,
                context_blocks=context_blocks,
                clock=self.clock,
            )
            tier.open()
        except OSError as error:
            log.error("blocks are not kept on disk", folder=str(folder), reason=str(error))
            return None
        return tier


def contents_of(paths: Iterable[Path]) -> str:
    """Return a digest of files that KV depends on: their names, times, sizes and samples of them.

    A model that was trained further has the same fingerprint, but not the same KV.

    Raises:
        OSError: A file cannot be read.
    """
    digest = blake2b(digest_size=8)
    for path in sorted(paths):
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
            for number in range(_NUM_SAMPLES):
                file.seek(number * found.st_size // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
