"""One worker process: an engine on its thread, a role, and a connection to each router.

`Worker.run` is the life of the process: warm up, register at the routers, serve until a stop is
requested, drain, close.  The event loop only moves bytes, the engine thread computes
(`worker.engine.thread`), and transfer threads copy KV (`worker.transfer.thread`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from wire.frames import DrainAsk, Heartbeat, Role
from wire.identity import Identity
from wire.payloads import MAX_CORES_LENGTH, HelloDetail, encode_map
from wire.process.api_keys import open_api_keys
from wire.process.cores import format_cores, own_cores
from wire.process.frame_counters import Traffic
from wire.process.keys import open_keys
from wire.process.lifetime import bounded, extend_start, keep_watchdog, notify
from wire.process.scrape import ScrapePort
from wire.process.settings import EX_CONFIG, EX_LEFT, EX_RESTART, EX_TEMPFAIL
from worker.assembly import make_engine
from worker.compute.device_errors import EXIT_DEVICE_FAILED, device_error
from worker.config import Config
from worker.engine.instrumented import measured
from worker.engine.outputs import Output
from worker.engine.thread import Pulse, Standstill, Warmup
from worker.environment import Environment, WorkerContext
from worker.executor.contract import Executor, ModelInfo
from worker.link import LinkState, RouterLink
from worker.metrics import Metrics
from worker.roles.decode import DecodeRole
from worker.roles.prefill import PrefillRole
from worker.transfer.thread import SMALL_BYTES

log = structlog.get_logger("worker")

# Interval between two checks of leases; far below any sensible lease.
TICK_S: Final = 0.1
# Interval between heartbeats while the changes of the prefix cache do not fit in one of them.
REST_S: Final = 0.1
# How long the last engine step may take after the drain: another process may be stuck.
STOP_S: Final = 10.0
# How long everything after the drain may take: copying KV, ending other processes and sockets.
CLOSE_S: Final = 20.0
# How long the last blocks may take to be written to disk.
TIERS_S: Final = 5.0
# A step that takes longer makes /livez fail.  A systemd unit allows half of its WatchdogSec=60.
STUCK_S: Final = 60.0
EXIT_CRASHED: Final = 70  # EX_SOFTWARE: systemd restarts the worker
# The exit status after a drain, by who asked for it: a signal, or a router.
_ENDS: Final = {DrainAsk.NOTHING: 0, DrainAsk.LEAVE: EX_LEFT, DrainAsk.RESTART: EX_RESTART}


class Worker:
    """All parts of one worker: the engine, the `role`, a link to each router, the metrics port.

    Raises:
        ValueError: The settings do not fit the model or the machine.
        OSError: The address for KV transfer is already in use.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        environment: Environment | None = None,
        *,
        draft: Executor | None = None,
    ) -> None:
        environment = environment or Environment()
        info = executor.info
        self._config = config
        self._models = [measured(model) for model in (executor, draft) if model is not None]
        self._executor = self._models[0]
        keys = open_keys(config.keys, config.party)
        secret = None if keys is None else keys.pair.secret.encode()
        self._engine = make_engine(config, *self._models, clock=environment.clock, secret=secret)
        self._clock = environment.clock
        self._changed = asyncio.Event()  # wakes `run`
        call = asyncio.get_running_loop().call_soon_threadsafe
        self._thread = environment.make_thread(
            self._engine,
            lambda outputs: call(self._on_outputs, outputs),
            lambda error: call(self._on_crash, error),
        )
        warm_ups = [model.warmup for model in self._models]
        self._warmup = Warmup(warm_ups, environment.clock, lambda: call(self._changed.set))
        self._thread.post(self._warmup.run)  # must be the first call, while no block is in use
        cache = self._engine.cache
        small_bytes = 0 if cache.copies_wait else SMALL_BYTES
        self._copies = environment.make_copies(cache.copies_at_once, small_bytes)
        self._plane = environment.make_plane(info.max_model_len, keys)
        role = Role[config.role.upper()]
        identity = Identity(role, config.rank, environment.epoch())
        parts = cache, self._thread, self._copies, self._plane, environment
        context = WorkerContext(config, identity, *parts)
        make_role = PrefillRole if role is Role.PREFILL else DecodeRole
        self.role: PrefillRole | DecodeRole = make_role(context)
        segments, bus = self.role.segment_traffic, Traffic()
        planes = {"bus": bus, "kv": self._plane.traffic, "kv_segments": segments}
        detail = self._detail(info)
        connect = partial(environment.connect, keys=keys, traffic=bus)
        self._link_parts = identity, detail, self.role, self._on_link, connect
        self.routers = [RouterLink(endpoint, *self._link_parts) for endpoint in config.router]
        self._metrics = Metrics(self._engine, self.role, config, planes, self._peers_up)
        api_keys = open_api_keys(config.api_keys) if config.metrics else None
        self.scrape = ScrapePort(self._metrics.render, self._is_alive, api_keys)
        self._crashed: BaseException | None = None
        self._asked = DrainAsk.NOTHING  # of a router, instead of a signal
        self._is_draining = False
        self._is_heartbeat_due = asyncio.Event()  # wakes `_send_heartbeats`
        self._was_busy = False
        self._is_announced = False
        self._pulse = Pulse(self._thread.post)
        self._standstill = Standstill()

    def _is_alive(self) -> bool:
        return self._standstill.seconds < STUCK_S

    def _detail(self, info: ModelInfo) -> HelloDetail:
        capabilities, cores = self._executor.capabilities, format_cores(own_cores())
        return HelloDetail(
            model=info.name,
            fingerprint=info.fingerprint,
            layout=info.layout,
            block_size=self._config.block_size,
            num_blocks=self._engine.pool.num_blocks,
            max_model_len=info.max_model_len,
            max_kv_transfer_bytes=self._config.max_kv_transfer_bytes,
            arithmetic=(capabilities.arithmetic or self._config.executor)[:256],
            threads=capabilities.num_threads,
            shards=capabilities.num_shards,
            stages=capabilities.num_stages,
            kv_endpoint=self.role.kv_endpoint,
            kv_unasked_bytes=self.role.kv_unasked_bytes,
            num_tier_blocks=self._engine.num_tier_blocks,
            # A longer list, such as every second one of thousands of cores, would be refused.
            cores=cores if len(cores) <= MAX_CORES_LENGTH else "",
        )

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set, all routers refuse, or it crashes; return the exit status."""
        chores = [
            asyncio.create_task(self._watched(chore))
            for chore in (self._send_heartbeats(), self._tick(), keep_watchdog(self._pulse.is_felt))
        ]
        try:
            return await self._serve(stop)
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            with bounded(CLOSE_S, "a copy of KV or a process of its model is stuck", EXIT_CRASHED):
                await self._close()

    async def _serve(self, stop: asyncio.Event) -> int:
        if self._config.metrics:
            await self.scrape.listen(self._config.metrics)
        self._thread.start()
        stopping = asyncio.create_task(stop.wait())
        try:
            while not (self._warmup.is_over or stopping.done()):
                await self._wait_for_change(stopping)
            if self._warmup.is_done:
                for router in self.routers:
                    router.open()
            while not (stopping.done() or self._asked):
                if self._crashed is not None:
                    return self._crash_status
                if all(router.state is LinkState.REFUSED for router in self.routers):
                    is_fenced = all(router.is_fenced for router in self.routers)
                    return EX_TEMPFAIL if is_fenced else EX_CONFIG
                await self._wait_for_change(stopping)
            return await self._drain()
        finally:
            stopping.cancel()

    async def _drain(self) -> int:
        """Refuse new requests, finish the others, and wait until every router confirms the end."""
        notify("STOPPING=1")
        self._is_draining, status = True, _ENDS[self._asked]
        log.info("draining", unfinished=self.role.num_unfinished, drain_s=self._config.drain_s)
        for router in self.routers:
            router.drain(self._config.drain_s)
        try:
            async with asyncio.timeout(self._config.drain_s):
                while self.role.num_unfinished or not all(r.is_drained for r in self.routers):
                    if self._crashed is not None:
                        return self._crash_status
                    await self._wait_for_change()
        except TimeoutError:
            if self.role.num_unfinished:  # otherwise only a router's confirmation is missing
                log.warning("not drained in time", unfinished=self.role.num_unfinished)
        return status

    async def _wait_for_change(self, *others: asyncio.Task[Any]) -> None:
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({changed, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def _peers_up(self) -> dict[str, int]:
        ready = sum(router.state is LinkState.READY for router in self.routers)
        return {"router": ready, "decode": self.role.num_peers_up}

    async def _close(self) -> None:
        await self.scrape.close()
        await self.role.close()
        await self._plane.close()
        for router in self.routers:
            await router.close(1.0)
        if self._thread.stop(wait_s=STOP_S if self._warmup.is_over else 0.0):
            self._copies.close()
            if self._crashed is None:
                self._engine.close_tiers(TIERS_S)
            # A failed device accepts no calls; the end of the process frees its memory.
            for model in () if self._crash_status == EXIT_DEVICE_FAILED else self._models:
                model.shutdown()
        elif self._warmup.is_over:
            log.warning("a step does not end, so this worker ends without it", waited_s=STOP_S)
        metrics = self._executor.metrics()
        log.info(
            "worker stopped",
            steps=metrics.num_steps,
            prefill_p95_s=round(metrics.prefill.p95_s, 6),
            decode_p95_s=round(metrics.decode.p95_s, 6),
            tokens_per_second=round(metrics.tokens_per_second, 1),
            drafted_tokens=self._engine.counters.drafted_tokens,
            accepted_tokens=self._engine.counters.accepted_tokens,
        )

    def _on_outputs(self, outputs: list[Output]) -> None:
        try:
            self.role.on_outputs(outputs)
        except Exception as error:  # the remaining outputs are lost: their requests would hang
            self._on_crash(error)

    def _on_crash(self, error: BaseException) -> None:
        sentence = device_error(error)
        if sentence is None:
            log.error("this worker is broken and ends", exc_info=error)
        elif self._crash_status != EXIT_DEVICE_FAILED:  # otherwise it was logged before
            noticed = "; ".join(getattr(error, "__notes__", ()))
            log.error("the GPU has failed, so this worker ends", reason=sentence, noticed=noticed)
        self._crashed = self._crashed or error
        self._changed.set()

    @property
    def _crash_status(self) -> int:
        is_device = self._crashed is not None and device_error(self._crashed) is not None
        return EXIT_DEVICE_FAILED if is_device else EXIT_CRASHED

    async def _watched(self, chore: Coroutine[None, None, None]) -> None:
        try:
            await chore
        except Exception as error:
            self._on_crash(error)

    def _on_link(self, router: RouterLink) -> None:
        if router.asked and not self._asked:
            log.info("asked to drain", router=router.endpoint, then=router.asked.name.lower())
            self._asked = router.asked
        if router.is_leaving and router.state is LinkState.READY:  # it has just said so
            self._meet_successor(router.endpoint)
        if router.state is LinkState.REFUSED:
            log.error("refused by the router", router=router.endpoint, reason=router.refusal)
        elif router.state is LinkState.READY:
            self._thread.post(lambda engine: engine.pool.republish())
            self._is_heartbeat_due.set()
            if not self._is_announced:
                self._is_announced = True
                notify("READY=1")
        self._changed.set()

    def _meet_successor(self, endpoint: str) -> None:
        """Connect to the router that takes over the endpoint of one that leaves.

        If an earlier successor has failed, the link that was opened for it has reached the leaving
        router, which does not read it, so it must connect again.
        """
        links = [it for it in self.routers if it.endpoint == endpoint and not it.is_leaving]
        for link in links:
            link.reopen_soon()
        if not (links or self._is_draining):
            log.info("the router leaves; meeting its successor", router=endpoint)
            self.routers.append(successor := RouterLink(endpoint, *self._link_parts))
            successor.open()

    async def _close_left(self) -> None:
        """Close the links to routers that have left, each of which has a successor."""
        if self._is_draining:
            return
        left = [it for it in self.routers if it.is_leaving and it.state is not LinkState.READY]
        for router in left:
            self.routers.remove(router)
            await router.close(0.0)

    async def _tick(self) -> None:
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._metrics.loop_lag_s = max(0.0, self._clock() - due)
            self.role.tick(self._clock())
            await self._close_left()
            for router in tuple(self.routers):
                await router.tick(TICK_S)
            is_stepping = self._warmup.is_over and self._thread.is_busy
            self._standstill.tick(TICK_S, self._engine.steps, is_busy=is_stepping)
            was_busy, self._was_busy = self._was_busy, self._is_busy
            if was_busy and not self._was_busy:
                self._is_heartbeat_due.set()  # the router learns at once that all blocks are free
            self._changed.set()  # `_drain` checks again whether requests are unfinished

    @property
    def _is_busy(self) -> bool:
        return not self.role.is_idle or self._thread.is_busy

    async def _send_heartbeats(self) -> None:
        """Send heartbeats at the routers' interval, and at once when the worker becomes idle."""
        while True:
            load = self._engine.load()
            load = msgspec.structs.replace(
                load,
                kv_inflight_bytes=self.role.kv_inflight_bytes,
                step_ms=round(1000 * self._standstill.seconds),
            )
            running, waiting = self._engine.num_running, self._engine.num_waiting
            heartbeat, payload = Heartbeat(self._engine.steps, running, waiting), encode_map(load)
            for router in self.routers:
                if router.state is LinkState.READY:
                    router.send(heartbeat, payload)
            tasks = len(asyncio.all_tasks())
            self._report(
                f"{running} running, {waiting} waiting, {load.used} blocks used, {tasks} tasks"
            )
            self._is_heartbeat_due.clear()
            pause_s = min(router.heartbeat_s for router in self.routers)
            if len(self._engine.pool.journal):
                pause_s = min(pause_s, REST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_heartbeat_due.wait()

    def _report(self, figures: str) -> None:
        """Report the status to systemd; until the first WELCOME, extend its start timeout."""
        if self._is_announced:
            notify(f"STATUS={figures}")
        else:
            extend_start()
            joining = f"joining {', '.join(self._config.router)}"
            notify(f"STATUS={joining if self._warmup.is_over else 'warming up'}")
