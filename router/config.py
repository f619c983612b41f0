"""The settings of a router: a field is a flag and the variable ``BATON_<NAME>``.

A port may be 0: the bound endpoints are in the log and in `ready_file`.
"""

from __future__ import annotations

import ipaddress
import shlex
import socket
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from router.api.responses.store import MAX_BYTES, MAX_RESPONSES
from router.cores import Sharing
from router.http.limits import MAX_BODY_BYTES
from router.http.origin import check_origin
from router.text.output_parser import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS
from wire.process.keys import credential
from wire.process.settings import (
    MAKE_KEYS,
    MAX_PORT,
    SharedSettings,
    check_endpoint,
    check_printable,
    open_port,
    port_of,
    setting,
)

NumWorkers = Annotated[int, Field(ge=0, le=64)]


class Config(SharedSettings):
    """Take requests over HTTP and raw TCP and place them on prefill and decode workers."""

    # What is served.
    served_model_name: str = setting("", "the name clients use; empty: taken from --model")

    generation_config: str = setting(
        "auto",
        "what requests are sampled with that do not say: auto is what the model's "
        "generation_config.json recommends, none is temperature 1 and no filter, else a directory "
        "with such a file",
    )

    tool_call_parser: Literal[TOOL_CALL_PARSERS] = setting(  # type: ignore[valid-type]
        AUTO, "how the model writes calls of tools; auto: as its chat template shows"
    )
    reasoning_parser: Literal[REASONING_PARSERS] = setting(  # type: ignore[valid-type]
        AUTO,
        "how the model marks what it thinks before it answers; auto: as its chat template shows",
    )

    trust_request_chat_template: bool = setting(
        False,
        "let requests bring a chat template: one can compute for ever, so only where all who ask "
        "are trusted",
    )

    # Where.
    http: str = setting("127.0.0.1:8000", "HOST:PORT of the OpenAI API")
    tcp: str = setting("127.0.0.1:8001", "HOST:PORT of raw TCP clients")
    bus: str = setting("tcp://127.0.0.1:5570", "ZeroMQ endpoint that workers connect to")
    ready_file: Path | None = setting(
        None, "write the bound endpoints there as one JSON line once listening"
    )

    # Who may connect.
    api_keys: Path | None = setting(
        None,
        "file with the API keys of clients, one a line; none: the systemd credential api_keys, if "
        "there is one",
    )
    tls_cert: Path | None = setting(None, "certificate chain (PEM) for HTTP and raw TCP")
    tls_key: Path | None = setting(None, "its private key (PEM)")
    allowed_origins: str = setting(
        "", "web pages that may ask, with commas between: https://chat.example.org; *: any"
    )
    allowed_hosts: str = setting(
        "",
        "host names that clients may use for this router, with commas between, beside localhost, "
        "this machine's name and addresses; *: any. No other is answered without API keys",
    )
    insecure: bool = setting(False, "allow listening beyond this machine without keys")

    # Limits.
    max_waiting: int = setting(1024, "requests that may wait for a worker", ge=0)
    max_running_per_worker: int = setting(
        256, "requests placed on one worker at a time; the rest wait here", ge=1
    )
    max_connections: int = setting(
        4096, "connections of HTTP clients, and of raw TCP clients", ge=1
    )
    max_requests_per_connection: int = setting(256, "open requests of one raw TCP connection", ge=1)

    max_body_bytes: int = setting(
        MAX_BODY_BYTES,
        "largest body of an HTTP request; beyond the default one may delay the others",
        ge=1024,
        le=64 * 1024 * 1024,
    )
    max_kept_responses: int = setting(
        MAX_RESPONSES, "responses that later ones can go on from (previous_response_id)", ge=0
    )
    max_kept_bytes: int = setting(
        MAX_BYTES, "of all responses that are kept; who keeps most makes room", ge=0
    )
    max_attempts: int = setting(
        4, "tries of a request when workers fail; 1: no failover", ge=1, le=16
    )

    # Times.
    heartbeat_ms: int = setting(1000, "between heartbeats, both ways", ge=10, le=60_000)
    lease_ms: int = setting(
        30_000, "how long an idle transfer or hold is kept", ge=100, le=3_600_000
    )
    stall_ms: int = setting(
        60_000,
        "a worker whose step takes longer is stuck: its requests go elsewhere",
        ge=100,
        le=3_600_000,
    )
    queue_timeout_ms: int = setting(
        30_000, "longest wait for a worker with room", ge=1, le=3_600_000
    )
    deadline_ms: int = setting(
        600_000, "of a request that sets no deadline_ms itself", ge=1, le=2**31 - 1
    )
    grace_s: float = setting(
        5.0,
        "for the headers of a request, and the first frame of a raw TCP client",
        gt=0.0,
        le=600.0,
    )
    idle_s: float = setting(
        120.0,
        "silence of a client with no request; keep it longer than clients do (5 s)",
        gt=0.0,
        le=86_400.0,
    )

    # Processes of our own, and workers.
    processes: int = setting(
        1,
        "router processes that share --http and --tcp (Linux). Each has a bus of its own, on the "
        "ports from that of --bus on, and its part of the limits on connections, waiting and "
        "running requests, and kept responses",
        ge=1,
        le=64,
    )
    local: tuple[NumWorkers, NumWorkers] = setting(
        (0, 0), "P,D: also run P prefill and D decode workers on this machine"
    )
    local_cores: Sharing = setting(
        "auto",
        "cores of the local workers: auto is one node for each, and there some of its own if there "
        "are enough; split is some of its own, however few; shared is all for all",
    )
    worker_args: str = setting(
        "", "more flags of the local workers, quoted as for a shell: '--num-blocks 64'"
    )

    @field_validator("local", mode="wrap")
    @classmethod
    def _explain_local(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(
                "it is P,D: how many prefill and how many decode workers to run here, each from 0 "
                "to 64; --local 1,1 is one of each"
            ) from None

    _check_bus = field_validator("bus")(check_endpoint)
    _check_name = field_validator("served_model_name")(check_printable)

    @field_validator("worker_args")
    @classmethod
    def _check_worker_args(cls, flags: str, info: ValidationInfo) -> str:
        words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
        prefills, decodes = info.data.get("local", (0, 0))
        both = prefills + decodes
        takers = {"--metrics": both, "--kv-bind": decodes, "--kv-segment-port": decodes}
        for flag, value in pairwise([*words, ""]):
            if flag in ("--role", "--rank", "--router"):
                raise ValueError(f"{flag} is not for all of them: --local says it to each worker")
            is_one = value.startswith("ipc://") or port_of(value.rpartition(":")[2])
            if is_one and takers.get(flag, 0) > 1:
                raise ValueError(
                    f"{flag} {value} is one address, which {takers[flag]} workers would take: "
                    "start them with python -m worker, each with one of its own"
                )
        return flags

    @model_validator(mode="after")
    def _refuse_open_ports(self) -> Self:
        has_keys = self.keys is not None or credential("router.key") is not None
        has_api_keys = self.api_keys is not None or credential("api_keys") is not None
        make_api_keys = "make one with scripts/keys --api-key FILE and say --api-keys FILE"
        for flag, endpoint, is_guarded, advice in (
            ("--http", self.http, has_api_keys, make_api_keys),
            ("--tcp", self.tcp, has_api_keys, make_api_keys),
            ("--bus", self.bus, has_keys, MAKE_KEYS),
        ):
            host, _ = split_endpoint(endpoint, flag)
            if not (self.insecure or is_guarded or _is_loopback(host)):
                raise open_port(f"{flag} {endpoint}", f"{advice}, or bind 127.0.0.1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        for origin in self.origins:
            try:
                check_origin(origin)
            except ValueError as error:
                raise ValueError(f"--allowed-origins: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.processes > 1 and sys.platform != "linux":
            raise ValueError(
                f"--processes {self.processes} needs Linux, which divides the connections to one "
                "port among processes: leave it out"
            )
        _, port = split_endpoint(self.bus, "--bus")
        if port and port + self.processes - 1 > MAX_PORT:
            raise ValueError(
                f"--bus {self.bus} is the first of --processes {self.processes} ports, and the "
                f"last would be over {MAX_PORT}: begin with a lower one"
            )
        return self

    def bus_of(self, index: int) -> str:
        """Return the bus endpoint of one process: the next port, or the path with a suffix."""
        start, colon, port = self.bus.rpartition(":")
        if index and self.bus.startswith("ipc://"):
            return f"{self.bus}-{index}"
        is_counted = index and port.isdigit() and int(port)
        return f"{start}{colon}{int(port) + index}" if is_counted else self.bus

    def for_process(self, num_processes: int, **endpoints: str) -> Self:
        """Return the settings of one of so many processes, with its part of limits, rounded up."""
        divided = (
            "max_waiting",
            "max_running_per_worker",
            "max_connections",
            "max_kept_responses",
            "max_kept_bytes",
        )
        parts = {name: -(-getattr(self, name) // num_processes) for name in divided}
        of_parent = {"local": (0, 0), "ready_file": None}
        return self.model_copy(update={**parts, **of_parent, **endpoints})

    @property
    def origins(self) -> list[str]:
        """`allowed_origins`, one by one."""
        return [origin for each in self.allowed_origins.split(",") if (origin := each.strip())]

    @property
    def hosts(self) -> list[str]:
        """`allowed_hosts` one by one, this machine's name, and the host that HTTP is bound to."""
        named = [host for each in self.allowed_hosts.split(",") if (host := each.strip())]
        bound, _ = split_endpoint(self.http)
        return [*named, socket.gethostname(), *([] if bound == "*" else [bound])]

    @property
    def model_name(self) -> str:
        """The model's name for clients: `served_model_name`, or the last part of `model`."""
        return self.served_model_name or super().model_name


def split_endpoint(endpoint: str, flag: str = "endpoint") -> tuple[str, int]:
    """Return the host and port of ``HOST:PORT`` or ``tcp://HOST:PORT``, for a bus also ``ipc://``.

    Raises:
        ValueError: The endpoint is malformed; the message names the flag.
    """
    if flag == "--bus" and endpoint.startswith("ipc://"):
        return "localhost", 0
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    number = port_of(port)
    if not host or "/" in host or number is None:
        raise ValueError(f"{flag} {endpoint!r} is not HOST:PORT with a port from 0 to 65535")
    return host.strip("[]"), number


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A name or "*": it may resolve to anything.
