"""One router process: starts and stops the bus, HTTP, raw TCP and the local workers.

start   starts the bus, raw TCP, HTTP, then the local workers, and writes the endpoints to the log
        and to `ready_file`
drain   `/readyz` returns 503 and new requests are refused; open requests have `drain_s` to end and
        to be received by their clients
close   closes raw TCP and HTTP, then stops the local workers, and last closes the bus, which the
        workers need to deregister
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from router.api.model import ServedModel
from router.api.requests.defaults import read_defaults
from router.api.responses.store import KeptResponses
from router.bus import Bus
from router.config import Config
from router.core.cluster import ProcessState, Readiness, is_free, state_of, status_line, try_this
from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet
from router.core.state import RequestIds
from router.endpoints import announce, named, split_address, url_of
from router.http.administration import Administration
from router.http.application import Application
from router.http.limits import Bodies
from router.http.origin import Origins
from router.http.server import FLUSH_S, HttpServer
from router.http.server import Limits as HttpLimits
from router.local import LocalWorkers
from router.processes.channel import Ask, Question
from router.processes.listeners import Listeners
from router.processes.siblings import Siblings
from router.tcp import Client
from wire.aio.tcp import Limits as TcpLimits
from wire.aio.tcp import Server
from wire.aio.tcp import serve as serve_tcp
from wire.aio.tls import server_context
from wire.aio.zmq import Hub
from wire.errors import ErrorCode
from wire.process.api_keys import open_api_keys
from wire.process.frame_counters import Traffic
from wire.process.keys import open_keys
from wire.process.lifetime import notify
from wire.process.model import ModelError, vocab_size
from wire.process.settings import EX_CONFIG, ConfigError, naming

if TYPE_CHECKING:
    from router.tracing import Tracing

log = structlog.get_logger("router")

# The longest interval between two checks of deadlines and heartbeats.
MAX_TICK_S: Final = 0.1
# The interval between two checks whether all requests have ended during a drain.
DRAIN_TICK_S: Final = 0.02
# How long a process that joins running ones waits for the workers to join it too.
JOIN_S: Final = 10.0
# The interval between two status reports to systemd.
REPORT_S: Final = 1.0
# Files to reserve besides client connections: workers, 128 unauthenticated bus peers, keys.
OTHER_FILES: Final = 256


class Router:
    """All parts of a router process; `start` sets `endpoints`."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        model_fingerprint: str,
        siblings: Siblings | None = None,
    ) -> None:
        self.config = config
        self.endpoints: dict[str, str] = {}
        self._siblings = siblings
        self.fleet = Fleet(
            model_fingerprint=model_fingerprint,
            max_kv_transfer_bytes=config.max_kv_transfer_bytes,
            heartbeat_s=config.heartbeat_ms / 1000,
            stall_s=config.stall_ms / 1000,
            process=siblings.assignment.index if siblings else 0,
            num_processes=siblings.assignment.num_processes if siblings else 1,
        )
        self._planes = {"bus": Traffic(), "tcp": Traffic()}
        self._admin_keys = open_api_keys(config.admin_keys, "admin_keys")
        self._api_keys = open_api_keys(
            config.api_keys, shares_prefixes=config.shared_prefix_cache, beside=self._admin_keys
        )
        with naming("tls_cert"):
            self._tls = server_context(config.tls_cert, config.tls_key)
        self._hub = Hub(
            lambda peer, parts: self.bus.on_message(peer, parts),
            on_lost=lambda peer: self.bus.on_lost(peer),
            keys=open_keys(config.keys, "router"),
            traffic=self._planes["bus"],
        )
        self.bus = Bus(
            self.fleet,
            transmit=self._hub.send,
            forget=self._hub.forget,
            limits=config.limits(vocab_size(model_path)),
            lease_ms=config.lease_ms,
            # Below 2^31, since the epoch grows by one every 2^32 requests and ids have 64 bits.
            request_ids=RequestIds(secrets.randbelow(2**31 - 1) + 1),
            clock=time.monotonic,
        )
        self._tracing = _open_tracing(config)
        self.application = self._application(model_path)
        self.dispatcher.observers += [self._tracing] if self._tracing else []
        self._tcp: Server | None = None
        self._http: HttpServer | None = None
        self.local: LocalWorkers | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._retiring = asyncio.Event()
        # Starts a successor of the only process of the router; returns why that failed, or "".
        self.restart: Callable[[], Awaitable[str]] = _no_restart

    def _application(self, model_path: Path) -> Application:
        config = self.config
        defaults = read_defaults(config.generation_config, model_path)
        if defaults.non_neutral:
            log.info("sampling defaults", file=config.generation_config, **defaults.non_neutral)
        return Application(
            model=ServedModel(
                config.model_name,
                model_path,
                defaults,
                tool_calls=config.tool_call_parser,
                reasoning=config.reasoning_parser,
                trusts_templates=config.trust_request_chat_template,
            ),
            dispatcher=self.dispatcher,
            api_keys=self._api_keys,
            planes=self._planes,
            bodies=Bodies(config.max_body_bytes, config.grace_s),
            origins=Origins(
                config.origins,
                config.hosts,
                checks_host=self._api_keys is None or bool(config.allowed_hosts),
            ),
            kept=KeptResponses(config.max_kept_responses, config.max_kept_bytes),
            siblings=self._siblings,
            is_tracing=self._tracing is not None,
            vllm_metrics=config.vllm_metrics == "on",
            administration=Administration(
                self.fleet,
                self.bus.ask_to_drain,
                self._restart,
                keys=self._admin_keys,
                is_open=self._api_keys is None and config.is_http_local,
            ),
        )

    async def _restart(self) -> str:
        restart = self.restart if self._siblings is None else self._siblings.restart
        return await restart()

    @property
    def dispatcher(self) -> Dispatcher:
        return self.bus.dispatcher

    @property
    def try_this(self) -> str:
        """An example shell command that requests a completion."""
        return try_this(
            self.endpoints["http"],
            self.config.model_name,
            has_text=self.application.has_text,
            has_keys=self._api_keys is not None,
        )

    @property
    def state(self) -> ProcessState:
        """The state of this process, without draining as a reason for not being ready."""
        return state_of(self.dispatcher, time.monotonic())

    async def start(self) -> None:
        """Bind all endpoints and start the local workers.  Raises OSError, naming the endpoint."""
        config, siblings = self.config, self._siblings
        inherited = siblings.inherited if siblings is not None else None
        expected = await siblings.take_bus() if siblings is not None and inherited else None
        try:
            self.endpoints["bus"] = self._hub.bind(config.bus, inherited and inherited.bus)
        except OSError as error:
            hint = "does another router run here? --bus takes another address"
            raise OSError(error.errno, f"{error.strerror}; {hint}") from error
        if siblings is not None and siblings.assignment.is_again:
            await self._wait_for_workers(expected)
        http = await self._listen(inherited)
        self._tasks = [
            asyncio.create_task(http.run_on_loop(), name="http"),
            asyncio.create_task(self._tick(), name="tick"),
        ]
        if siblings is not None:
            siblings.answer = self.answer
            await siblings.listening(self.endpoints, self.try_this, self.listeners())
            return
        self._tasks.append(asyncio.create_task(self._report(), name="status"))
        self.local = LocalWorkers(
            config, self.endpoints["bus"], lambda role, rank: is_free([self.state], role, rank)
        )
        self.local.start()
        announce(config, self.endpoints)

    async def _listen(self, inherited: Listeners | None) -> HttpServer:
        """Serve clients, on inherited sockets if there are any.  Raises OSError."""
        config, is_shared = self.config, self._siblings is not None
        with named("--tcp", config.tcp):
            self._tcp = await serve_tcp(
                *split_address(config.tcp),
                lambda connection: Client(
                    *(connection, self.dispatcher, config.max_requests_per_connection),
                    *(self._api_keys, bool(self._tracing)),
                ),
                TcpLimits(
                    max_connections=config.max_connections,
                    message_s=config.grace_s,
                    idle_s=config.idle_s,
                ),
                self._tls,
                self._planes["tcp"],
                is_shared=is_shared,
                inherited=inherited and socket.socket(fileno=inherited.tcp),
                on_slow_client=self.application.metrics.on_slow_client,
            )
        self.endpoints["tcp"] = url_of("tcp", self._tcp.host, self._tcp.port)
        with named("--http", config.http):
            http_limits = HttpLimits(config.max_connections, config.grace_s, config.idle_s)
            address = split_address(config.http)
            self._http = HttpServer(
                self.application,
                *address,
                http_limits,
                self._tls,
                is_shared=is_shared,
                inherited=inherited and socket.socket(fileno=inherited.http),
                on_slow_client=self.application.metrics.on_slow_client,
            )
        scheme = "http" if self._tls is None else "https"
        self.endpoints["http"] = url_of(scheme, self._http.host, self._http.port)
        return self._http

    def listeners(self) -> Listeners:
        """Return copies of the listening sockets, which the caller closes."""
        assert self._http is not None and self._tcp is not None, "start comes first"
        return Listeners(self._http.listener, self._tcp.listener, self._hub.listener).copy()

    def join(self, siblings: Siblings | None) -> None:
        """Be one of several processes from now on, or no longer."""
        self._siblings = siblings
        if siblings is not None:
            siblings.answer = self.answer

    async def answer(self, question: Question) -> object:
        """Compute the reply to a request of the parent or of another process."""
        match question:
            case Ask.RELEASE_BUS:
                self._hub.stop_accepting()
                self.bus.announce_successor()
                return [worker.name for worker in self.fleet.live]
            case Ask.KEEP_BUS:
                self._hub.accept_again()
            case Ask.RETIRE:  # `until_stopped` ends
                self._retiring.set()
            case _:
                return await self.application.answer(question)
        return None

    async def until_stopped(self, stop: asyncio.Event) -> bool:
        """Serve until `stop` is set or this process retires, and then its remaining clients.

        Return False if a part of the router failed before.

        Raises:
            ConfigError: The router cannot work with these settings.
        """
        ends = [asyncio.create_task(event.wait()) for event in (stop, self._retiring)]
        done, _ = await asyncio.wait([*ends, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self._retiring.is_set():
            await self._finish_clients(stop)
            return True
        for task in done - {*ends}:
            if isinstance(task.exception(), ConfigError):
                task.result()
            log.error("a part of the router broke", part=task.get_name(), exc_info=task.exception())
        return stop.is_set()

    async def _finish_clients(self, stop: asyncio.Event) -> None:
        """Serve the connections that are open, until they have ended or `stop` is set.

        They may send requests for `drain_s` more; requests have all the time they need.
        """
        assert self._http is not None and self._tcp is not None
        log.info("a successor serves; finishing", requests=self._num_open)
        self._http.stop_accepting()
        self._tcp.stop_accepting()
        deadline = time.monotonic() + self.config.drain_s
        while self._tcp.num_connections + len(self._http.server_state.connections):
            if stop.is_set():
                break
            if time.monotonic() > deadline:
                self.application.draining = self.dispatcher.is_draining = True
                if not (self._num_open or self._is_answering):
                    break
            await asyncio.sleep(DRAIN_TICK_S)

    async def drain(self) -> None:
        """Refuse new requests, and wait up to `drain_s` until all responses were sent."""
        self.application.draining = self.dispatcher.is_draining = True
        try:
            async with asyncio.timeout(self.config.drain_s):
                # uvicorn has no event for the end of all responses.
                while self._num_open or self._is_answering:  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_TICK_S)
        except TimeoutError:
            if not self._num_open:
                log.warning("clients did not read their answers before the end of the drain")
                return
            log.warning("requests ended by the drain", requests=self._num_open)
            self.dispatcher.cancel_all(ErrorCode.DRAINING, "the router shut down before the end")

    @property
    def _num_open(self) -> int:
        return self.dispatcher.num_running + self.dispatcher.num_waiting

    @property
    def _is_answering(self) -> bool:
        return any(server is not None and server.is_answering for server in (self._tcp, self._http))

    async def close(self) -> None:
        """Close everything; requests that are still open fail."""
        self.dispatcher.cancel_all(ErrorCode.DRAINING, "the router was told to stop at once")
        if self._tcp is not None:
            await self._tcp.close(FLUSH_S)
        if self._http is not None:
            self._http.should_exit = True
            await asyncio.wait(self._tasks[:1], timeout=2 * FLUSH_S)
        if self.local is not None:
            await self.local.stop(self.config.drain_s)
        elif self._siblings is not None:
            with suppress(ConnectionError):
                await self._siblings.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hub.close(FLUSH_S)
        if self._tracing:
            await asyncio.to_thread(self._tracing.close, FLUSH_S)

    async def _wait_for_workers(self, expected: list[str] | None) -> None:
        """Wait at most JOIN_S for these workers, or without a list for one of each role.

        Meanwhile other processes serve clients.
        """
        deadline = time.monotonic() + JOIN_S
        while time.monotonic() < deadline:
            self.bus.tick()
            ready = {worker.name for worker in self.fleet if worker.is_ready}
            if not self.state.reasons if expected is None else ready.issuperset(expected):
                return
            await asyncio.sleep(MAX_TICK_S)

    async def _tick(self) -> None:
        while True:
            self.bus.tick()
            await asyncio.sleep(min(MAX_TICK_S, self.fleet.heartbeat_s / 4))

    async def _report(self) -> None:
        readiness = Readiness(self.try_this)
        while not self._retiring.is_set():  # then the parent reports
            state = self.state
            notify(f"STATUS={status_line([state])}")
            if not self.application.draining:
                readiness.on_look(state.reasons, time.monotonic())
                if self.local is not None:
                    self.local.check([state])
            await asyncio.sleep(REPORT_S)


def _open_tracing(config: Config) -> Tracing | None:
    if not config.is_tracing:
        return None
    from router.tracing import open_tracing  # only here: the libraries are optional

    return open_tracing(config.otlp_endpoint)


async def serve(
    config: Config,
    model_path: Path,
    model_fingerprint: str,
    stop: asyncio.Event,
    siblings: Siblings | None = None,
    on_start: Callable[[Router], None] = lambda router: None,
) -> int:
    """Run a router process until `stop` is set or it retires; return the exit status."""
    if siblings is not None:
        await siblings.begin()
        own = siblings.assignment
        config = config.for_process(own.num_processes, http=own.http, tcp=own.tcp, bus=own.bus)
    config = with_room(config, allow_many_files())
    try:
        router = Router(config, model_path, model_fingerprint, siblings)
    except ModelError as error:
        log.error("cannot serve this model", reason=str(error))
        return EX_CONFIG
    try:
        await router.start()
        on_start(router)
        notify("READY=1")
        is_well = await router.until_stopped(stop)
        await router.drain()
        return 0 if is_well else 1
    except OSError as error:
        log.error("cannot listen", reason=str(error))
        return 1
    finally:
        await router.close()
        if siblings is not None:
            await siblings.close()


async def _no_restart() -> str:
    return "this router is starting or ending"


def allow_many_files() -> int:
    """Raise the limit on open files as far as the system allows, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS enforces a lower limit than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def with_room(config: Config, num_files: int) -> Config:
    """Lower `max_connections` in the settings if at most `num_files` files may be open.

    Some files are reserved for connections of workers and for reading changed key files.
    """
    # HTTP and raw TCP have this limit each, and with TLS their handshakes have it too.
    num_kinds = 4 if config.tls_cert else 2
    most = max(1, (num_files - min(OTHER_FILES, num_files // 2)) // num_kinds)
    if most >= config.max_connections:
        return config
    log.warning(
        "fewer connections than --max-connections: few files may be open (ulimit -n, LimitNOFILE)",
        max_connections=most,
        open_files=num_files,
    )
    return config.model_copy(update={"max_connections": most})
