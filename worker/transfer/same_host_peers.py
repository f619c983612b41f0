"""KV in memory that workers on the same machine share.  SPEC 6.8.

A prefill worker lends the memory of its KV, the host's or a GPU's, to processes of its own user.  A
decode worker maps it when that peer first offers KV, until the peer is lost.  Where that fails, KV
is sent as bytes, and the log says why, once.  A peer that does not answer in time is asked again at
its next offer.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import structlog

from worker.compute.contract import KVCache, Memory
from worker.environment import Fetch, MakePort, Port

log = structlog.get_logger("worker")

# Mapped peers at a time: more prefill workers than a machine has room for.
MAX_MAPPED: Final = 256


def lend(cache: KVCache, identity: bytes, make_port: MakePort, *, is_on: bool) -> Port | None:
    """Lend the memory of a cache at a port; log why if it cannot or shall not be lent."""
    try:
        if not is_on:
            raise OSError("--kv-shared-memory is off")
        if cache.memory is None:
            raise OSError("it lies where no other process can read")
        about = b" " + cache.memory.about if cache.memory.about else b""
        return make_port(cache.memory.descriptor, identity + about)
    except OSError as error:
        log.info("KV is sent as bytes", reason=str(error))
        return None


class SameHostPeers:
    """The peers on this machine, and their memory if `cache` can map it."""

    def __init__(self, cache: KVCache, fetch: Fetch, *, is_on: bool) -> None:
        self._cache, self._fetch, self._is_on = cache, fetch, is_on
        self._mappings: dict[bytes, asyncio.Task[Memory | None]] = {}
        self._reasons: set[str] = set()
        if not is_on:
            log.info("KV comes as bytes", reason="--kv-shared-memory is off")

    def is_settled(self, peer: bytes, offered: str | None) -> bool:
        """Whether mapping the memory that this peer offers has succeeded or failed."""
        mapping = self._mappings.get(peer)
        return offered is None or not self._is_on or (mapping is not None and mapping.done())

    async def settle(self, peer: bytes, offered: str) -> None:
        """Try to map the memory that a peer offers."""
        if peer not in self._mappings:
            self._mappings[peer] = asyncio.create_task(self._try(peer, offered))
        await asyncio.wait([self._mappings[peer]])

    def memory_of(self, peer: bytes) -> Memory | None:
        """Return the mapped memory of a peer; None if its KV comes as bytes."""
        mapping = self._mappings.get(peer)
        if mapping is None or not mapping.done() or mapping.cancelled():
            return None
        return mapping.result()

    def forget(self, peer: bytes) -> None:
        """Unmap the memory of a lost peer, once no copy reads it."""
        mapping = self._mappings.pop(peer, None)
        if mapping is not None:
            mapping.cancel()

    def close(self) -> None:
        for peer in list(self._mappings):
            self.forget(peer)

    async def _try(self, peer: bytes, offered: str) -> Memory | None:
        try:
            memory = await self._map(peer, offered)
        except OSError as error:
            reason = str(error) or "the peer does not answer"
            if isinstance(error, ConnectionRefusedError):
                reason = "the peer is on another machine, or in another network namespace"
            if isinstance(error, TimeoutError):
                self._mappings.pop(peer, None)
            if reason not in self._reasons:
                self._reasons.add(reason)
                log.info("KV comes as bytes", peer=peer.decode(), reason=reason)
            return None
        kind, num_bytes = memory.kind, len(memory)
        log.info("KV is read from memory", peer=peer.decode(), kind=kind, bytes=num_bytes)
        return memory

    async def _map(self, peer: bytes, offered: str) -> Memory:
        # Unfinished attempts count, too; this one is among them.
        mapped = [it for it in self._mappings.values() if not it.done() or it.result() is not None]
        if len(mapped) > MAX_MAPPED:
            raise OSError(f"memory of {MAX_MAPPED} peers is mapped already")
        descriptor, about = await self._fetch(offered, peer)
        try:
            return self._cache.map_memory(descriptor, about)
        finally:
            os.close(descriptor)
