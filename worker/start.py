"""Starts a worker process: loads the model, then serves requests or follows the leader."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import TYPE_CHECKING, Any

import structlog

from wire.errors import WireError
from wire.process.cores import format_cores, parse_cores, run_on
from wire.process.lifetime import (
    end_at_once,
    open_standard_streams,
    run,
    set_stack_size,
    slow_start,
)
from wire.process.log import configure
from wire.process.model import check_files, check_weights, fingerprint, locate, vocab_size
from wire.process.settings import EX_CONFIG, ConfigError, parse
from worker.app import EXIT_CRASHED, Worker
from worker.assembly import check_speculation
from worker.compute.device_errors import EXIT_DEVICE_FAILED
from worker.config import Config
from worker.engine.thread import is_computing
from worker.executor.contract import Executor
from worker.executor.registry import create
from worker.processes import follow, join_processes, set_threads

if TYPE_CHECKING:  # `Ranks` imports torch, which some executors do not need
    from worker.compute.ranks import Ranks

log = structlog.get_logger("worker")


def load(config: Config, ranks: Ranks | None = None) -> Executor:
    """Create the configured executor; `ranks` connects it to other processes of this worker.

    Raises:
        WireError: The model does not exist.
        ValueError: The executor does not exist, or it cannot run this model here.
    """
    set_threads(config.threads)
    set_stack_size()  # an executor may start threads
    extra = {"step_delay_s": config.hash_step_ms / 1000} if config.executor == "hash" else {}
    limit = config.max_model_len or None
    return _create(config, config.model, ranks, max_model_len=limit, **extra)


def load_draft(config: Config, executor: Executor) -> Executor | None:
    """Create the executor for the draft model, or return None if none is configured.

    Raises:
        WireError: The draft model does not exist.
        ValueError: The draft model cannot run here, or `executor` cannot verify drafts.
    """
    check_speculation(config, executor)
    return None if config.draft_model is None else _create(config, config.draft_model)


def _choose_cores(cores: frozenset[int]) -> None:
    """Pin this process to these cores, unless empty, so that memory is allocated near them.

    Raises:
        ValueError: This process may not run on these cores.
    """
    try:
        if cores:
            run_on(cores)
    except OSError as error:  # for example in a sandbox; the worker is slower, but works
        log.warning("cannot choose cores", cores=format_cores(cores), reason=str(error))


def _create(config: Config, model: str, ranks: Ranks | None = None, **settings: Any) -> Executor:
    path = locate(model)
    check_files(path)
    if config.executor == "torch":  # before `create`, because importing torch takes seconds
        check_weights(path)
    chosen = {"kv_dtype": config.kv_dtype, "weights": config.weights}
    if ranks is not None:
        settings["ranks"] = ranks
    executor = create(
        config.executor if ranks is None else "worker.parallel.executor:create",
        model_path=path,
        model_name=config.model_name,
        fingerprint=fingerprint(path),
        dtype=config.dtype,
        device=config.device,
        **{name: value for name, value in chosen.items() if value != "auto"},
        **settings,
    )
    known = vocab_size(path)
    if known is not None and executor.info.vocab_size > known:
        raise ValueError(
            f"executor {config.executor!r}: its vocab_size is {executor.info.vocab_size}, that of "
            f"{path / 'config.json'} is {known}, and routers refuse tokens from there on: lower "
            "the one or raise the other"
        )
    return executor


async def serve(
    config: Config, executor: Executor, draft: Executor | None, stop: asyncio.Event
) -> int:
    try:
        try:
            worker = Worker(config, executor, draft=draft)
        except ValueError as error:  # only the constructor's: in `run` a ValueError is a bug
            log.error("cannot serve with these settings", reason=str(error))
            return EX_CONFIG
        return await worker.run(stop)
    except OSError as error:  # not EX_CONFIG: at a restart the address may be free
        log.error("cannot bind or connect", reason=str(error))
        return 1


def start(argv: list[str]) -> int:
    """Run the worker until it ends and return the exit status: EX_CONFIG for invalid settings."""
    open_standard_streams()
    config = parse(Config, argv, beside="router.config")
    configure(config.log_level, worker=config.party)
    status = _live(config)
    if config.num_processes > 1 or is_computing() or status == EXIT_DEVICE_FAILED:
        # A thread may still run native code; then Python's normal exit could abort the process.
        end_at_once(status)
    return status


def _live(config: Config) -> int:
    def on_lost(status: int) -> None:
        end_at_once(EX_CONFIG if status == EX_CONFIG else EXIT_CRASHED)

    log.info("loading", model=config.model, executor=config.executor)
    try:
        _choose_cores(parse_cores(config.cores))
        with slow_start(f"loading {config.model}"):
            ranks = join_processes(config, on_lost)
            executor = load(config, ranks)
            if ranks is not None and not ranks.is_leader:
                return follow(executor)
            draft = load_draft(config, executor)
    except (WireError, ConfigError, ValueError) as error:
        log.error("cannot serve this model", reason=str(error))
        return EX_CONFIG
    except ConnectionError as error:  # another process of this worker is lost: restart all
        log.error("the model is not loaded", reason=str(error))
        return EXIT_CRASHED
    except KeyboardInterrupt as ended:  # `join_processes` passes the signal's number
        number = signal.Signals(*ended.args or (signal.SIGINT,))
        log.info("ended by a signal before there was anything to drain", signal=number.name)
        return 128 + number
    except Exception as error:  # for example an executor plug-in's own, or a damaged file
        reason = f"{type(error).__name__}: {error}"
        log.exception("the executor failed to load", executor=config.executor, reason=reason)
        return EX_CONFIG
    # Imported modules and the loaded model are never garbage, so the collector can skip them.
    gc.freeze()
    return run(lambda stop: serve(config, executor, draft, stop))
