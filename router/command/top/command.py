"""`baton top`: the flags, and a word where Textual is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from router.command.operator import client_parser, connect
from router.command.terminal import Failure

INSTALL: Final = "pip install 'baton-serve[top]'"


def run(argv: Sequence[str]) -> int:
    """Show the cluster until `q`.  Raises Failure without Textual or without a terminal."""
    about = "The workers of a running cluster. Keys: q quit, s sort, r reverse, / filter."
    parser = client_parser("top", about)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two samples")
    given = parser.parse_args(argv)
    if not 0.1 <= given.interval <= 3600:
        parser.error(f"--interval is {given.interval:g}: it is from 0.1 to 3600 seconds")
    router = connect(given)
    if find_spec("textual") is None:
        raise Failure(f"needs Textual, which is not installed: {INSTALL}")
    if not sys.stdout.isatty():
        raise Failure("needs a terminal; for programs there is GET /v1/cluster")
    from router.command.top.app import Top

    Top(router, given.interval).run()
    return 0
