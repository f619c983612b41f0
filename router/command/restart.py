"""`baton restart`: restarts a cluster under load, one process after another, losing no request.

Each worker is asked to drain and to end, whoever started it (systemd, `--local`) starts it again,
and the next one follows when it serves.  The router comes last: it starts its own successors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from router.command.client import Client
from router.command.operator import connect, parser, wait_until, workers
from router.command.terminal import Failure, say


def run(argv: Sequence[str]) -> int:
    """Run the command and return 0.  Raises Failure if a process does not come back."""
    made = parser("restart", "Restart all workers, one at a time, and then the router.")
    made.add_argument("names", nargs="*", metavar="WORKER", help="only these, not the router")
    args = made.parse_args(argv)
    router = connect(args)
    for name in args.names or list(workers(router)):
        restart_worker(router, name, args.timeout)
    if not args.names:
        restart_router(connect(args, args.timeout))
    return 0


def restart_worker(router: Client, name: str, timeout_s: float) -> None:
    """Restart one worker and wait until it is ready.

    Raises:
        Failure: The router cannot be reached or refuses, or the worker is not back; the message
            says what to do.
    """
    began = time.monotonic()
    here = workers(router)
    asked = router.call(f"/v1/workers/{name}/restart", {})
    say(f"{name}: drains, requests under way: {asked['placed']}{_alone(name, here)}")

    def is_back() -> bool:
        row = workers(router).get(name)
        return row is not None and row["epoch"] != asked["epoch"] and row["state"] == "ready"

    if not wait_until(is_back, timeout_s):
        raise Failure(f"{name} {_state(router, name, asked['epoch'])} after {timeout_s:g} s")
    say(f"{name}: is back after {time.monotonic() - began:.1f} s")


def restart_router(router: Client) -> None:
    """Restart the router's processes.  Raises RequestError if one does not serve."""
    began = time.monotonic()
    say("router: starts its successor")
    router.call("/v1/router/restart", {})
    say(f"router: the new one serves after {time.monotonic() - began:.1f} s")


def _alone(name: str, here: dict[str, dict[str, Any]]) -> str:
    """Return a warning if requests have to wait for this worker."""
    role = here[name]["role"]
    others = {it["role"] for at, it in here.items() if at != name and it["state"] == "ready"}
    needed = ("prefill", "decode") if role == "any" else (role,)
    if not (missing := [each for each in needed if not {each, "any"} & others]):
        return ""
    return f"; no other {' or '.join(missing)} worker is ready, so requests may wait for it"


def _state(router: Client, name: str, epoch: int) -> str:
    """Describe what became of a worker that is not back."""
    row = workers(router).get(name)
    if row is None:
        return (
            "has left and was not started again: is it under systemd or --local? Else start it, "
            "and run this again with the workers that are still to come"
        )
    if row["epoch"] != epoch:
        return f"was started again, but is {row['state']}"
    if row["state"] == "draining":
        return f"still drains with {row['placed']} requests"
    return "goes on as it was: its release may not know this request, so restart it by hand"
