"""The settings of a worker: one declaration is flags, environment, validation and help."""

from __future__ import annotations

import os
from typing import Literal, Self

from pydantic import Field, model_validator

from wire.aio.settings import Settings

MIB = 1 << 20
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class Config(Settings):
    """A worker: reads prompts (prefill) or generates from them (decode), as a router asks."""

    role: Literal["prefill", "decode"] = Field(
        "decode", description="what this worker is asked for"
    )
    rank: int = Field(0, ge=0, lt=0xFFFFFFFE, description="its number among workers of its role")
    router: tuple[str, ...] = Field(
        ("tcp://127.0.0.1:5570",), min_length=1, description="bus endpoints of the routers to serve"
    )
    model: str = Field("demo", description="a directory, 'demo', or a name on the Hugging Face hub")
    executor: str = Field("torch", description="torch, hash or module:factory")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute and KV type; auto is the checkpoint's own"
    )
    threads: int = Field(0, ge=0, le=1024, description="compute threads; 0 is one a core")
    max_model_len: int = Field(
        0, ge=0, description="longest sequence in tokens; 0 is what the model was made for"
    )
    block_size: int = Field(16, ge=1, le=4096, description="tokens in a KV block")
    num_blocks: int = Field(
        0, ge=0, description="KV blocks; 0 is as many as --kv-cache-bytes holds"
    )
    kv_cache_bytes: int = Field(256 * MIB, ge=1, description="memory for the KV cache")
    max_ubatch_tokens: int = Field(512, ge=1, description="most tokens in one step")
    max_sbatch_sequences: int = Field(256, ge=1, description="most sequences in one step")
    prefix_cache: bool = Field(
        True, description="keep the KV of ended requests for shared prefixes"
    )
    kv_bind: str = Field("tcp://127.0.0.1:0", description="where a decode worker takes KV in")
    kv_advertise: str = Field(
        "", description="the KV endpoint that others should connect to; empty is the bound one"
    )
    max_kv_transfer_bytes: int = Field(
        4096 * MIB, ge=1, description="largest KV cache of one request that may be transferred"
    )
    segment_bytes: int = Field(
        2 * MIB, ge=1 * MIB, le=4 * MIB, description="size of a KV segment on the wire"
    )
    credit_bytes: int = Field(
        16 * MIB, ge=4 * MIB, description="bytes one transfer may have under way unacknowledged"
    )
    max_kv_inflight_bytes: int = Field(
        256 * MIB,
        ge=4 * MIB,
        description="bytes all transfers to a decode worker may have under way",
    )
    lease_s: float = Field(
        30.0, gt=0, le=3600, description="how long KV is kept for a peer that says nothing"
    )
    drain_s: float = Field(30.0, ge=0, le=3600, description="time to finish work after SIGTERM")
    insecure: bool = Field(False, description="allow --kv-bind on an address other than loopback")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level"
    )
    hash_step_ms: float = Field(0.0, ge=0, le=60_000, description="hash executor: time of a step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        host = self.kv_bind.removeprefix("tcp://").rpartition(":")[0]
        if self.kv_bind.startswith("tcp://") and host not in LOOPBACK_HOSTS and not self.insecure:
            raise ValueError(
                f"kv_bind: {self.kv_bind} is reachable from other machines and KV sockets carry no "
                "keys yet; bind a loopback address, or say --insecure on a network you trust"
            )
        if self.credit_bytes > self.max_kv_inflight_bytes:
            raise ValueError(
                f"credit_bytes: {self.credit_bytes} is over max_kv_inflight_bytes = "
                f"{self.max_kv_inflight_bytes}"
            )
        return self

    @property
    def model_name(self) -> str:
        """The last part of `model`, which is what clients call it by default."""
        return self.model.rstrip("/").rpartition("/")[2]

    @property
    def num_threads(self) -> int:
        return self.threads or os.cpu_count() or 1
