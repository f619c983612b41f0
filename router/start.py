"""Starts `python -m router` after its imports: reads the settings and checks the model."""

from __future__ import annotations

import os

import structlog

from router.app import serve
from router.config import Config
from router.processes.alone import serve_alone
from router.processes.siblings import inherited
from router.processes.supervisor import serve_by_several
from wire.errors import WireError
from wire.process.lifetime import open_standard_streams, run
from wire.process.log import configure
from wire.process.model import ModelError, check_files, check_weights, fingerprint, locate
from wire.process.settings import EX_CONFIG, parse

log = structlog.get_logger("router")


def start(argv: list[str]) -> int:
    """Run the router until it ends; return the exit status, 78 for wrong settings."""
    open_standard_streams()
    siblings = inherited()
    # Only the parent warns about misspelled environment variables.
    config = parse(Config, argv, beside="worker.config", environ={} if siblings else os.environ)
    configure(config.log_level)
    try:
        path = locate(config.model)
        check_files(path)
        if has_own_weights(config):
            check_weights(path)
    except WireError as error:
        log.error("no such model", reason=error.message)
        return EX_CONFIG
    except ModelError as error:
        log.error("cannot serve this model", reason=str(error))
        return EX_CONFIG
    if config.processes > 1 and siblings is None:
        return run(lambda stop: serve_by_several(config, argv, stop))
    if siblings is None:
        return run(lambda stop: serve_alone(config, argv, path, fingerprint(path), stop))
    return run(lambda stop: serve(config, path, fingerprint(path), stop, siblings))


def has_own_weights(config: Config) -> bool:
    """Whether local workers will load the model's weights; a plug-in executor may not need them."""
    return (
        any(config.local) and config.executor == "torch" and "--executor" not in config.worker_args
    )
