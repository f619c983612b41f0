"""The settings of a worker: one declaration is flags, environment, validation and help."""

from __future__ import annotations

from pathlib import Path
from re import fullmatch
from typing import Final, Literal, Self

import msgspec
from pydantic import Field, field_validator, model_validator

from wire.payloads import EndpointOrNone
from wire.process.cores import format_cores, parse_cores
from wire.process.keys import credential
from wire.process.settings import (
    MAX_BYTES,
    MAX_COUNT,
    SharedSettings,
    check_endpoint,
    check_printable,
    port_of,
)

MIB: Final = 1 << 20
LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]", "::1")
WILDCARD_HOSTS: Final = ("*", "0.0.0.0", "[::]")


class Config(SharedSettings):
    """A worker: reads prompts (prefill) or generates from them (decode), as a router asks."""

    role: Literal["prefill", "decode"] = Field(
        default="decode", description="what this worker is asked for"
    )
    rank: int = Field(
        default=0, ge=0, lt=0xFFFFFFFE, description="its number among workers of its role"
    )
    router: tuple[str, ...] = Field(
        default=("tcp://127.0.0.1:5570",),
        description="bus endpoints of the routers to serve",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="what the model computes in; auto is the checkpoint's own on a GPU, on a CPU "
        "bfloat16 for such a checkpoint where the processor multiplies it (AMX or AVX512-BF16), "
        "else float32",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="what keys and values are kept in and sent as, the same on all workers of a "
        "cluster; auto is what --dtype comes to",
    )
    weights: Literal["auto", "int8"] = Field(
        default="auto",
        description="what the model's matrices are kept in: auto is what the checkpoint has, or "
        "--dtype; int8 rounds them to 8 bits when they are loaded, on a CPU, for steps that wait "
        "for memory; the same on all workers of a cluster",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes side by side that share each layer: its heads, columns and experts",
    )
    pipeline_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes one behind the other that share the layers; with both, the product",
    )
    rendezvous: str = Field(
        default="",
        description="where the processes of a worker meet: tcp://HOST:PORT of process 0, "
        "file:///PATH of a new file; empty: process 0 starts the others on this machine",
    )
    process: int = Field(
        default=0, ge=0, lt=4096, description="with --rendezvous, which of them this is; 0 leads"
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="threads that compute, in each process; 0 is what OMP_NUM_THREADS says, and "
        "without it one for each physical core that this worker may use",
    )
    cores: str = Field(
        default="",
        description="cores of this machine that the worker runs on, as in 0-3,8; empty: any",
    )
    max_model_len: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="longest sequence in tokens; 0 is what the model was made for",
    )
    block_size: int = Field(default=16, ge=1, le=4096, description="tokens in a KV block")
    num_blocks: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="KV blocks; 0 is as many as --kv-cache-bytes holds",
    )
    kv_cache_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_BYTES,
        description="memory for the KV cache, and for states; 0 is what is left of --memory-share "
        "on a GPU, 256 MiB elsewhere",
    )
    max_ubatch_tokens: int = Field(
        default=0,
        ge=0,
        description="most tokens in one step; 0 is 512, or 1024 where prompts only are read",
    )
    max_sbatch_sequences: int = Field(default=256, ge=1, description="most sequences in one step")
    prefer_pure_decode: bool = Field(
        default=False,
        description="no prompts in a step that generates: while something does, they take turns",
    )
    dynamic_batching: bool = Field(
        default=True, description="new requests join running ones; off: all have to end first"
    )
    prefix_cache: bool = Field(
        default=True, description="keep the KV of ended requests for shared prefixes"
    )
    ageing_s: float = Field(
        default=1.0, gt=0, le=3600, description="seconds of waiting that outweigh one priority step"
    )
    swap_bytes: int = Field(
        default=0, ge=0, description="host memory for the KV of preempted requests; 0: recompute"
    )
    speculate: str = Field(
        default="",
        description="draft up to K tokens a step, 64 at most: ngram:K from the text so far, "
        "draft:K:MODEL with a smaller model of the same tokenizer (a decode worker loads it); "
        "empty: off",
    )
    kv_bind: str = Field(
        default="tcp://127.0.0.1:0", description="where a decode worker takes KV in"
    )
    kv_advertise: str = Field(
        default="",
        description="the KV endpoint that others should connect to; empty is the bound one",
    )
    segment_bytes: int = Field(
        default=2 * MIB, ge=1 * MIB, le=4 * MIB, description="size of a KV segment on the wire"
    )
    credit_bytes: int = Field(
        default=16 * MIB,
        ge=4 * MIB,
        description="bytes one transfer may have under way unacknowledged; if its KV is read in "
        "shared memory up to 32 MiB, on a GPU up to 512 MiB, but beyond this value no more than an "
        "eighth of --max-kv-inflight-bytes, on a GPU a quarter",
    )
    max_kv_inflight_bytes: int = Field(
        default=512 * MIB,
        ge=4 * MIB,
        description="bytes all transfers to a decode worker may have under way",
    )
    kv_unasked_bytes: int = Field(
        default=2 * MIB,
        ge=0,
        le=MAX_BYTES,
        description="the largest KV that a decode worker takes along with its offer, which saves "
        "small prompts a round trip; 0: none",
    )
    kv_shared_memory: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: a decode worker copies KV out of the memory, the host's or a GPU's, of "
        "a prefill worker of the same user on the same machine; off: all KV is sent",
    )
    kv_segment_port: str = Field(
        default="auto",
        description="the port where KV over TCP comes on connections of its own, sealed with "
        "AES-GCM where there are keys: faster than through --kv-bind, which takes it where nobody "
        "gets through to this port; on the host of --kv-bind; auto: any free one; off: none, and "
        "none of others is used",
    )
    lease_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="how long KV is kept for a peer that says nothing; 0 is what the router says",
    )
    metrics: str = Field(
        default="",
        description="HOST:PORT of a /metrics of this worker's own; empty: none",
    )
    api_keys: Path | None = Field(
        default=None,
        description="file with the API keys that --metrics asks for, one a line; none: the systemd "
        "credential api_keys, if there is one",
    )
    insecure: bool = Field(
        default=False,
        description="allow --kv-bind and --metrics beyond this machine without keys",
    )
    hash_step_ms: float = Field(
        default=0.0, ge=0, le=60_000, description="hash executor: time of a step"
    )

    @field_validator("router")
    @classmethod
    def _check_routers(cls, routers: tuple[str, ...]) -> tuple[str, ...]:
        if not routers:
            raise ValueError("names no router: say where one has its --bus, tcp://HOST:PORT")
        if len(set(routers)) < len(routers):
            raise ValueError("names a router twice")
        for endpoint in routers:
            if fullmatch("tcp://.+:0+", check_endpoint(endpoint)):
                raise ValueError(f"{endpoint!r}: a router is at a port from 1 to 65535")
        return routers

    @field_validator("cores")
    @classmethod
    def _check_cores(cls, cores: str) -> str:
        return format_cores(parse_cores(cores))

    _check_kv_bind = field_validator("kv_bind")(check_endpoint)

    @field_validator("kv_segment_port")
    @classmethod
    def _check_segment_port(cls, port: str) -> str:
        if port not in ("auto", "off") and not port_of(port):
            raise ValueError(f"{port!r} is neither auto, off nor a port from 1 to 65535")
        return port

    @field_validator("kv_advertise")
    @classmethod
    def _check_kv_advertise(cls, endpoint: str) -> str:
        try:  # What HELLO may say, so that the router does not refuse it.
            return msgspec.convert(endpoint, EndpointOrNone)
        except msgspec.ValidationError:
            raise ValueError(
                f"{endpoint!r} is nowhere to connect to: give tcp://HOST:PORT with a host, no "
                "wildcard, and a port from 1 to 65535, or ipc://PATH"
            ) from None

    @field_validator("speculate")
    @classmethod
    def _check_speculate(cls, setting: str) -> str:
        found = fullmatch(r"ngram:([0-9]+)|draft:([0-9]+):.+", check_printable(setting))
        if found is not None:
            # Here: a router looks at this declaration too, and should not load an engine for it.
            from worker.engine.speculation import checked

            checked(int(found[1] or found[2]))
        elif setting:
            raise ValueError("neither ngram:K nor draft:K:MODEL")
        return setting

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        if not self.metrics:
            return self
        host, _, port = self.metrics.rpartition(":")
        if not host or port_of(port) is None:
            raise ValueError(f"--metrics {self.metrics!r} is not HOST:PORT with a port to 65535")
        is_guarded = self.api_keys is not None or credential("api_keys") is not None
        if host not in LOOPBACK_HOSTS and not (is_guarded or self.insecure):
            raise ValueError(
                f"--metrics {self.metrics} can be reached from other machines, and there is no key "
                "to tell who may read: make one with scripts/keys --api-key FILE and say "
                "--api-keys FILE, or listen on 127.0.0.1, or add --insecure if you trust everybody "
                "on the network"
            )
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.num_processes > 1 and self.executor != "torch":
            raise ValueError(
                f"--tensor-parallel and --pipeline-parallel share a model of --executor torch, not "
                f"of {self.executor!r}; leave them out"
            )
        if self.process >= self.num_processes:
            raise ValueError(
                f"--process is {self.process}, of {self.num_processes} processes "
                f"(--tensor-parallel {self.tensor_parallel} x --pipeline-parallel "
                f"{self.pipeline_parallel}); the last is {self.num_processes - 1}"
            )
        if self.process and not self.rendezvous:
            raise ValueError("--process is for --rendezvous: say where the processes meet")
        if self.rendezvous and self.num_processes == 1:
            raise ValueError(
                f"--rendezvous {self.rendezvous} is for several processes: say how many with "
                "--tensor-parallel or --pipeline-parallel, or leave it out"
            )
        found = fullmatch(r"tcp://(.+):(.*)|file:///.+", self.rendezvous or "file:///-")
        if found is None or (found[2] is not None and not port_of(found[2])):
            raise ValueError(
                f"--rendezvous {self.rendezvous!r} is neither tcp://HOST:PORT, with a port from 1 "
                "to 65535, nor file:///PATH"
            )
        is_open = found[1] is not None and found[1] not in LOOPBACK_HOSTS
        if is_open and not (self.has_keys or self.insecure):
            raise ValueError(
                f"--rendezvous {self.rendezvous} can be reached from other machines, and there is "
                "no key to tell who may connect: make keys with scripts/keys and say --keys DIR to "
                "all processes, or add --insecure if you trust everybody on the network"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        host = self.kv_bind.removeprefix("tcp://").rpartition(":")[0]
        is_open = self.kv_bind.startswith("tcp://") and host not in LOOPBACK_HOSTS
        if is_open and not (self.has_keys or self.insecure):
            raise ValueError(
                f"--kv-bind {self.kv_bind} can be reached from other machines, and there is no key "
                "to tell who may connect: make keys with scripts/keys and say --keys DIR, or bind "
                "127.0.0.1, or add --insecure if you trust everybody on the network"
            )
        if host in WILDCARD_HOSTS and not self.kv_advertise:
            raise ValueError(
                f"--kv-advertise is missing: others cannot connect to {self.kv_bind}; say under "
                "which address they reach this machine, for example --kv-advertise tcp://10.0.0.5:5600"
            )
        if self.credit_bytes > self.max_kv_inflight_bytes:
            raise ValueError(
                f"--credit-bytes {self.credit_bytes} is over --max-kv-inflight-bytes "
                f"{self.max_kv_inflight_bytes}"
            )
        if self.kv_unasked_bytes > self.credit_bytes:
            raise ValueError(
                f"--kv-unasked-bytes {self.kv_unasked_bytes} is over --credit-bytes "
                f"{self.credit_bytes}"
            )
        return self

    @property
    def num_processes(self) -> int:
        """How many processes compute the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def party(self) -> str:
        """Whose key this worker has."""
        return f"{self.role}-{self.rank}"

    @property
    def has_keys(self) -> bool:
        """Whether this worker was given keys."""
        return self.keys is not None or credential(f"{self.party}.key") is not None

    @property
    def step_tokens(self) -> int:
        """The most tokens in one step: more where nobody generates and waits for it."""
        return self.max_ubatch_tokens or (1024 if self.role == "prefill" else 512)

    @property
    def draft_model(self) -> str | None:
        """The draft model named by `speculate`, if this worker loads one."""
        kind, _, rest = self.speculate.partition(":")
        return rest.partition(":")[2] if kind == "draft" and self.role == "decode" else None

    @property
    def num_drafts(self) -> int:
        """K of `speculate`, 0 if it is off."""
        return int(self.speculate.split(":")[1]) if self.speculate else 0
