"""The addresses that a router binds, and the announcement of what it listens on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

from router.config import Config, split_endpoint
from wire.process.settings import ConfigError

log = structlog.get_logger("router")


def split_address(endpoint: str) -> tuple[str, int]:
    """Split an endpoint into the host and the port to bind.  Raises ValueError."""
    host, port = split_endpoint(endpoint)
    return "0.0.0.0" if host == "*" else host, port


def url_of(scheme: str, host: str, port: int) -> str:
    """Return a URL, with the brackets that an IPv6 address needs."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextmanager
def named(flag: str, endpoint: str) -> Iterator[None]:
    """Add the flag and the endpoint to an OSError that the `with` body raises."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot bind {flag} {endpoint}: {error.strerror}") from error


def announce(config: Config, endpoints: dict[str, str]) -> None:
    """Write the endpoints to the log, and atomically to `ready_file`.

    Raises:
        ConfigError: The file cannot be written.
    """
    if (path := config.ready_file) is not None:
        temporary = path.parent / f"{path.name}.part"
        try:
            temporary.write_text(json.dumps(endpoints) + "\n")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise ConfigError(f"--ready-file {path}: cannot write it: {error.strerror}") from None
    log.info("listening", **endpoints, model=config.model_name, processes=config.processes)
