"""KV between workers of one GPU: real processes, real sockets, and one kernel for a segment.

The GPU is a CPU: its driver and kernels are those of `tests.kernels.shim`.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from msgspec import structs

from kernels.cuda import staging
from kernels.cuda.device_memory import DeviceMemory
from tests.gpu.system import cpu_texts
from tests.kernels.shim.driver import driver as driver
from tests.kernels.shim.lane import CpuLane
from tests.worker.scripted import PATIENCE_S, ScriptedRouter, pair
from wire.errors import ErrorCode, TransferFailed
from wire.frames import Cancel, PrefillDone, Role, Tag
from wire.options import Options
from wire.process.model import locate
from wire.transfer import KVReceiver, Segment
from worker.compute.kv_cache import TorchKVCache
from worker.executor.torch import TorchExecutor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
ROOT = Path(__file__).parents[3]
PROMPTS = [[(7 * i + start) % 900 + 1 for i in range(67)] for start in (0, 400)]
NUM_TOKENS = 4
OPTIONS = Options(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_blocks": 32, "kv_unasked_bytes": 0}


@pytest.fixture
def load(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[[], TorchExecutor]:
    """How an executor of this process is loaded whose KV lies on the device."""
    monkeypatch.setattr(staging, "SIZES", (512, 2048))
    lane = CpuLane(dtype=torch.float32)
    make_cache = partial(TorchKVCache, make_lane=lambda _: lane)
    monkeypatch.setattr("worker.executor.torch.TorchKVCache", make_cache)
    return lambda: TorchExecutor.load(locate("demo"), name="demo", device="cpu", dtype="float32")


async def served(router: ScriptedRouter, request_id: int, prompt: list[int]) -> list[int]:
    """Return what one request is answered."""
    router.prefill(request_id, prompt, OPTIONS)
    done = await router.receive(Tag.PREFILL_DONE)
    first = int.from_bytes(done.body()[:8], "little")
    router.decode(request_id, [*prompt, first], NUM_TOKENS - 1, OPTIONS)
    tokens = await router.tokens(NUM_TOKENS - 1)
    await router.receive(Tag.DECODE_DONE)
    return [first, *tokens]


class Copies:
    """The copies between memory of devices in this process; each can be held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes: list[int] = []
        self.has_begun, self.may_go_on = asyncio.Event(), threading.Event()
        self.may_go_on.set()
        loop, copy = asyncio.get_running_loop(), DeviceMemory.copy

        def watched(memory: DeviceMemory, places: Sequence[int], size: int, *rest: Any) -> int:
            loop.call_soon_threadsafe(self.has_begun.set)
            assert self.may_go_on.wait(PATIENCE_S)
            self.num_bytes.append(size * len(places))
            return copy(memory, places, size, *rest)

        monkeypatch.setattr(DeviceMemory, "copy", watched)


@pytest.mark.parametrize(("block_size", "is_on"), [(16, True), (32, True), (16, False)])
async def test_kv_is_copied_on_the_device_and_the_text_is_the_same(
    load: Callable[[], TorchExecutor],
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    is_on: bool,
) -> None:
    copies, wanted = Copies(monkeypatch), cpu_texts(PROMPTS, NUM_TOKENS)
    settings = SETTINGS | {"block_size": block_size, "kv_shared_memory": "auto" if is_on else "off"}
    with structlog.testing.capture_logs() as logs:
        prefill, decode = SETTINGS | {"executor": load()}, settings | {"executor": load()}
        async with pair(prefill=prefill, decode=decode) as router:
            for request_id, prompt in enumerate(PROMPTS, 1):
                assert await served(router, request_id, prompt) == wanted[request_id - 1]
            await router.until_free(Role.DECODE, Role.PREFILL)
    read = [entry for entry in logs if entry["event"] == "KV is read from memory"]
    assert [entry["kind"] for entry in read] == ["cuda"] * is_on, "mapped once for all transfers"
    # Four whole blocks of each prompt, by one kernel; three tokens are sent.
    token_bytes = load().info.layout.token_bytes
    assert copies.num_bytes == [64 * token_bytes] * 2 * is_on


async def test_a_copy_that_outlives_its_transfer_is_of_other_bytes_and_refused(
    load: Callable[[], TorchExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, refused, verify = Copies(monkeypatch), [], KVReceiver.verify

    def watched(receiver: KVReceiver, segment: Segment, digest: int | None = None) -> None:
        try:
            verify(receiver, segment, digest)
        except TransferFailed as error:
            refused.append(error.message)
            raise

    monkeypatch.setattr(KVReceiver, "verify", watched)
    copies.may_go_on.clear()
    one_prompt = SETTINGS | {"executor": load(), "num_blocks": 5}
    async with pair(prefill=one_prompt, decode=SETTINGS | {"executor": load()}) as router:
        router.prefill(1, PROMPTS[0], OPTIONS)
        await router.receive(Tag.PREFILL_DONE)
        await asyncio.wait_for(copies.has_begun.wait(), PATIENCE_S)
        router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
        await router.until_free(Role.PREFILL)
        # Into the same blocks.
        router.prefill(2, PROMPTS[1], structs.replace(OPTIONS, max_tokens=1))
        assert (await router.receive(Tag.PREFILL_DONE)).frame == PrefillDone(2, 0)
        copies.may_go_on.set()
        await router.until_free(Role.DECODE)
    assert len(refused) == 1 and "wrong digest" in refused[0]
