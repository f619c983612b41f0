"""`baton COMMAND`: finds the command and runs it.

Each command is a module of this folder with `run(argv)`, imported when it is needed, because most
need much less than the router.  Workers are another package: `baton worker` becomes
`python -m worker`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Final, NamedTuple

from router.command.terminal import Failure, printable

EX_USAGE: Final = 2


class Command(NamedTuple):
    """A command, the module with its `run`, and its line in `baton --help`."""

    name: str
    module: str
    summary: str


# The groups of `baton --help`, in its order.
GROUPS: Final = {
    "Serve": (
        Command("serve", "router.command.serve", "run the router with workers of its own"),
        Command("router", "router.__main__", "run the router: python -m router"),
        Command("worker", "", "run a worker: python -m worker"),
        Command("demo", "router.command.demo", "start a cluster, and watch a few requests"),
    ),
    "Use": (Command("chat", "router.command.chat", "talk to the model of a running router"),),
    "Set up": (
        Command("keys", "router.command.keys", "make keys for a cluster or its clients"),
        Command("config", "router.command.config", "show all settings and where they come from"),
        Command("completion", "router.command.completion", "completion for bash, zsh or fish"),
    ),
    "Operate": (
        Command("drain", "router.command.drain", "let workers finish their requests and leave"),
        Command("restart", "router.command.restart", "restart everything, losing no request"),
    ),
    "Look after": (
        Command("doctor", "router.command.doctor.command", "check this machine and a cluster"),
        Command("verify", "router.command.verify", "replay a request on another worker"),
        Command("top", "router.command.top.command", "watch a cluster in the terminal"),
        Command("bench", "router.command.bench.command", "measure tokens/s and latencies"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument; return the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(usage())
        return 0
    if name == "__complete":  # for the scripts of `baton completion`
        return int(import_module("router.command.completion").complete(rest))
    if name == "worker":
        os.execv(sys.executable, [sys.executable, "-m", "worker", *rest])
    commands = by_name()
    if name not in commands:
        close = get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        sys.stderr.write(f"baton: {name!r} is not a command; {hint}`baton --help` lists them\n")
        return EX_USAGE
    try:
        module = import_module(commands[name].module)
        status: int = (module.main if name == "router" else module.run)(rest)
    except Failure as error:
        sys.stderr.write(printable(f"baton {name}: {error}\n"))
        return 1
    except BrokenPipeError:  # of `baton config | head`; nothing is to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def by_name() -> dict[str, Command]:
    return {each.name: each for group in GROUPS.values() for each in group}


def usage() -> str:
    """Return the text of `baton --help`."""
    lines = ["usage: baton COMMAND [FLAGS]; baton COMMAND --help says more", ""]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {each.name:<12}{each.summary}" for each in commands), ""]
    return "\n".join(lines)
