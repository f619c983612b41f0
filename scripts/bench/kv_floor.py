"""Lower bounds for moving KV between two processes: the same bytes without a protocol.

`measure` starts a receiving process, sends it the KV of one prompt several times, and returns the
best rate in bytes per second.  The methods:

    memcpy       copy from one buffer to another in this process
    raw, zmq     send segments over a TCP or ZeroMQ socket, and ignore them
    raw+, zmq+   for each block: checksum, send, receive, checksum, copy into a block
    memory       for each block: checksum, and one copy out of the memory of the other process

`bench_kv.py` compares with `zmq+`.  A block with all layers has the same bytes in the pool and on
the wire, so nothing needs to be packed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zmq
from xxhash import xxh3_64_intdigest

from wire.layout import KVLayout
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.kv_cache import TorchKVCache
from worker.compute.shared_memory import map_memory

WAYS: Final = ("memcpy", "raw", "zmq", "raw+", "zmq+", "memory")
REPEATS: Final = 4
# The number of segments that ZeroMQ may queue, equal to the credit of the workers.
HIGH_WATER_MARK: Final = 8


def measure(way: str, layout: KVLayout, num_tokens: int, block_size: int) -> float:
    """Return the rate of one method for moving the KV of a prompt, in bytes per second."""
    if way == "memcpy":
        return _memcpy(layout.token_bytes * num_tokens)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    if way == "memory":
        pool = Pool(layout, num_tokens, block_size)
        args = theirs, pool.path, layout, num_tokens, block_size
        copying = context.Process(target=_copy, args=args, daemon=True)
        copying.start()
        try:
            return num_tokens * layout.token_bytes / float(ours.recv())
        finally:
            copying.join(10)  # wait for its exit, which would disturb the next measurement
            copying.kill()
    receiving = context.Process(target=_receive, args=(theirs, way, layout, num_tokens, block_size))
    receiving.start()
    try:
        pool = Pool(layout, num_tokens, block_size)
        send = _sender(way.rstrip("+"), ours.recv())
        rates = []
        for _ in range(REPEATS):
            for index in range(len(pool.rectangles)):
                segment = pool.block(index)
                if "+" in way:
                    xxh3_64_intdigest(segment)
                send(segment)
            rates.append(num_tokens * layout.token_bytes / ours.recv())
        return float(max(rates))
    finally:
        receiving.join(10)
        receiving.kill()


class Pool:
    """A KV cache that contains one prompt, in blocks in random order."""

    def __init__(self, layout: KVLayout, num_tokens: int, block_size: int) -> None:
        torch.set_num_threads(1)
        num_blocks = -(-num_tokens // block_size)
        self._cache = TorchKVCache(layout, num_blocks, block_size, torch.device("cpu"))
        self._cache.pool.fill_(1)
        self._table = random.Random(1).sample(range(num_blocks), num_blocks)
        group = layout.kv_groups[0]
        self.rectangles = [
            Rectangle(
                *(0, range(group.num_layers), range(group.num_heads)),
                range(start, start + block_size),
            )
            for start in range(0, num_tokens, block_size)
        ]

    @property
    def path(self) -> str:
        """The path at which other processes of this user can open the pool's memory."""
        assert self._cache.memory is not None, "this system has no such memory"
        return f"/proc/{os.getpid()}/fd/{self._cache.memory.descriptor}"

    def block(self, index: int) -> memoryview:
        """Return the bytes of one block without copying them."""
        block = self._cache.pool[self._table[index]]
        bytes_of: memoryview = block.view(-1).view(torch.uint8).numpy().data
        return bytes_of

    def store(self, index: int, segment: Buffer) -> None:
        """Copy a received segment into its block."""
        self._cache.unpack(self._table, self.rectangles[index], segment)


def _memcpy(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - start)
    return num_bytes / min(times)


def _receive(pipe: Any, way: str, layout: KVLayout, num_tokens: int, block_size: int) -> None:
    """Receive all segments several times, and send how long each time took."""
    pool = Pool(layout, num_tokens, block_size)
    receive = _receiver(way.rstrip("+"), block_size * layout.token_bytes, pipe.send)
    for _ in range(REPEATS):
        start = 0.0
        for index in range(len(pool.rectangles)):
            segment = receive()
            start = start or time.perf_counter()
            if "+" in way:
                xxh3_64_intdigest(segment)
                pool.store(index, segment)
        pipe.send(time.perf_counter() - start)


def _copy(pipe: Any, path: str, layout: KVLayout, num_tokens: int, block_size: int) -> None:
    """Copy all blocks from the other process's memory, in another order; send the best time."""
    pool, size = Pool(layout, num_tokens, block_size), block_size * layout.token_bytes
    with Path(path).open("rb") as file:
        memory = map_memory(file.fileno())
    sources = random.Random(2).sample(range(len(pool.rectangles)), len(pool.rectangles))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for index, source in enumerate(sources):
            segment = memory[source * size : (source + 1) * size].data
            xxh3_64_intdigest(segment)
            pool.store(index, segment)
        times.append(time.perf_counter() - start)
    pipe.send(min(times))


def _sender(kind: str, port: int) -> Callable[[memoryview], object]:
    if kind == "raw":
        return socket.create_connection(("127.0.0.1", port)).sendall
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    link.sndhwm = HIGH_WATER_MARK
    link.connect(f"tcp://127.0.0.1:{port}")
    return lambda segment: link.send(segment, copy=False)


def _receiver(kind: str, size: int, send_port: Callable[[int], None]) -> Callable[[], Buffer]:
    """Listen on a new port, and return a function that receives one segment."""
    if kind == "raw":
        listener = socket.create_server(("127.0.0.1", 0))
        send_port(listener.getsockname()[1])
        connection, _ = listener.accept()
        segment = memoryview(bytearray(size))

        def receive() -> memoryview:
            num_bytes = 0
            while num_bytes < size:
                num_bytes += connection.recv_into(segment[num_bytes:])
            return segment

        return receive
    hub: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    hub.rcvhwm = HIGH_WATER_MARK
    send_port(hub.bind_to_random_port("tcp://127.0.0.1"))
    return lambda: hub.recv(copy=False).buffer
