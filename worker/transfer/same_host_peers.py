"""Workers on the same machine: whose memory is mapped, and why others' is not.  SPEC 6.8.

A prefill worker lends the memory its KV lies in, the host's or a GPU's, to processes of its own
user.  A decode worker maps it when that peer first offers KV, once for all transfers, until the
peer is lost.  Where that cannot be, KV is sent as bytes, and the log says once why.  A peer that
does not answer in time is asked again at its next offer: it stood still, but not for long if it
offers.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import structlog

from worker.compute.contract import KVCache, Memory
from worker.environment import Fetch, MakePort, Port

log = structlog.get_logger("worker")

# Peers whose memory may be mapped at a time: more prefill workers than a machine has room for.
MAX_MAPPED: Final = 256


class Lender:
    """Lends the memory of a cache under this worker's name, if there is any and the setting is on.

    `offered` is the socket where; None for nowhere.
    """

    def __init__(
        self, cache: KVCache, identity: bytes, make_port: MakePort, *, is_on: bool
    ) -> None:
        self._port: Port | None = None
        self.offered: str | None = None
        try:
            if not is_on:
                raise OSError("--kv-shared-memory is off")
            if cache.memory is None:
                raise OSError("it lies where no other process can read")
            about = b" " + cache.memory.about if cache.memory.about else b""
            self._port = make_port(cache.memory.descriptor, identity + about)
        except OSError as error:
            log.info("KV is sent as bytes", reason=str(error))
        else:
            self.offered = self._port.name

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


class Neighbours:
    """The peers whose memory is mapped here, as `cache` can map it, or cannot be."""

    def __init__(self, cache: KVCache, fetch: Fetch, *, is_on: bool) -> None:
        self._cache, self._fetch, self._is_on = cache, fetch, is_on
        self._mappings: dict[bytes, asyncio.Task[Memory | None]] = {}
        self._reasons: set[str] = set()
        if not is_on:
            log.info("KV comes as bytes", reason="--kv-shared-memory is off")

    def is_settled(self, peer: bytes, offered: str | None) -> bool:
        """Whether it is known if the memory that this peer offers can be mapped."""
        mapping = self._mappings.get(peer)
        return offered is None or not self._is_on or (mapping is not None and mapping.done())

    async def settle(self, peer: bytes, offered: str) -> None:
        """Map the memory that a peer offers, if it can be mapped."""
        if peer not in self._mappings:
            self._mappings[peer] = asyncio.create_task(self._try(peer, offered))
        await asyncio.wait([self._mappings[peer]])

    def memory_of(self, peer: bytes) -> Memory | None:
        """The memory of a peer, to read; None if its KV comes as bytes."""
        mapping = self._mappings.get(peer)
        if mapping is None or not mapping.done() or mapping.cancelled():
            return None
        return mapping.result()

    def forget(self, peer: bytes) -> None:
        """Unmap the memory of a peer that is gone, once no copy reads it."""
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
        # Those that are not decided yet count too; this one is among them.
        mapped = [it for it in self._mappings.values() if not it.done() or it.result() is not None]
        if len(mapped) > MAX_MAPPED:
            raise OSError(f"memory of {MAX_MAPPED} peers is mapped already")
        descriptor, about = await self._fetch(offered, peer)
        try:
            return self._cache.map_memory(descriptor, about)
        finally:
            os.close(descriptor)
