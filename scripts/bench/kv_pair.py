"""Two real workers that transfer KV but compute nothing, and a minimal router for them.

Each worker is a separate process with the engine, roles, threads and sockets of `python -m worker`.
Only its executor computes nothing.  For a prompt of zeros, prefill leaves the blocks unchanged.
For a prompt of another token id (`mark`), the prefill worker writes KV that depends on the mark,
and the decode worker compares it bit by bit.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing as mp
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from wire.aio.zmq import Hub, Link, Sending
from wire.errors import PeerLost
from wire.frames import (
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Drain,
    Error,
    Heartbeat,
    Hello,
    KvCache,
    KvCacheAck,
    Peers,
    PrefillRequest,
    Role,
    Tag,
    Welcome,
)
from wire.layout import KVLayout
from wire.options import Options
from wire.parts import TAG, Buffer, Message, decode, encode
from wire.payloads import (
    Credit,
    HelloDetail,
    PeerDetail,
    WelcomeDetail,
    decode_error,
    decode_map,
    encode_continuation,
    encode_map,
    encode_prompt,
)
from wire.process.cores import format_cores, own_cores, parse_cores, run_on
from wire.process.keys import Keys, open_keys
from wire.process.lifetime import run
from wire.process.log import configure
from worker.app import Worker
from worker.compute.kv_cache import TorchKVCache
from worker.config import Config
from worker.environment import Environment
from worker.executor.batch import Batch
from worker.executor.contract import Capabilities, MemoryRequirements, ModelInfo, SampledToken
from worker.transfer.sockets import KVPlane
from worker.transfer.thread import SMALL_BYTES, Args, Copies, R

EPOCH: Final = 7
PATIENCE_S: Final = 60.0
# A long interval, so that heartbeats do not disturb transfers.
HEARTBEAT_MS: Final = 10_000
# The token ids with which the decode worker reports whether the KV is correct.
RIGHT, WRONG = 1, 2
OPTIONS: Final = Options(max_tokens=2, ignore_eos=True)

Words = npt.NDArray[np.int16]
Tell = Callable[[dict[str, float]], None]


class Still:
    """An executor that computes nothing, for a `layout` with a 16-bit dtype."""

    def __init__(self, layout: KVLayout, role: str, max_model_len: int) -> None:
        self._is_writing = role == "prefill"
        self.info = ModelInfo("still", "still", 1000, max_model_len, frozenset(), layout)
        memory = MemoryRequirements(0, 0, layout.token_bytes)
        self.capabilities = Capabilities(memory)
        self.cache: TorchKVCache | None = None

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> TorchKVCache:
        torch.set_num_threads(1)
        layout = self.info.layout
        self.cache = TorchKVCache(layout, num_blocks, block_size, torch.device("cpu"))
        self.cache.pool.fill_(1)  # so that every page is allocated
        self._pool: Words = self.cache.pool.view(torch.int16).numpy()
        _, num_layers, _, num_heads, self._block_size, head_dim = self._pool.shape
        draw = np.random.default_rng(1)
        self._pattern = draw.integers(0, 30_000, (num_layers, 2, num_heads, head_dim), np.int16)
        return self.cache

    def forward(self, batch: Batch) -> list[int]:
        """Write the KV of marked prompts (prefill), or compare it for each sequence (decode)."""
        if not self._is_writing:
            return [self._compare(batch, row) for row in range(len(batch.samplings))]
        (marked,) = np.nonzero(batch.token_ids)
        if len(marked):
            blocks, offsets = np.divmod(batch.slots[marked], self._block_size)
            kv = self._kv(batch.token_ids[marked], batch.positions[marked])
            self._pool[blocks, :, :, :, offsets] = kv
        return [RIGHT] * len(batch.samplings)

    def sample(self, found: list[int], batch: Batch) -> list[SampledToken]:
        return [SampledToken(token_id) for token_id in found]

    def shutdown(self) -> None: ...

    def _compare(self, batch: Batch, row: int) -> int:
        """Return RIGHT if the KV of a sequence is what its mark implies, else WRONG."""
        mark, length = int(batch.token_ids[batch.sample_rows[row]]), int(batch.context_lens[row])
        if not mark:
            return RIGHT
        positions = np.arange(length - 1)
        blocks = batch.block_tables[row][positions // self._block_size]
        found = self._pool[blocks, :, :, :, positions % self._block_size]
        wanted = self._kv(np.full(length - 1, mark), positions)
        return RIGHT if np.array_equal(found, wanted) else WRONG

    def _kv(self, marks: npt.NDArray[Any], positions: npt.NDArray[Any]) -> Words:
        words = (marks * 31 + positions).astype(np.int16)
        kv: Words = self._pattern + words[:, None, None, None, None]
        return kv


class Watched(KVPlane):
    """Reports when the offer of each transfer was sent and when its last ACK was received."""

    def __init__(self, tell: Tell, max_model_len: int, keys: Keys | None = None) -> None:
        super().__init__(max_model_len, keys)
        self._tell = tell
        self._offered_s: dict[int, float] = {}

    def link(
        self, identity: bytes, endpoint: str, on_message: Any, *rest: Any, **more: Any
    ) -> Link:
        """Return a link that reports when offers are sent and last ACKs received."""
        watch = partial(self._watch, on_message)
        link = super().link(identity, endpoint, watch, *rest, **more)
        send = link.send

        def watched(parts: Sequence[Buffer], *, track: bool = False) -> Sending | None:
            if len(parts) >= 3 and parts[0] == TAG.pack(Tag.KV_CACHE):
                frame = KvCache.from_header(bytes(parts[1]))
                self._offered_s.setdefault(frame.request_id, time.monotonic())
            return send(parts, track=track)

        link.send = watched  # type: ignore[method-assign]
        return link

    def _watch(self, on_message: Callable[[list[Buffer]], None], parts: list[Buffer]) -> None:
        if parts[0] == TAG.pack(Tag.KV_CACHE_ACK) and Credit.unpack(parts[2]).ready:
            request_id = KvCacheAck.from_header(bytes(parts[1])).request_id
            offered_s = self._offered_s.pop(request_id)
            self._tell({"id": request_id, "offered_s": offered_s, "ready_s": time.monotonic()})
        on_message(parts)


class Counted(Copies):
    """Counts the jobs that the transfer threads run."""

    num_jobs = 0

    async def run(self, copy: Callable[[*Args], R], *args: *Args, num_bytes: int) -> R:
        Counted.num_jobs += num_bytes > SMALL_BYTES
        return await super().run(copy, *args, num_bytes=num_bytes)


def serve(pipe: Pipe, layout: KVLayout, settings: dict[str, Any]) -> None:
    """Run one worker until it is stopped; reply to each message on the pipe with its usage."""
    config = Config(**settings)
    configure(config.log_level)
    if config.cores:
        run_on(parse_cores(config.cores))

    def answer(stop: asyncio.Event) -> None:
        try:
            pipe.recv()
        except EOFError:  # the parent process has ended
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            stop.set()
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime
        pipe.send({"cpu_s": cpu_s, "switches": used.ru_nvcsw, "jobs": Counted.num_jobs})

    async def live(stop: asyncio.Event) -> int:
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer, stop)
        environment = Environment(make_plane=partial(Watched, pipe.send), make_copies=Counted)
        executor = Still(layout, config.role, config.max_model_len)
        return await Worker(config, executor, environment).run(stop)

    gc.freeze()  # as `python -m worker` does
    run(live)


@dataclass(frozen=True)
class Moved:
    """The size and the times of one transfer, from its offer to its last ACK."""

    num_bytes: int
    offered_s: float
    ready_s: float

    @property
    def seconds(self) -> float:
        return self.ready_s - self.offered_s


class Pair:
    """A minimal router, connected to a prefill and a decode worker."""

    def __init__(self, layout: KVLayout, keys: Keys | None) -> None:
        self._layout = layout
        self._peers: dict[Role, bytes] = {}
        self._details: dict[Role, HelloDetail] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._times: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._tokens: dict[int, int] = {}
        self._pipes: dict[Role, Pipe] = {}
        self._figures: asyncio.Queue[dict[str, float]] = asyncio.Queue()
        self._is_joined = asyncio.Event()
        self._num_requests = 0
        self._hub = Hub(self._on_message, keys=keys)
        self.endpoint = self._hub.bind("tcp://127.0.0.1:0")

    async def move(self, num_tokens: int, count: int = 1, mark: int = 0) -> list[Moved]:
        """Transfer the KV of `count` prompts at once.

        Args:
            mark: If not 0, KV with this mark is written before and compared afterwards.

        Raises:
            RuntimeError: A request failed, or its KV did not arrive unchanged.
        """
        first = self._num_requests
        self._num_requests += count
        ids = [EPOCH << 32 | first + number for number in range(count)]
        loop = asyncio.get_running_loop()
        self._ends |= {request_id: loop.create_future() for request_id in ids}
        self._times |= {request_id: loop.create_future() for request_id in ids}
        prompt = [mark] * num_tokens
        for request_id in ids:
            frame = PrefillRequest(request_id, num_tokens, 0)
            self._send(Role.PREFILL, encode(frame, encode_prompt(prompt, OPTIONS)))
            again = encode_continuation([*prompt, mark], OPTIONS)
            self._send(Role.DECODE, encode(DecodeRequest(request_id, 1), again))
        async with asyncio.timeout(PATIENCE_S):
            drawn = await asyncio.gather(*(self._ends[request_id] for request_id in ids))
            times = await asyncio.gather(*(self._times[request_id] for request_id in ids))
        if drawn != [RIGHT] * count:
            raise RuntimeError(f"KV of {num_tokens} tokens arrived changed")
        num_bytes = num_tokens * self._layout.token_bytes
        return [Moved(num_bytes, it["offered_s"], it["ready_s"]) for it in times]

    async def figures(self) -> dict[Role, dict[str, float]]:
        """Return the CPU seconds, context switches and copy jobs of each worker so far."""
        found = {}
        for role, pipe in self._pipes.items():
            pipe.send(None)
            found[role] = await self._figures.get()
        return found

    async def join(self, pipes: dict[Role, Pipe]) -> None:
        """Wait until both workers are registered."""
        self._pipes = pipes
        for pipe in pipes.values():
            asyncio.get_running_loop().add_reader(pipe.fileno(), self._on_pipe, pipe)
        async with asyncio.timeout(PATIENCE_S):
            await self._is_joined.wait()

    async def close(self) -> None:
        for pipe in self._pipes.values():
            asyncio.get_running_loop().remove_reader(pipe.fileno())
        await self._hub.close()

    def _on_pipe(self, pipe: Pipe) -> None:
        try:
            told = pipe.recv()
        except EOFError:  # it has ended: pending requests will time out
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            return
        if "id" in told:
            self._times[int(told["id"])].set_result(told)
        else:
            self._figures.put_nowait(told)

    def _send(self, to: Role, parts: list[Buffer]) -> None:
        self._hub.send(self._peers[to], parts)

    def _on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        message = decode(parts)
        match frame := message.frame:
            case Hello():
                self._on_hello(peer, frame, message)
            case Heartbeat() | Drain():
                answer = Heartbeat(0, 0, 0) if isinstance(frame, Heartbeat) else frame
                with suppress(PeerLost):  # the worker may have ended meanwhile
                    self._hub.send(peer, encode(answer))
            case DecodeToken():
                self._tokens.update(message.tokens)
            case DecodeDone():
                self._ends[frame.request_id].set_result(self._tokens.pop(frame.request_id))
            case Error():
                error = RuntimeError(decode_error(message.body()).message)
                self._ends[frame.request_id].set_exception(error)

    def _on_hello(self, peer: bytes, frame: Hello, message: Message) -> None:
        role = Role(frame.role)
        self._peers[role], self._details[role] = peer, decode_map(HelloDetail, message.body())
        limit = WelcomeDetail(max_kv_transfer_bytes=1 << 40)
        self._hub.send(peer, encode(Welcome(EPOCH, HEARTBEAT_MS, 30_000), encode_map(limit)))
        if len(self._peers) == 2:
            decode = self._details[Role.DECODE]
            detail = PeerDetail(
                rank=0,
                epoch=1,
                kv_endpoint=decode.kv_endpoint,
                kv_unasked_bytes=decode.kv_unasked_bytes,
            )
            self._send(Role.PREFILL, encode(Peers(EPOCH, 1), encode_map([detail])))
            self._is_joined.set()


@asynccontextmanager
async def pair(layout: KVLayout, *, is_split: bool = False, **settings: Any) -> AsyncIterator[Pair]:
    """Start two workers with these settings, which include `kv_bind` and maybe `keys`.

    If `is_split`, each worker gets half of the cores.
    """
    cores = sorted(own_cores())
    half = len(cores) // 2
    parts = {Role.DECODE: cores[:half], Role.PREFILL: cores[half:]} if is_split else {}
    context = mp.get_context("spawn")
    it = Pair(layout, open_keys(settings.get("keys"), "router"))
    common = {
        "executor": "still",
        "prefix_cache": False,
        "router": (it.endpoint,),
        "log_level": "warning",
        **settings,
    }
    pipes, processes = {}, []
    try:
        for role in (Role.DECODE, Role.PREFILL):
            pipes[role], theirs = context.Pipe()
            chosen = {**common, "role": role.name.lower()}
            chosen["cores"] = format_cores(parts.get(role, ()))
            process = context.Process(target=serve, args=(theirs, layout, chosen), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
        await it.join(pipes)
        yield it
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.to_thread(process.join, 10)
            process.kill()
        await it.close()
