"""A router with 64 scripted workers, in a thread, and up to 500 requests a second."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import RecordingSink, detail, load
from tests.router.site import Answer, Site, ids, listening, write_model
from wire.frames import Heartbeat, Hello, Role
from wire.options import Options
from wire.parts import encode
from wire.payloads import encode_map

NUM_WORKERS = 64
REQUESTS_PER_S = 500
TICK_S = 0.05
NUM_TOKENS = 12


class Crowd:
    """Workers that beat and give an `answer`, and clients that ask, until `over` is set."""

    def __init__(
        self,
        directory: Path,
        answer: Callable[[tuple[int, ...]], Answer],
        requests_per_s: int = REQUESTS_PER_S,
    ) -> None:
        self.over, self._is_ready = threading.Event(), threading.Event()
        self._directory, self._answer, self._requests_per_s = directory, answer, requests_per_s
        self.site: Site
        self.url = ""
        self.num_asked = 0

    def _join(self, site: Site) -> list[bytes]:
        peers = []
        for role in (Role.PREFILL, Role.DECODE):
            for rank in range(NUM_WORKERS // 2):
                peer = f"{role.name.lower()}-{rank}-1".encode()
                about = encode_map(detail(model="letters", num_blocks=4096))
                site.bus.on_message(peer, encode(Hello(1, rank, role), about))
                peers.append(peer)
        return peers

    async def _serve(self) -> None:
        limits = Limits(max_attempts=2)
        model = write_model(self._directory)
        self.site = site = Site(model, join=False, heartbeat_s=60.0, limits=limits)
        peers = self._join(site)
        site.answer = self._answer
        async with listening(site.application) as (host, port):
            self.url = f"http://{host}:{port}"
            turn = 0
            while not self.over.is_set():
                if turn % 20 == 0:
                    for number, peer in enumerate(peers):
                        used = (number * 61 + turn) % 2000
                        beat = encode_map(load(4096, used=used, cached=1500))
                        site.bus.on_message(peer, encode(Heartbeat(turn, used % 9, 0), beat))
                self._is_ready.set()
                for _ in range(int(self._requests_per_s * TICK_S)):
                    self.num_asked += 1
                    prompt = tuple(ids("ask" * (1 + self.num_asked % 9)))
                    request = Request(
                        prompt, Options(), NUM_TOKENS, "somebody", f"crowd-{self.num_asked}"
                    )
                    site.bus.dispatcher.submit(request, RecordingSink())
                site.bus.tick()
                site.seen.clear()
                turn += 1
                await asyncio.sleep(TICK_S)
            await site.idle()

    @contextmanager
    def running(self) -> Iterator[Crowd]:
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        try:
            assert self._is_ready.wait(60)
            yield self
        finally:
            self.over.set()
            thread.join()
