"""Sharing of KV memory between workers on the same machine.  SPEC 6.8.

A prefill worker lets other processes of its user map the memory of its KV cache, on the host or on
a GPU.  A decode worker maps it at the first offer from that peer, and unmaps it when the peer is
lost.  If mapping fails, KV is sent over a socket, and the reason is logged once.  If the peer does
not respond in time, mapping is tried again at its next offer.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import structlog

from worker.compute.contract import KVCache, Memory
from worker.environment import Fetch, MakePort, Port

log = structlog.get_logger("worker")

# Maximum number of mapped peers: more prefill workers than fit on one machine.
MAX_MAPPED: Final = 256


def lend(cache: KVCache, identity: bytes, make_port: MakePort, *, is_on: bool) -> Port | None:
    """Offer the cache's memory for others to map; if that fails, log why and return None."""
    try:
        if not is_on:
            raise OSError("--kv-shared-memory is off")
        if cache.memory is None:
            raise OSError("it lies where no other process can read")
        description = b" " + cache.memory.about if cache.memory.about else b""
        return make_port(cache.memory.descriptor, identity + description)
    except OSError as error:
        log.info("KV is sent as bytes", reason=str(error))
        return None


class SameHostPeers:
    """Peers on the same host: those whose memory is mapped, and those for which mapping failed."""

    def __init__(self, cache: KVCache, fetch: Fetch, *, is_on: bool) -> None:
        self._cache, self._fetch, self._is_on = cache, fetch, is_on
        self._mappings: dict[bytes, asyncio.Task[Memory | None]] = {}
        self._reasons: set[str] = set()
        if not is_on:
            log.info("KV comes as bytes", reason="--kv-shared-memory is off")

    def needs_map(self, peer: bytes, offered: str | None) -> bool:
        """Whether this peer offers memory and mapping it has neither succeeded nor failed yet."""
        mapping = self._mappings.get(peer)
        return offered is not None and self._is_on and (mapping is None or not mapping.done())

    async def try_map(self, peer: bytes, offered: str) -> None:
        """Try to map the memory that a peer offers, once per peer; `offered` is its port's name."""
        if peer not in self._mappings:
            self._mappings[peer] = asyncio.create_task(self._map_or_log(peer, offered))
        await asyncio.wait([self._mappings[peer]])

    def memory_of(self, peer: bytes) -> Memory | None:
        """Return the peer's mapped memory, or None if its KV is sent over a socket."""
        mapping = self._mappings.get(peer)
        if mapping is None or not mapping.done() or mapping.cancelled():
            return None
        return mapping.result()

    def forget(self, peer: bytes) -> None:
        """Drop the memory of a lost peer; it is unmapped once no copy reads it."""
        mapping = self._mappings.pop(peer, None)
        if mapping is not None:
            mapping.cancel()

    def close(self) -> None:
        for peer in list(self._mappings):
            self.forget(peer)

    async def _map_or_log(self, peer: bytes, offered: str) -> Memory | None:
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
        # Unfinished attempts count too, and this attempt is one of them.
        mappings = self._mappings.values()
        mapped = [task for task in mappings if not task.done() or task.result() is not None]
        if len(mapped) > MAX_MAPPED:
            raise OSError(f"memory of {MAX_MAPPED} peers is mapped already")
        descriptor, description = await self._fetch(offered, peer)
        try:
            return self._cache.map_memory(descriptor, description)
        finally:
            os.close(descriptor)
