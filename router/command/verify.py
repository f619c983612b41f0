"""`baton verify ID`: a kept request is replayed on another worker, and its tokens are compared."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from router.command.client import Client, RequestError
from router.command.main import EX_USAGE
from router.command.operator import connect, parser
from router.command.terminal import printable, say


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0 equal, 1 not equal, 2 not replayed."""
    made = parser("verify", "Replay a kept request on another worker and compare the tokens.")
    made.add_argument("id", help="the id of a response, or its x-request-id")
    made.add_argument(
        "--same-worker", action="store_true", help="on the workers that served the request"
    )
    made.add_argument("--json", action="store_true", help="print the router's answer")
    args = made.parse_args(argv)
    query = "?same_worker=true" if args.same_worker else ""
    try:
        path = f"/v1/requests/{quote(args.id, safe='')}/verify{query}"
        found = _answer(connect(args, args.timeout), path, args.timeout)
    except RequestError as error:
        sys.stderr.write(f"baton verify: {error}\n")
        return EX_USAGE
    say(json.dumps(found, indent=2) if args.json else printable(verdict(found)))
    return 0 if found["equal"] else 1


def _answer(router: Client, path: str, timeout_s: float) -> Any:
    """Return the router's answer, which may take several attempts: a replay waits for no worker."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return router.call(path, {})
        except RequestError as error:
            if error.status != 429 or error.retry_after_s is None or time.monotonic() > deadline:
                raise
            time.sleep(error.retry_after_s)


def verdict(found: dict[str, Any]) -> str:
    """Return the lines that say how the replay of a request compares."""
    choices, lines = found["choices"], []
    for number, choice in enumerate(choices):
        name = f"{found['id']}, choice {number}" if len(choices) > 1 else found["id"]
        lines += [
            f"{name}: {_compared(choice)}",
            f"  served by {_workers(choice['kept'])}",
            f"  replayed by {_workers(choice['replayed'])}",
        ]
    return "\n".join(lines)


def _compared(choice: dict[str, Any]) -> str:
    if choice["equal"]:
        is_whole = choice["outcome"] in ("stop", "length")
        end = "" if is_whole else f", all before it ended ({choice['outcome']})"
        return f"equal, {choice['tokens']} tokens{end}"
    first = choice["first_difference"]
    kept, replayed = [
        f"{'the end' if first[f'{it}_token'] is None else first[f'{it}_token']} from "
        f"{_worker(first[f'{it}_by'])}"
        for it in ("kept", "replayed")
    ]
    return f"DIFFERENT at token {first['position']}: {kept}, {replayed} in the replay"


def _workers(pairs: list[dict[str, Any]]) -> str:
    """Return the workers of all attempts, each with the index of its first token."""
    return "; ".join(
        " -> ".join(_worker(it) for it in (pair["prefill"], pair["decode"]) if it)
        + (f" from token {pair['first_token']}" if len(pairs) > 1 else "")
        for pair in pairs
    )


def _worker(used: dict[str, str]) -> str:
    return f"{used['worker']} ({used['arithmetic']})" if used["arithmetic"] else used["worker"]
