"""Flags that commands have in common, and requests of operators to a running router."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from router.command.client import API_KEY, URL, Client, read_api_key

REQUEST_S: Final = 10.0
LOOK_S: Final = 0.1


def workers(router: Client) -> dict[str, dict[str, Any]]:
    """Return the rows of GET /v1/cluster by worker, without lost workers.  Raises RequestError."""
    rows = router.call("/v1/cluster")["workers"]
    return {f"{row['role']}-{row['rank']}": row for row in rows if row["state"] != "lost"}


def new_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for a command, whose --help keeps the lines of the description."""
    return argparse.ArgumentParser(
        prog=f"baton {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def client_parser(
    command: str, description: str | None, keys: str = "--api-keys"
) -> argparse.ArgumentParser:
    """Return a parser with the flags for `connect`; `keys` names the router's file of API keys."""
    made = new_parser(command, description)
    made.add_argument("--url", default=URL, help="the router's HTTP [default %(default)s]")
    made.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file whose first line is a key of the router's {keys} "
        f"[default: the variable {API_KEY}, if the router needs a key]",
    )
    return made


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that the commands for operators have."""
    made = client_parser(command, description, "--admin-keys")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds to wait [default 300]")
    return made


def connect(args: argparse.Namespace, timeout_s: float = REQUEST_S) -> Client:
    """Return a client of the router that the flags name.  Raises RequestError."""
    return Client(args.url, read_api_key(args.api_key_file), timeout_s)


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `is_done()`; return False after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True
