"""A worker lives in the environment it is given, and in the real ones if none are."""

from __future__ import annotations

import asyncio
import time

from tests.worker.scripted import PATIENCE_S, scripted_router
from wire.aio.zmq import Link
from wire.frames import Role
from worker.app import Worker
from worker.config import Config
from worker.engine.thread import EngineThread
from worker.environment import Environment
from worker.executor.hash import create
from worker.transfer.sockets import KVPlane
from worker.transfer.thread import Copies


def test_the_defaults_are_the_real_things() -> None:
    real = Environment()
    assert (real.clock, real.epoch) == (time.monotonic, time.time_ns)
    assert (real.connect, real.make_plane) == (Link, KVPlane)
    assert (real.make_thread, real.make_copies) == (EngineThread, Copies)


async def test_a_worker_takes_its_epoch_and_its_time_from_them() -> None:
    times: list[float] = []

    def clock() -> float:
        times.append(time.monotonic() + 1000)
        return times[-1]

    async with scripted_router() as router:
        config = Config(role="prefill", num_blocks=16, router=(router.endpoint,))
        stop = asyncio.Event()
        worker = Worker(config, create(), Environment(clock=clock, epoch=lambda: 7))
        task = asyncio.create_task(worker.run(stop))
        await router.until_joined(Role.PREFILL)
        assert router.hellos[0].epoch == 7 and router.peers[Role.PREFILL] == b"prefill-0-7"
        await router.until(lambda: bool(times))
        stop.set()
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
