"""`python -m worker --role decode --rank 3`: load the model, join the routers, serve until told."""

from __future__ import annotations

import os
import sys

import structlog

from wire.aio.log import configure
from wire.aio.process import Stop, run, slow_start
from wire.aio.settings import parse
from wire.errors import WireError
from wire.model import fingerprint, locate
from worker.app import EXIT_CONFIG, Worker
from worker.config import ROUTER_SETTINGS, Config
from worker.executor.contract import Executor
from worker.executor.registry import create

log = structlog.get_logger("worker")


def load(config: Config) -> Executor:
    """Make the executor that the configuration names.

    Raises:
        WireError: There is no such model.
        ValueError: There is no such executor, or it cannot run this model here.
    """
    # Read by the thread pools of torch and NumPy when they are first imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
    path = locate(config.model)
    extra = {"step_delay_s": config.hash_step_ms / 1000} if config.executor == "hash" else {}
    return create(
        config.executor,
        model_path=path,
        model_name=config.model_name,
        fingerprint=fingerprint(path),
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len or None,
        **extra,
    )


async def serve(config: Config, executor: Executor, stop: Stop) -> int:
    try:
        return await Worker(config, executor).run(stop)
    except OSError as error:  # the address may be free when the worker is started again
        log.error("cannot bind or connect", reason=str(error))
        return 1


def main() -> int:
    config = parse(Config, sys.argv[1:], also_known=ROUTER_SETTINGS)
    configure(config.log_level)
    log.info("loading", model=config.model, executor=config.executor)
    try:
        with slow_start(f"loading {config.model}"):
            executor = load(config)
    except (WireError, ValueError) as error:
        log.error("cannot serve this model", reason=str(error))
        return EXIT_CONFIG
    except Exception as error:  # a plug-in's own, or a file that is not what it should be
        reason = f"{type(error).__name__}: {error}"
        log.exception("the executor failed to load", executor=config.executor, reason=reason)
        return EXIT_CONFIG
    return run(lambda stop: serve(config, executor, stop))


if __name__ == "__main__":
    sys.exit(main())
