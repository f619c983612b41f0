"""Memory is lent and mapped by itself where that can be; where not, the log says why, once."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from tests.worker.transfer.mapped import num_mappings
from wire.aio.unix import DescriptorPort, fetch_descriptor
from worker.compute.shared_memory import HostMemory, SharedMemory
from worker.environment import Port
from worker.executor.hash import HashKVCache
from worker.transfer import same_host_peers
from worker.transfer.same_host_peers import SameHostPeers, lend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
PEER = b"prefill-0-1"


def lent(cache: Any) -> Port:
    port = lend(cache, PEER, DescriptorPort, is_on=True)
    assert port is not None
    return port


async def test_what_a_peer_lends_is_mapped_once_until_it_is_lost() -> None:
    cache = HashKVCache(20, 16)
    assert isinstance(cache.memory, SharedMemory)
    one, ours = lent(cache), SameHostPeers(HashKVCache(20, 16), fetch_descriptor, is_on=True)
    gc.collect()
    descriptors, mappings = os.listdir("/proc/self/fd"), num_mappings()
    assert ours.needs_map(PEER, one.name) and ours.memory_of(PEER) is None
    await asyncio.gather(*(ours.try_map(PEER, one.name) for _ in range(3)))
    assert not ours.needs_map(PEER, one.name) and num_mappings() == mappings + 1
    memory = ours.memory_of(PEER)
    assert isinstance(memory, HostMemory) and not memory.bytes.flags.writeable
    cache.memory.bytes[5] = 9
    assert memory.bytes[5] == 9
    ours.forget(PEER)
    assert memory.bytes[5] == 9  # a copy may be under way
    del memory
    assert num_mappings() == mappings and os.listdir("/proc/self/fd") == descriptors
    one.close()


@pytest.mark.parametrize(("has_memory", "is_on"), [(False, True), (True, False)])
async def test_nothing_is_lent_that_cannot_or_shall_not_be(has_memory: bool, is_on: bool) -> None:
    cache = HashKVCache(20, 16)
    cache.memory = cache.memory if has_memory else None  # as on a GPU
    with structlog.testing.capture_logs() as logs:
        assert lend(cache, PEER, DescriptorPort, is_on=is_on) is None
    assert [entry["event"] for entry in logs] == ["KV is sent as bytes"]


async def test_the_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = HashKVCache(20, 16)
    one, ours = lent(cache), SameHostPeers(HashKVCache(20, 16), fetch_descriptor, is_on=True)
    offers = {
        b"prefill-1-1": "baton-elsewhere",
        b"prefill-1-2": "baton-gone",
        b"prefill-3-1": one.name,  # which belongs to another peer
    }
    with structlog.testing.capture_logs() as logs:
        for peer, offered in offers.items():
            await ours.try_map(peer, offered)
            assert not ours.needs_map(peer, offered) and ours.memory_of(peer) is None
        monkeypatch.setattr(same_host_peers, "MAX_MAPPED", 0)
        await ours.try_map(PEER, one.name)
        assert ours.memory_of(PEER) is None
        ours.forget(PEER)
        monkeypatch.setattr(same_host_peers, "MAX_MAPPED", 1)
        await ours.try_map(PEER, one.name)
        assert ours.memory_of(PEER) is not None, "those that cannot be mapped do not count"
    reasons = [entry for entry in logs if entry["event"] == "KV comes as bytes"]
    assert [entry["peer"] for entry in reasons] == ["prefill-1-1", "prefill-3-1", "prefill-0-1"]
    assert "another machine" in reasons[0]["reason"] and "0 peers" in reasons[2]["reason"]
    ours.close()
    one.close()


async def test_memory_of_a_gpu_is_lent_with_its_size_and_read_on_gpus_only() -> None:
    shared = HashKVCache(20, 16).memory
    assert shared is not None
    memory = SimpleNamespace(descriptor=shared.descriptor, about=b"cuda 65536")
    one = lent(SimpleNamespace(memory=memory))
    descriptor, about = await fetch_descriptor(one.name, PEER)
    os.close(descriptor)
    assert about == b"cuda 65536"
    ours = SameHostPeers(HashKVCache(20, 16), fetch_descriptor, is_on=True)
    descriptors = os.listdir("/proc/self/fd")
    with structlog.testing.capture_logs() as logs:
        await ours.try_map(PEER, one.name)
    assert not ours.needs_map(PEER, one.name) and ours.memory_of(PEER) is None
    assert os.listdir("/proc/self/fd") == descriptors, "a refused descriptor is closed, too"
    assert [entry["reason"] for entry in logs] == [
        "the KV lies on a GPU, and this worker computes on none"
    ]
    ours.close()
    one.close()


async def test_who_answers_late_is_asked_again_at_its_next_offer() -> None:
    cache, answers = HashKVCache(20, 16), [TimeoutError("it says nothing"), None]
    one = lent(cache)

    async def fetch(name: str, greeting: bytes) -> tuple[int, bytes]:
        if (error := answers.pop(0)) is not None:
            raise error
        return await fetch_descriptor(name, greeting)

    ours = SameHostPeers(HashKVCache(20, 16), fetch, is_on=True)
    for is_mapped in (False, True):
        assert ours.needs_map(PEER, one.name)
        await ours.try_map(PEER, one.name)
        assert (ours.memory_of(PEER) is not None) is is_mapped
    assert not ours.needs_map(PEER, one.name)
    ours.close()
    one.close()


async def test_who_shall_not_map_asks_nobody() -> None:
    async def fetch(name: str, greeting: bytes) -> tuple[int, bytes]:
        raise AssertionError("nobody may be asked")

    offered = "baton-any"
    off = SameHostPeers(HashKVCache(20, 16), fetch, is_on=False)
    assert not off.needs_map(PEER, offered) and off.memory_of(PEER) is None
    assert not SameHostPeers(HashKVCache(20, 16), fetch, is_on=True).needs_map(PEER, None)


async def test_a_peer_that_is_lost_while_it_is_asked_is_not_mapped() -> None:
    is_asked, never = asyncio.Event(), asyncio.Event()

    async def fetch(name: str, greeting: bytes) -> tuple[int, bytes]:
        is_asked.set()
        await never.wait()
        raise AssertionError("cancelled before")

    ours = SameHostPeers(HashKVCache(20, 16), fetch, is_on=True)
    mapping = asyncio.create_task(ours.try_map(PEER, "baton-slow"))
    await is_asked.wait()
    ours.forget(PEER)
    await asyncio.wait_for(mapping, 30)
    assert ours.memory_of(PEER) is None
