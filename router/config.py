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
        default="", description="the name clients use; empty: taken from --model"
    )

    generation_config: str = Field(
        default="auto",
        description="what requests are sampled with that do not say: auto is what the model's "
        "generation_config.json recommends, none is temperature 1 and no filter, else a directory "
        "with such a file",
    )

    tool_call_parser: Literal[TOOL_CALL_PARSERS] = Field(  # type: ignore[valid-type]
        default=AUTO,
        description="how the model writes calls of tools; auto: as its chat template shows",
    )
    reasoning_parser: Literal[REASONING_PARSERS] = Field(  # type: ignore[valid-type]
        default=AUTO,
        description="how the model marks what it thinks before it answers; auto: as its chat "
        "template shows",
    )

    trust_request_chat_template: bool = Field(
        default=False,
        description="let requests bring a chat template: one can compute for ever, so only where "
        "all who ask are trusted",
    )

    # Endpoints.
    http: str = Field(default="127.0.0.1:8000", description="HOST:PORT of the OpenAI API")
    tcp: str = Field(default="127.0.0.1:8001", description="HOST:PORT of raw TCP clients")
    bus: str = Field(
        default="tcp://127.0.0.1:5570", description="ZeroMQ endpoint that workers connect to"
    )
    ready_file: Path | None = Field(
        default=None, description="write the bound endpoints there as one JSON line once listening"
    )

    # Access control.
    api_keys: Path | None = Field(
        default=None,
        description="file with the API keys of clients, one a line; none: the systemd credential "
        "api_keys, if there is one",
    )
    tls_cert: Path | None = Field(
        default=None, description="certificate chain (PEM) for HTTP and raw TCP"
    )
    tls_key: Path | None = Field(default=None, description="its private key (PEM)")
    allowed_origins: str = Field(
        default="",
        description="web pages that may ask, with commas between: https://chat.example.org; *: any",
    )
    allowed_hosts: str = Field(
        default="",
        description="host names that clients may use for this router, with commas between, beside "
        "localhost, this machine's name and addresses; *: any. No other is answered without API "
        "keys",
    )
    insecure: bool = Field(
        default=False, description="allow listening beyond this machine without keys"
    )

    # Limits.
    max_waiting: int = Field(default=1024, ge=0, description="requests that may wait for a worker")
    max_running_per_worker: int = Field(
        default=256, ge=1, description="requests placed on one worker at a time; the rest wait here"
    )
    max_connections: int = Field(
        default=4096, ge=1, description="connections of HTTP clients, and of raw TCP clients"
    )
    max_requests_per_connection: int = Field(
        default=256, ge=1, description="open requests of one raw TCP connection"
    )

    max_body_bytes: int = Field(
        default=MAX_BODY_BYTES,
        ge=1024,
        le=64 * 1024 * 1024,
        description="largest body of an HTTP request; beyond the default one may delay the others",
    )
    max_kept_responses: int = Field(
        default=MAX_RESPONSES,
        ge=0,
        description="responses that later ones can go on from (previous_response_id)",
    )
    max_kept_bytes: int = Field(
        default=MAX_BYTES,
        ge=0,
        description="of all responses that are kept; who keeps most makes room",
    )
    max_attempts: int = Field(
        default=4, ge=1, le=16, description="tries of a request when workers fail; 1: no failover"
    )

    # Timeouts and intervals.
    heartbeat_ms: int = Field(
        default=1000, ge=10, le=60_000, description="between heartbeats, both ways"
    )
    lease_ms: int = Field(
        default=30_000,
        ge=100,
        le=3_600_000,
        description="how long an idle transfer or hold is kept",
    )
    stall_ms: int = Field(
        default=60_000,
        ge=100,
        le=3_600_000,
        description="a worker whose step takes longer is stuck: its requests go elsewhere",
    )
    queue_timeout_ms: int = Field(
        default=30_000, ge=1, le=3_600_000, description="longest wait for a worker with room"
    )
    deadline_ms: int = Field(
        default=600_000,
        ge=1,
        le=2**31 - 1,
        description="of a request that sets no deadline_ms itself",
    )
    grace_s: float = Field(
        default=5.0,
        gt=0.0,
        le=600.0,
        description="for the headers of a request, and the first frame of a raw TCP client",
    )
    idle_s: float = Field(
        default=120.0,
        gt=0.0,
        le=86_400.0,
        description="silence of a client with no request; keep it longer than clients do (5 s)",
    )

    # Router processes and local workers.
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="router processes that share --http and --tcp (Linux). Each has a bus of its "
        "own, on the ports from that of --bus on, and its part of the limits on connections, "
        "waiting and running requests, and kept responses",
    )
    local: tuple[NumWorkers, NumWorkers] = Field(
        default=(0, 0), description="P,D: also run P prefill and D decode workers on this machine"
    )
    local_cores: Sharing = Field(
        default="auto",
        description="cores of the local workers: auto is one node for each, and there some of its "
        "own if there are enough; split is some of its own, however few; shared is all for all",
    )
    worker_args: str = Field(
        default="",
        description="more flags of the local workers, quoted as for a shell: '--num-blocks 64'",
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
