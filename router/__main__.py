"""`python -m router`: take requests over HTTP and raw TCP, and place them on workers."""

from __future__ import annotations

import gc
import sys

import structlog

from router.app import serve
from router.config import WORKER_SETTINGS, Config
from wire.aio.log import configure
from wire.aio.process import run
from wire.aio.settings import EX_CONFIG, parse
from wire.errors import WireError
from wire.model import fingerprint, locate

log = structlog.get_logger("router")


def main(argv: list[str]) -> int:
    """Run to the end and return the exit status; 78 when the settings cannot work."""
    config = parse(Config, argv, also_known=WORKER_SETTINGS)
    configure(config.log_level)
    try:
        path = locate(config.model)
    except WireError as error:
        log.error("no such model", reason=error.message)
        return EX_CONFIG
    # What was imported stays: a collection that looks through it all stops everybody for 60 ms.
    gc.freeze()
    return run(lambda stop: serve(config, path, fingerprint(path), stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
