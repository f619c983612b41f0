"""The router's settings: each can be set by a flag or by the variable ``BATON_<NAME>``.

Port 0 binds any free port; the bound endpoints are written to the log and to `ready_file`.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from importlib.util import find_spec
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
from router.core.state import Limits
from router.cores import Sharing, num_engines
from router.http.limits import MAX_BODY_BYTES
from router.http.origin import check_origin, is_loopback
from router.text.output_parser import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS
from wire.frames import MAX_TOKEN_ID
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


def has_otel() -> bool:
    """Return whether the libraries of the extra `otel` are installed."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a parent package
        return False


class Config(SharedSettings):
    """Take requests over HTTP and raw TCP and place them on prefill and decode workers."""

    served_model_name: str = setting(
        "", "the model name for clients; empty: taken from --model", begins="Model"
    )

    generation_config: str = setting(
        "auto",
        "the default sampling settings of requests: auto uses the model's generation_config.json, "
        "none means temperature 1 without filters, else a directory with such a file",
    )

    tool_call_parser: Literal[TOOL_CALL_PARSERS] = setting(  # type: ignore[valid-type]
        AUTO, "the format in which the model writes tool calls; auto: from its chat template"
    )
    reasoning_parser: Literal[REASONING_PARSERS] = setting(  # type: ignore[valid-type]
        AUTO,
        "the format in which the model marks its reasoning; auto: from its chat template",
    )

    trust_request_chat_template: bool = setting(
        False,
        "accept chat templates in requests; a template may run forever, so only if all clients are "
        "trusted",
    )

    http: str = setting("127.0.0.1:8000", "HOST:PORT for the OpenAI API", begins="Endpoints")
    tcp: str = setting("127.0.0.1:8001", "HOST:PORT for raw TCP clients")
    bus: str = setting("tcp://127.0.0.1:5570", "ZeroMQ endpoint that workers connect to")
    ready_file: Path | None = setting(
        None, "file for the bound endpoints, as one JSON line once listening"
    )

    api_keys: Path | None = setting(
        None,
        "file with the API keys of clients, one per line; none: the systemd credential api_keys, "
        "if there is one",
        begins="Access control",
    )
    admin_keys: Path | None = setting(
        None,
        "file with the API keys that may drain workers, restart the cluster and replay requests; "
        "none: the systemd credential admin_keys, if there is one. Without any, everybody on this "
        "machine may, if --http is on loopback and there are no API keys",
    )
    shared_prefix_cache: bool = setting(
        False,
        "let requests of different API keys share cached prefixes; a client can then find out by "
        "time or cached_tokens what another client asked",
    )
    tls_cert: Path | None = setting(None, "certificate chain (PEM) for HTTP and raw TCP")
    tls_key: Path | None = setting(None, "its private key (PEM)")
    allowed_origins: str = setting(
        "",
        "web pages that may send requests, separated by commas: https://chat.example.org; *: any",
    )
    allowed_hosts: str = setting(
        "",
        "host names that clients may use for this router, separated by commas, besides localhost, "
        "this machine's name and addresses; *: any. Without API keys, others are refused",
    )
    insecure: bool = setting(False, "allow endpoints that other machines can reach without keys")

    max_waiting: int = setting(1024, "requests that may wait for a worker", begins="Limits", ge=0)
    max_running_per_worker: int = setting(
        256, "requests on one worker at a time; others are queued", ge=1
    )
    local_prefill: Literal["auto", "off"] = setting(
        "auto",
        "whether decode workers prefill prompts themselves: auto does where that costs less time, "
        "or where there is no prefill worker",
    )
    max_connections: int = setting(
        4096, "limit for HTTP connections, and for raw TCP connections", ge=1
    )
    max_requests_per_connection: int = setting(256, "open requests on one raw TCP connection", ge=1)

    max_body_bytes: int = setting(
        MAX_BODY_BYTES,
        "largest HTTP request body; one over the default may delay other clients",
        ge=1024,
        le=64 * 1024 * 1024,
    )
    max_kept_responses: int = setting(
        MAX_RESPONSES, "stored responses that requests can continue (previous_response_id)", ge=0
    )
    max_kept_bytes: int = setting(
        MAX_BYTES,
        "size of all stored responses; beyond it, the client with the most loses some",
        ge=0,
    )
    request_history: int = setting(
        10_000,
        "requests to remember for GET /v1/requests/ID, which says why a prompt was not cached; 0: "
        "none",
        ge=0,
        le=10_000_000,
    )
    request_history_bytes: int = setting(
        64 * 1024 * 1024,
        "size of the tokens of remembered requests, 4 bytes each, with which prompts are compared",
        ge=0,
    )
    keep_requests: str = setting(
        "",
        "clients whose requests `baton verify` may replay: all, or names of API keys, which "
        "GET /v1/requests/ID shows as client, separated by commas; needs --request-history and "
        "takes a part of --request-history-bytes",
    )
    vllm_metrics: Literal["on", "off"] = setting(
        "on", "whether /metrics has the names that dashboards of vLLM read, vllm:…, too"
    )
    otlp_endpoint: str = setting(
        "",
        "export OpenTelemetry spans of requests to this collector, by OTLP over HTTP: "
        "http://127.0.0.1:4318 (needs baton-serve[otel]; OTEL_* variables apply too)",
    )
    max_attempts: int = setting(
        4, "attempts per request when workers fail; 1: no failover", ge=1, le=16
    )

    heartbeat_ms: int = setting(
        1000,
        "interval of heartbeats in both directions",
        begins="Timeouts and intervals",
        ge=10,
        le=60_000,
    )
    lease_ms: int = setting(
        30_000,
        "how long an idle transfer, or a request without DECODE_REQUEST, is kept",
        ge=100,
        le=3_600_000,
    )
    stall_ms: int = setting(
        60_000,
        "a worker with a longer step is stalled: its requests move to other workers",
        ge=100,
        le=3_600_000,
    )
    queue_timeout_ms: int = setting(
        600_000,
        "longest wait for a worker with capacity; at most 30 s while a role has no worker",
        ge=1,
        le=3_600_000,
    )
    deadline_ms: int = setting(
        600_000, "default deadline of requests, unless they set deadline_ms", ge=1, le=2**31 - 1
    )
    grace_s: float = setting(
        5.0,
        "timeout for the headers of a request and the first frame of a raw TCP client",
        gt=0.0,
        le=600.0,
    )
    idle_s: float = setting(
        120.0,
        "timeout of idle connections; keep it longer than that of clients (5 s)",
        gt=0.0,
        le=86_400.0,
    )

    processes: int = setting(
        1,
        "router processes that share --http and --tcp (Linux). Each has its own bus, on "
        "consecutive ports from that of --bus on, and its share of the limits on connections, "
        "waiting and running requests, and stored responses",
        begins="Router processes and local workers",
        ge=1,
        le=64,
    )
    local: Annotated[tuple[NumWorkers, ...], Field(min_length=1, max_length=2)] = setting(
        (0, 0),
        "P,D: also run P prefill and D decode workers on this machine; N: N workers of role any; "
        "auto, as `baton serve` has it: one of role any for each NUMA node, or one if there is an "
        "NVIDIA GPU",
        title="P,D|N|auto",
    )
    local_cores: Sharing = setting(
        "auto",
        "CPU cores of the local workers: auto gives each worker a NUMA node and, if it has enough, "
        "cores of its own; split always gives own cores; shared never does",
    )
    worker_args: str = setting(
        "", "more flags for the local workers, quoted as in a shell: '--num-blocks 64'"
    )

    @field_validator("local", mode="wrap")
    @classmethod
    def _explain_local(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return (num_engines(),) if value == "auto" else read(value)
        except ValidationError:
            raise ValueError(
                "it is P,D: how many prefill and how many decode workers to run here, each from 0 "
                "to 64; --local 1,1 is one of each; --local 2 is two workers that do both; "
                "--local auto is as many of those as this machine has use for"
            ) from None

    _check_bus = field_validator("bus")(check_endpoint)
    _check_name = field_validator("served_model_name")(check_printable)

    @field_validator("worker_args")
    @classmethod
    def _check_worker_args(cls, flags: str, info: ValidationInfo) -> str:
        """Refuse flags that must differ between local workers."""
        words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
        local = info.data.get("local", (0, 0))
        receivers = local[-1]
        takers = {"--metrics": sum(local), "--kv-bind": receivers, "--kv-segment-port": receivers}
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
        make_api_keys = "make one with `baton keys --api-key FILE` and say --api-keys FILE"
        for flag, endpoint, is_guarded, advice in (
            ("--http", self.http, has_api_keys, make_api_keys),
            ("--tcp", self.tcp, has_api_keys, make_api_keys),
            ("--bus", self.bus, has_keys, MAKE_KEYS),
        ):
            host, _ = split_endpoint(endpoint, flag)
            if not (self.insecure or is_guarded or is_loopback(host)):
                raise open_port(f"{flag} {endpoint}", f"{advice}, or bind 127.0.0.1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        for origin in self.origins:
            try:
                check_origin(origin)
            except ValueError as error:
                raise ValueError(f"--allowed-origins: {error}") from None
        return self

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp_endpoint(cls, endpoint: str) -> str:
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ValueError("it is the URL of a collector, such as http://127.0.0.1:4318")
        if endpoint and not has_otel():
            raise ValueError("OpenTelemetry is not installed: pip install 'baton-serve[otel]'")
        return endpoint

    @property
    def is_tracing(self) -> bool:
        """Whether spans are exported, because of `otlp_endpoint` or of OpenTelemetry's variables.

        They are made of the request history, so without it there are none.
        """
        names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        is_wanted = bool(self.otlp_endpoint) or any(os.environ.get(name) for name in names)
        return is_wanted and self.request_history > 0 and has_otel()

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

    def limits(self, num_tokens: int | None = None) -> Limits:
        """Return the limits of the core; `num_tokens` is the size of the vocabulary, if known."""
        return Limits(
            max_waiting=self.max_waiting,
            max_running_per_worker=self.max_running_per_worker,
            queue_timeout_s=self.queue_timeout_ms / 1000,
            lease_s=self.lease_ms / 1000,
            deadline_s=self.deadline_ms / 1000,
            max_attempts=self.max_attempts,
            retry_burst=4 * self.max_running_per_worker,
            vocab_size=num_tokens or MAX_TOKEN_ID + 1,
            local_prefill=self.local_prefill == "auto",
            max_records=self.request_history,
            max_record_bytes=self.request_history_bytes,
            keep_requests=frozenset(_listed(self.keep_requests)),
        )

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
            "request_history",
            "request_history_bytes",
        )
        shares = {name: -(-getattr(self, name) // num_processes) for name in divided}
        of_parent = {"local": (0, 0), "ready_file": None}
        return self.model_copy(update={**shares, **of_parent, **endpoints})

    @property
    def local_workers(self) -> list[tuple[str, int]]:
        """Role and rank of each worker of `local`; decode workers come first."""
        roles = ("any",) if len(self.local) == 1 else ("decode", "prefill")
        counts = zip(roles, reversed(self.local), strict=True)
        return [(role, rank) for role, count in counts for rank in range(count)]

    @property
    def origins(self) -> list[str]:
        """The list in `allowed_origins`."""
        return _listed(self.allowed_origins)

    @property
    def hosts(self) -> list[str]:
        """The list in `allowed_hosts`, this machine's name, and the host that HTTP is bound to."""
        bound, _ = split_endpoint(self.http)
        return [
            *_listed(self.allowed_hosts),
            socket.gethostname(),
            *([] if bound == "*" else [bound]),
        ]

    @property
    def is_http_local(self) -> bool:
        """Whether only this machine can reach the HTTP endpoint."""
        return is_loopback(split_endpoint(self.http)[0])

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


def _listed(text: str) -> list[str]:
    return [item for each in text.split(",") if (item := each.strip())]
