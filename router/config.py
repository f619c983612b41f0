"""The router's settings: each can be set by a flag or by the variable ``BATON_<NAME>``.

Port 0 binds any free port; the bound endpoints are written to the log and to `ready_file`.
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
from wire.process.settings import MAX_PORT, SharedSettings, check_endpoint, check_printable, port_of

NumWorkers = Annotated[int, Field(ge=0, le=64)]


class Config(SharedSettings):
    """Take requests over HTTP and raw TCP and place them on prefill and decode workers."""

    # The model.
    served_model_name: str = Field(
        default="", description="the model name for clients; empty: taken from --model"
    )

    generation_config: str = Field(
        default="auto",
        description="the default sampling settings of requests: auto uses the model's "
        "generation_config.json, none means temperature 1 without filters, else a directory with "
        "such a file",
    )

    tool_call_parser: Literal[TOOL_CALL_PARSERS] = Field(  # type: ignore[valid-type]
        default=AUTO,
        description="the format in which the model writes tool calls; auto: from its chat template",
    )
    reasoning_parser: Literal[REASONING_PARSERS] = Field(  # type: ignore[valid-type]
        default=AUTO,
        description="the format in which the model marks its reasoning; auto: from its chat "
        "template",
    )

    trust_request_chat_template: bool = Field(
        default=False,
        description="accept chat templates in requests; a template may run forever, so only if all "
        "clients are trusted",
    )

    # Endpoints.
    http: str = Field(default="127.0.0.1:8000", description="HOST:PORT for the OpenAI API")
    tcp: str = Field(default="127.0.0.1:8001", description="HOST:PORT for raw TCP clients")
    bus: str = Field(
        default="tcp://127.0.0.1:5570", description="ZeroMQ endpoint that workers connect to"
    )
    ready_file: Path | None = Field(
        default=None, description="file for the bound endpoints, as one JSON line once listening"
    )

    # Access control.
    api_keys: Path | None = Field(
        default=None,
        description="file with the API keys of clients, one per line; none: the systemd credential "
        "api_keys, if there is one",
    )
    tls_cert: Path | None = Field(
        default=None, description="certificate chain (PEM) for HTTP and raw TCP"
    )
    tls_key: Path | None = Field(default=None, description="its private key (PEM)")
    allowed_origins: str = Field(
        default="",
        description="web pages that may send requests, separated by commas: "
        "https://chat.example.org; *: any",
    )
    allowed_hosts: str = Field(
        default="",
        description="host names that clients may use for this router, separated by commas, besides "
        "localhost, this machine's name and addresses; *: any. Without API keys, others are "
        "refused",
    )
    insecure: bool = Field(
        default=False, description="allow endpoints that other machines can reach without keys"
    )

    # Limits.
    max_waiting: int = Field(default=1024, ge=0, description="requests that may wait for a worker")
    max_running_per_worker: int = Field(
        default=256, ge=1, description="requests on one worker at a time; others are queued"
    )
    max_connections: int = Field(
        default=4096, ge=1, description="limit for HTTP connections, and for raw TCP connections"
    )
    max_requests_per_connection: int = Field(
        default=256, ge=1, description="open requests on one raw TCP connection"
    )

    max_body_bytes: int = Field(
        default=MAX_BODY_BYTES,
        ge=1024,
        le=64 * 1024 * 1024,
        description="largest HTTP request body; one over the default may delay other clients",
    )
    max_kept_responses: int = Field(
        default=MAX_RESPONSES,
        ge=0,
        description="stored responses that requests can continue (previous_response_id)",
    )
    max_kept_bytes: int = Field(
        default=MAX_BYTES,
        ge=0,
        description="size of all stored responses; beyond it, the client with the most loses some",
    )
    max_attempts: int = Field(
        default=4, ge=1, le=16, description="attempts per request when workers fail; 1: no failover"
    )

    # Timeouts and intervals.
    heartbeat_ms: int = Field(
        default=1000, ge=10, le=60_000, description="interval of heartbeats in both directions"
    )
    lease_ms: int = Field(
        default=30_000,
        ge=100,
        le=3_600_000,
        description="how long an idle transfer, or a request without DECODE_REQUEST, is kept",
    )
    stall_ms: int = Field(
        default=60_000,
        ge=100,
        le=3_600_000,
        description="a worker with a longer step is stalled: its requests move to other workers",
    )
    queue_timeout_ms: int = Field(
        default=30_000, ge=1, le=3_600_000, description="longest wait for a worker with capacity"
    )
    deadline_ms: int = Field(
        default=600_000,
        ge=1,
        le=2**31 - 1,
        description="default deadline of requests, unless they set deadline_ms",
    )
    grace_s: float = Field(
        default=5.0,
        gt=0.0,
        le=600.0,
        description="timeout for the headers of a request and the first frame of a raw TCP client",
    )
    idle_s: float = Field(
        default=120.0,
        gt=0.0,
        le=86_400.0,
        description="timeout of idle connections; keep it longer than that of clients (5 s)",
    )

    # Router processes and local workers.
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="router processes that share --http and --tcp (Linux). Each has its own bus, "
        "on consecutive ports from that of --bus on, and its share of the limits on connections, "
        "waiting and running requests, and stored responses",
    )
    local: tuple[NumWorkers, NumWorkers] = Field(
        default=(0, 0), description="P,D: also run P prefill and D decode workers on this machine"
    )
    local_cores: Sharing = Field(
        default="auto",
        description="CPU cores of the local workers: auto gives each worker a NUMA node and, if "
        "it has enough, cores of its own; split always gives own cores; shared never does",
    )
    worker_args: str = Field(
        default="",
        description="more flags for the local workers, quoted as in a shell: '--num-blocks 64'",
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
        """Refuse flags that must differ between local workers."""
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
        """Refuse endpoints that other machines can reach without keys, unless `insecure`."""
        has_keys = self.keys is not None or credential("router.key") is not None
        has_api_keys = self.api_keys is not None or credential("api_keys") is not None
        make_keys = "make keys with scripts/keys and say --keys DIR"
        make_api_keys = "make one with scripts/keys --api-key FILE and say --api-keys FILE"
        for flag, endpoint, is_guarded, advice in (
            ("--http", self.http, has_api_keys, make_api_keys),
            ("--tcp", self.tcp, has_api_keys, make_api_keys),
            ("--bus", self.bus, has_keys, make_keys),
        ):
            host, _ = split_endpoint(endpoint, flag)
            if not (self.insecure or is_guarded or _is_loopback(host)):
                raise ValueError(
                    f"{flag} {endpoint} can be reached from other machines, and there is no key "
                    f"to tell who may connect: {advice}, or bind 127.0.0.1, or add --insecure if "
                    "you trust everybody on the network"
                )
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
        """Return the bus endpoint of a process: the port plus `index`, or a path with a suffix."""
        start, colon, port = self.bus.rpartition(":")
        if index and self.bus.startswith("ipc://"):
            return f"{self.bus}-{index}"
        is_counted = index and port.isdigit() and int(port)
        return f"{start}{colon}{int(port) + index}" if is_counted else self.bus

    def for_process(self, num_processes: int, **endpoints: str) -> Self:
        """Return the settings of one of several processes, with its share of limits, rounded up."""
        divided = (
            "max_waiting",
            "max_running_per_worker",
            "max_connections",
            "max_kept_responses",
            "max_kept_bytes",
        )
        shares = {name: -(-getattr(self, name) // num_processes) for name in divided}
        of_parent = {"local": (0, 0), "ready_file": None}
        return self.model_copy(update={**shares, **of_parent, **endpoints})

    @property
    def origins(self) -> list[str]:
        """The list in `allowed_origins`."""
        return [origin for each in self.allowed_origins.split(",") if (origin := each.strip())]

    @property
    def hosts(self) -> list[str]:
        """The list in `allowed_hosts`, this machine's name, and the host that HTTP is bound to."""
        named = [host for each in self.allowed_hosts.split(",") if (host := each.strip())]
        bound, _ = split_endpoint(self.http)
        return [*named, socket.gethostname(), *([] if bound == "*" else [bound])]

    @property
    def model_name(self) -> str:
        """The name of the model for clients: `served_model_name`, or the last part of `model`."""
        return self.served_model_name or super().model_name


def split_endpoint(endpoint: str, flag: str = "endpoint") -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``tcp://HOST:PORT``, for a bus also ``ipc://``, into host and port.

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
        return False  # A host name, which may resolve to any address, or "*".
