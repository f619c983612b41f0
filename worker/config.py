"""A worker's settings: each field declares a flag, an environment variable, checks and help."""

from __future__ import annotations

from pathlib import Path
from re import fullmatch
from typing import Final, Literal, Self

import msgspec
from pydantic import field_validator, model_validator

from wire.payloads import EndpointOrNone
from wire.process.cores import format_cores, parse_cores
from wire.process.keys import credential
from wire.process.settings import (
    MAKE_KEYS,
    MAX_BYTES,
    MAX_COUNT,
    SharedSettings,
    check_endpoint,
    check_printable,
    open_port,
    port_of,
    setting,
)

MIB: Final = 1 << 20
LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]", "::1")
WILDCARD_HOSTS: Final = ("*", "0.0.0.0", "[::]")


class Config(SharedSettings):
    """A worker: prefills prompts or decodes, as its --role says, when routers request it."""

    role: Literal["prefill", "decode", "any"] = setting(
        "decode", "prefill, decode, or any: both, as routers request", begins="Place in the cluster"
    )
    rank: int = setting(
        0,
        "number of this worker among the prefill workers, or among the decode and any workers",
        ge=0,
        lt=0xFFFFFFFE,
    )
    router: tuple[str, ...] = setting(
        ("tcp://127.0.0.1:5570",), "bus endpoints of the routers to serve"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "type the model computes in; auto: the checkpoint's on a GPU; on a CPU bfloat16 if the "
        "checkpoint and the processor (AMX, AVX512-BF16) have it, else float32",
        begins="Model",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "type of keys and values, the same on all workers of a cluster; auto: as --dtype"
    )
    weights: Literal["auto", "int8"] = setting(
        "auto",
        "type of the model's matrices, the same on all workers of a cluster; auto: as in the "
        "checkpoint, or --dtype; int8: rounded to 8 bits while loading (CPU only)",
    )
    tensor_parallel: int = setting(
        1,
        "processes that share each layer: its heads, columns and experts",
        begins="Processes and cores",
        ge=1,
        le=64,
    )
    pipeline_parallel: int = setting(
        1, "processes that divide the layers; times --tensor-parallel in all", ge=1, le=64
    )
    rendezvous: str = setting(
        "",
        "address where the processes of a worker connect: tcp://HOST:PORT of process 0, or "
        "file:///PATH of a new file; empty: process 0 starts the others on this machine",
    )
    process: int = setting(
        0, "with --rendezvous, the number of this process; 0 is the leader", ge=0, lt=4096
    )
    threads: int = setting(
        0, "threads of each process; 0: OMP_NUM_THREADS, or one per physical core", ge=0, le=1024
    )
    cores: str = setting(
        "", "cores of this machine that the worker runs on, as in 0-3,8; empty: any"
    )
    max_model_len: int = setting(
        0,
        "longest sequence in tokens; 0: the model's own limit",
        begins="KV cache",
        ge=0,
        le=MAX_COUNT,
    )
    block_size: int = setting(16, "tokens in a KV block", ge=1, le=4096)
    num_blocks: int = setting(
        0, "number of KV blocks; 0: those that fit in --kv-cache-bytes", ge=0, le=MAX_COUNT
    )
    kv_cache_bytes: int = setting(
        0,
        "memory for the KV cache; 0: the rest of --memory-share on a GPU, elsewhere an eighth of "
        "the free memory, 256 MiB at least and 4 GiB at most",
        ge=0,
        le=MAX_BYTES,
    )
    max_ubatch_tokens: int = setting(
        0, "maximum tokens in one step; 0: 512, or 1024 on a prefill worker", begins="Steps", ge=0
    )
    max_sbatch_sequences: int = setting(256, "maximum sequences in one step", ge=1)
    prefer_pure_decode: bool = setting(False, "no prompts in a step that generates tokens")
    dynamic_batching: bool = setting(
        True, "new requests join running ones; off: all have to end first"
    )
    prefix_cache: bool = setting(
        True, "keep the KV of ended requests for shared prefixes", begins="KV cache"
    )
    ageing_s: float = setting(
        1.0,
        "seconds of waiting after which a request's priority rises by one",
        begins="Steps",
        gt=0,
        le=3600,
    )
    swap_bytes: int = setting(
        0, "host memory for the KV of preempted requests; 0: recompute", begins="KV cache", ge=0
    )
    host_kv_bytes: int = setting(
        0, "host memory for blocks that leave the KV cache; 0: none", ge=0, le=MAX_BYTES
    )
    disk_kv: Path | None = setting(
        None,
        "directory where blocks are kept beyond a restart, with --disk-kv-bytes; workers may share "
        "it; with keys the files are encrypted; none: nowhere",
    )
    disk_kv_bytes: int = setting(
        0, "maximum size of the files in --disk-kv of this worker", ge=0, le=MAX_BYTES
    )
    speculate: str = setting(
        "",
        "draft up to K tokens per step, 64 at most: ngram:K from the text so far, or draft:K:MODEL "
        "with a smaller model with the same tokenizer; not on prefill workers; empty: off",
        begins="Steps",
    )
    kv_bind: str = setting(
        "tcp://127.0.0.1:0", "where a decode or any worker listens for KV", begins="Transfer of KV"
    )
    kv_advertise: str = setting(
        "", "KV endpoint that other workers connect to; empty: the one of --kv-bind"
    )
    segment_bytes: int = setting(
        2 * MIB, "size of a KV segment on the wire", ge=1 * MIB, le=4 * MIB
    )
    credit_bytes: int = setting(
        16 * MIB,
        "maximum unacknowledged bytes of one transfer; through shared memory up to 32 MiB (512 MiB "
        "on a GPU), if that is an eighth (a quarter) of --max-kv-inflight-bytes at most",
        ge=4 * MIB,
    )
    max_kv_inflight_bytes: int = setting(
        512 * MIB, "maximum bytes in flight to this worker, all transfers together", ge=4 * MIB
    )
    kv_unasked_bytes: int = setting(
        2 * MIB,
        "largest KV that is sent with its offer, which saves a round trip; 0: none",
        ge=0,
        le=MAX_BYTES,
    )
    kv_shared_memory: Literal["auto", "off"] = setting(
        "auto",
        "auto: KV of a worker of the same user on the same machine is copied from its "
        "memory, the host's or a GPU's; off: all KV is sent",
    )
    kv_segment_port: str = setting(
        "auto",
        "port on the host of --kv-bind for faster connections that carry KV only, encrypted with "
        "AES-GCM if there are keys; auto: any free port; off: neither listen nor connect",
    )
    lease_s: float = setting(
        0.0, "seconds that KV is kept for a silent peer; 0: the router's value", ge=0, le=3600
    )
    metrics: str = setting(
        "", "HOST:PORT where this worker serves /metrics; empty: nowhere", begins="Metrics"
    )
    api_keys: Path | None = setting(
        None,
        "API keys for --metrics, one a line; none: the systemd credential api_keys, if any",
        begins="Access control",
    )
    insecure: bool = setting(False, "allow ports beyond this machine without keys")
    hash_step_ms: float = setting(
        0.0, "hash executor: duration of a step", begins="Steps", ge=0, le=60_000
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
        try:  # validated as in HELLO, so that the router does not refuse it
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
            # A router imports this module too, and must not import the engine with it.
            from worker.engine.speculation import checked

            checked(int(found[1] or found[2]))
        elif setting:
            raise ValueError("neither ngram:K nor draft:K:MODEL")
        return setting

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if (self.disk_kv is None) != (self.disk_kv_bytes == 0):
            raise ValueError(
                f"--disk-kv is {self.disk_kv or 'empty'} and --disk-kv-bytes {self.disk_kv_bytes}: "
                "give both, where and how much, or neither"
            )
        if (self.host_kv_bytes or self.disk_kv_bytes) and not self.prefix_cache:
            raise ValueError(
                "--host-kv-bytes and --disk-kv keep blocks of the prefix cache: leave out "
                "--no-prefix-cache, or them"
            )
        return self

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        if not self.metrics:
            return self
        host, _, port = self.metrics.rpartition(":")
        if not host or port_of(port) is None:
            raise ValueError(f"--metrics {self.metrics!r} is not HOST:PORT with a port to 65535")
        is_guarded = self.api_keys is not None or credential("api_keys") is not None
        if host not in LOOPBACK_HOSTS and not (is_guarded or self.insecure):
            make_key = "make one with `baton keys --api-key FILE` and say --api-keys FILE"
            advice = f"{make_key}, or listen on 127.0.0.1"
            raise open_port(f"--metrics {self.metrics}", advice, may="read")
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
        # Any valid path stands for a rendezvous that is not set.
        found = fullmatch(r"tcp://(.+):(.*)|file:///.+", self.rendezvous or "file:///-")
        if found is None or (found[2] is not None and not port_of(found[2])):
            raise ValueError(
                f"--rendezvous {self.rendezvous!r} is neither tcp://HOST:PORT, with a port from 1 "
                "to 65535, nor file:///PATH"
            )
        is_open = found[1] is not None and found[1] not in LOOPBACK_HOSTS
        if is_open and not (self.has_keys or self.insecure):
            raise open_port(f"--rendezvous {self.rendezvous}", f"{MAKE_KEYS} to all processes")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        host = self.kv_bind.removeprefix("tcp://").rpartition(":")[0]
        is_open = self.kv_bind.startswith("tcp://") and host not in LOOPBACK_HOSTS
        if is_open and not (self.has_keys or self.insecure):
            raise open_port(f"--kv-bind {self.kv_bind}", f"{MAKE_KEYS}, or bind 127.0.0.1")
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
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def party(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def has_keys(self) -> bool:
        return self.keys is not None or credential(f"{self.party}.key") is not None

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens in one step; larger for prefill, where no decode must wait."""
        return self.max_ubatch_tokens or (1024 if self.role == "prefill" else 512)

    @property
    def draft_model(self) -> str | None:
        """The draft model in `speculate`, or None if this worker does not load one."""
        kind, _, rest = self.speculate.partition(":")
        return rest.partition(":")[2] if kind == "draft" and self.role != "prefill" else None

    @property
    def num_drafts(self) -> int:
        """The number of draft tokens per step: K in `speculate`, or 0 if it is off."""
        return int(self.speculate.split(":")[1]) if self.speculate else 0
