"""`baton drain WORKER...`: workers finish their requests, hand over the rest, and end for good."""

from __future__ import annotations

from collections.abc import Sequence

from router.command.client import Client
from router.command.operator import connect, parser, wait_until, workers
from router.command.terminal import Failure, say


def run(argv: Sequence[str]) -> int:
    """Run the command and return 0.  Raises Failure as `drain` does."""
    made = parser("drain", "Let workers finish their requests and end; nobody starts them again.")
    made.add_argument("names", nargs="+", metavar="WORKER", help="role and rank: decode-0")
    made.add_argument("--wait", action="store_true", help="return when they have left")
    args = made.parse_args(argv)
    drain(connect(args), args.names, args.timeout if args.wait else 0.0)
    return 0


def drain(router: Client, names: Sequence[str], timeout_s: float) -> None:
    """Drain workers by name; with a timeout, wait until they have left.

    Raises:
        Failure: The router cannot be reached or refuses, or a worker is still there.
    """
    for name in names:
        placed = router.call(f"/v1/workers/{name}/drain", {})["placed"]
        say(f"{name}: drains, requests under way: {placed}")

    def remaining() -> list[str]:
        here = workers(router)
        return [name for name in names if name in here]

    if timeout_s and not wait_until(lambda: not remaining(), timeout_s):
        late = ", ".join(remaining())
        raise Failure(f"{late} did not leave in {timeout_s:g} s; look at the log there")
    if timeout_s:
        say("all have left")
