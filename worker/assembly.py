"""Creates a worker's engine from its configuration: its blocks, settings and draft model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import structlog

from wire.process.model import locate
from worker.config import Config
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.settings import EngineSettings
from worker.executor.contract import Executor
from worker.memory import check_host_bytes, count_blocks, free_bytes
from worker.tiers.opening import TierSettings, contents_of

log = structlog.get_logger("worker")


def check_speculation(config: Config, executor: Executor) -> None:
    """Raise ValueError if --speculate is set but the executor cannot verify draft tokens."""
    if config.role != "prefill" and config.speculate and not executor.capabilities.speculative:
        raise ValueError(
            f"--speculate {config.speculate}: the executor {config.executor!r} samples one token "
            "of a sequence in a step and cannot verify drafts; leave --speculate out"
        )


def make_engine(
    config: Config,
    executor: Executor,
    draft: Executor | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    secret: bytes | None = None,
) -> Engine:
    """Create the engine; blocks on disk are encrypted by `secret`, if any.

    Raises:
        ValueError: The settings do not fit the model or the machine.
    """
    check_speculation(config, executor)
    if draft is not None and draft.info.layout.has_state:
        raise ValueError(
            f"--speculate {config.speculate}: layers of this draft model keep a state, which "
            "cannot go back when a draft was wrong; take another one"
        )
    memory = executor.capabilities.memory
    if draft is not None:
        memory += draft.capabilities.memory
    free = free_bytes(config.device, num_devices=config.num_processes)
    num_blocks = count_blocks(memory, config, free)
    check_host_bytes(memory, config, num_blocks, free_bytes("cpu"))
    log.info("room for KV", tokens=num_blocks * config.block_size, blocks=num_blocks)
    chosen = config.model_dump(include={field.name for field in fields(EngineSettings)})
    chosen["max_ubatch_tokens"] = config.step_tokens
    chosen["receives_kv"] = config.role != "prefill"
    if config.role == "prefill":
        chosen["speculate"] = None  # a prefill worker generates one token, so drafts are useless
    if draft is not None:
        chosen["speculate"] = ModelDrafter(
            draft,
            config.num_drafts,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_ubatch_tokens=config.step_tokens,
        )
    engine = Engine(
        executor, num_blocks=num_blocks, block_size=config.block_size, clock=clock, **chosen
    )
    if config.host_kv_bytes or config.disk_kv:
        engine.add_tiers(_tiers(config, executor, clock, secret).open)
    return engine


def _tiers(
    config: Config, executor: Executor, clock: Callable[[], float], secret: bytes | None
) -> TierSettings:
    info, arithmetic = executor.info, executor.capabilities.arithmetic
    return TierSettings(
        host_bytes=config.host_kv_bytes,
        disk=config.disk_kv,
        disk_bytes=config.disk_kv_bytes,
        owner=config.party,
        model=(info.fingerprint, arithmetic, config.executor, config.weights, _contents(config)),
        context_tokens=info.max_model_len,
        secret=secret,
        clock=clock,
    )


def _contents(config: Config) -> str:
    """Return a digest of the weights and of a plug-in's module, if blocks outlive the process."""
    if config.disk_kv is None:
        return ""
    module = sys.modules.get(config.executor.partition(":")[0])
    source = getattr(module, "__file__", None)
    files = [] if source is None else [Path(source)]
    try:
        return contents_of([*locate(config.model).glob("*.safetensors"), *files])
    except OSError as error:
        raise ValueError(f"--disk-kv: {error}") from error
