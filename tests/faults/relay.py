"""TCP relays that stand between two processes and misbehave when they are told to.

    with Relays() as relays:
        relay = relays.add("127.0.0.1", 5570)      # connect to relay.endpoint instead
        relay.delay_s = 0.05                       # each way
        relay.is_black_hole = True                 # nothing passes, nobody is told
        relay.cut()                                # every connection is reset

All relays share one thread with a loop of its own; the switches are plain attributes that it reads,
so that any thread may set them.  A black hole keeps what it swallowed: when it ends, the bytes come
after all, as TCP's own retransmissions would bring them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Self

CHUNK_BYTES: Final = 16 << 10
# Bytes that one direction of one connection may hold before the sender feels it, as a path would.
MAX_HELD_BYTES: Final = 256 << 10
POLL_S: Final = 0.005
_NAME: Final = re.compile(rb"(prefill|decode)-(\d+)-\d+")


@dataclass(eq=False)
class Direction:
    """One way of one connection: what was read and is not written yet, with the time it is due."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    held: deque[tuple[float, bytes]] = field(default_factory=deque)
    held_bytes: int = 0
    is_ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Path:
    """One connection; `name` is the worker that opened it, as its ZeroMQ greeting says."""

    outward: Direction
    inward: Direction
    name: str = ""

    def abort(self) -> None:
        for direction in (self.outward, self.inward):
            direction.writer.transport.abort()


class Relay:
    """One listening port in front of one other; made by `Relays.add`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0  # of each direction of each connection; 0: as fast as it goes
        self.is_black_hole = False
        self.passed_bytes = 0
        self.num_accepted = 0
        self.port = 0
        self._loop = loop
        self._target = host, port
        self._paths: set[Path] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def senders(self) -> set[str]:
        """Workers ("prefill-0") whose bytes are under way through this relay right now."""
        return {path.name for path in tuple(self._paths) if path.name and path.outward.held_bytes}

    def awaiting(self) -> set[str]:
        """Workers that an answer is under way to."""
        return {path.name for path in tuple(self._paths) if path.name and path.inward.held_bytes}

    def cut(self) -> None:
        """Reset every connection; new ones are accepted."""

        def abort_all() -> None:
            for path in tuple(self._paths):
                path.abort()

        self._loop.call_soon_threadsafe(abort_all)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for path in self._paths:
            path.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_accepted += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()  # as if nobody listened here either
            return
        path = Path(Direction(reader, far_writer), Direction(far_reader, writer))
        self._paths.add(path)
        pumps = [
            asyncio.create_task(work)
            for direction in (path.outward, path.inward)
            for work in (self._take(path, direction), self._give(direction))
        ]
        try:
            # Whichever end closes first, the other hears of it once what was held has left.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._paths.discard(path)
            path.abort()

    async def _take(self, path: Path, direction: Direction) -> None:
        while True:
            if direction.held_bytes >= MAX_HELD_BYTES:
                await asyncio.sleep(POLL_S)
                continue
            with contextlib.suppress(ConnectionError):
                if chunk := await direction.reader.read(CHUNK_BYTES):
                    if not path.name and (found := _NAME.search(chunk)):
                        path.name = b"-".join(found.groups()).decode()
                    direction.held.append((self._loop.time() + self.delay_s, chunk))
                    direction.held_bytes += len(chunk)
                    direction.changed.set()
                    continue
            direction.is_ended = True
            direction.changed.set()
            return

    async def _give(self, direction: Direction) -> None:
        while direction.held or not direction.is_ended:
            if self.is_black_hole:
                await asyncio.sleep(POLL_S)
                continue
            if not direction.held:
                direction.changed.clear()
                await direction.changed.wait()
                continue
            due, chunk = direction.held[0]
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.is_black_hole:
                continue
            direction.writer.write(chunk)
            await direction.writer.drain()
            if self.bytes_per_s:
                await asyncio.sleep(len(chunk) / self.bytes_per_s)
            direction.held.popleft()
            direction.held_bytes -= len(chunk)
            self.passed_bytes += len(chunk)
        raise ConnectionError("it ended")


class Relays:
    """The thread that all relays of a run share."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays")
        self._relays: list[Relay] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            asyncio.run_coroutine_threadsafe(relay.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, host: str, port: int) -> Relay:
        """Listen on a free port and pass everything on to `host`:`port`."""
        relay = Relay(self._loop, host, port)
        asyncio.run_coroutine_threadsafe(relay.open(), self._loop).result(10)
        self._relays.append(relay)
        return relay
