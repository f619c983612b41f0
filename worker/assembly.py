"""Creates a worker's engine from its configuration: its blocks, settings and draft model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields

import structlog

from worker.config import Config
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.settings import EngineSettings
from worker.executor.contract import Executor
from worker.memory import count_blocks, free_bytes

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
) -> Engine:
    """Create the engine; raise ValueError if the settings do not fit the model or the machine."""
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
    return Engine(
        executor, num_blocks=num_blocks, block_size=config.block_size, clock=clock, **chosen
    )
