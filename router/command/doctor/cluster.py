"""Checks of a running cluster, from GET /v1/cluster of its router."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from router.command.client import API_KEY, Client, RequestError
from router.command.doctor.finding import Finding, fault, ok, warning
from router.command.doctor.network import check_kv_endpoint
from router.http.origin import is_loopback

TIMEOUT_S: Final = 5.0
# How far two clocks may be apart, in seconds: logs of two machines are still read side by side.
MAX_SKEW_S: Final = 2.0
_NUM_DIALS: Final = 16


class Reply(NamedTuple):
    """The cluster as its router reports it.

    Attributes:
        body: The response of GET /v1/cluster.
        skew_s: By how many seconds the router's clock is ahead of this one.
        reasons: The reasons of GET /readyz why completions cannot be served now.
    """

    body: Mapping[str, Any]
    skew_s: float
    reasons: Sequence[str] = ()


def fetch(url: str, api_key: str = "", certificate: Path | None = None) -> Reply | Finding | None:
    """Ask the router at `url`; return None if nobody listens, a finding if it does not answer.

    `certificate` is the router's own, if it is known.
    """
    cure = "--url URL, the --http of a router, and http or https as it was started"
    try:
        router = Client(url, api_key, TIMEOUT_S, certificate)
        body = router.call("/v1/cluster")
        asked_at = time.time()
        date, readiness = router.ask("/readyz")
    except RequestError as error:
        what = f"does not answer as a router: {error}"
        if isinstance(error.__cause__, ConnectionRefusedError):
            return None
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            cure = "export SSL_CERT_FILE=FILE, with the certificate of the router"
        if error.status in (401, 403):
            what = f"refuses this API key (HTTP {error.status})"
            cure = f"export {API_KEY}=KEY, a line of the router's --api-keys"
        return fault("reach", url, what, cure)
    if not (isinstance(body, dict) and {"workers", "router"} <= body.keys()):
        return fault("reach", url, "is no router of Baton", cure)
    skew = 0.0
    if date:
        said = parsedate_to_datetime(date).timestamp()
        # The header has whole seconds, so the router's clock was between `said` and a second later.
        ahead, behind = said - time.time(), asked_at - (said + 1)
        skew = ahead if ahead > 0 else -max(0.0, behind)
    return Reply(body, skew, readiness.get("reasons", ()))


def check_cluster(url: str, reply: Reply) -> list[Finding]:
    """Check a running cluster: whether it is ready, its workers, clocks and KV endpoints."""
    workers = reply.body["workers"]
    live = [row for row in workers if row["state"] != "lost"]
    found = [_check_clock(url, reply.skew_s)]
    found += check_refused(reply.body.get("refused", []))
    found += check_ready(url, reply.reasons)
    for row in workers:
        found += check_worker(row, time.time_ns())
    found += check_alike(live)
    found += check_loopback(url, live)
    dials = [(_name(row), endpoint) for row in live if (endpoint := kv_endpoint(row))]
    with ThreadPoolExecutor(_NUM_DIALS) as threads:
        found += threads.map(lambda dial: check_kv_endpoint(*dial), dials)
    return found


def _check_clock(url: str, skew_s: float) -> Finding:
    if abs(skew_s) <= MAX_SKEW_S:
        return ok("clocks", url, "the router's clock and this one agree")
    side = "ahead of" if skew_s > 0 else "behind"
    what = f"the router's clock is {abs(skew_s):.0f} s {side} this one, so logs cannot be compared"
    cure = "timedatectl set-ntp true, on the machine that is wrong"
    return warning("clocks", url, what, cure)


def check_refused(refused: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a fault for each worker that the router refused and that has not joined since."""
    cures = {
        "model fingerprint": "rsync -a the model's directory to both, or one --model; restart {0}",
        "KV layout": "restart {0} with the --executor, --dtype and --kv-dtype of the others",
        "KV endpoint": "restart {0} with --kv-advertise tcp://HOST:PORT",
        "protocol version": "pip install the same baton-serve on both machines; restart {0}",
        "is here already": "give one of the two workers another --rank",
    }
    found = []
    for row in refused:
        name, reason = str(row["worker"]), str(row["reason"])
        cure = next((cure for part, cure in cures.items() if part in reason), "restart {0}")
        what = f"the router refused it {row['last_seen_s']:.0f} s ago: {reason}"
        found.append(fault("workers", name, what, cure.format(name)))
    return found


def check_ready(url: str, reasons: Sequence[str]) -> list[Finding]:
    """Return a fault for each reason why the router cannot serve completions."""
    cure = (
        "wait while workers load, else `baton worker --role ROLE --rank N --router tcp://HOST:PORT`"
    )
    return [fault("workers", url, reason, cure) for reason in reasons] or [
        ok("workers", url, "completions can be served")
    ]


def check_worker(row: Mapping[str, Any], now_ns: int) -> list[Finding]:
    """Check the state of a worker, its last heartbeat, its clock and its free blocks."""
    name, state, silent_s = _name(row), row["state"], row["last_seen_s"]
    start = f"baton worker --role {row['role']} --rank {row['rank']}"
    if state == "lost":
        what = f"lost {silent_s:.0f} s ago; {row.get('why') or 'its machine or its log says why'}"
        cure = f"{start}, or systemctl status baton-{row['role']}@{row['rank']}"
        return [fault("workers", name, what, cure)]
    if state == "suspect":
        what = f"no heartbeat for {silent_s:.1f} s, or its engine stands still in one step"
        cure = f"py-spy dump on its machine, then restart it: {start}"
        return [fault("workers", name, what, cure)]
    found = []
    ahead_s = (row["epoch"] - now_ns) / 1e9  # an epoch is the time of the start
    if ahead_s > MAX_SKEW_S:
        what = f"its clock was {ahead_s:.0f} s ahead of this one when it started"
        found.append(warning("clocks", name, what, "timedatectl set-ntp true, on its machine"))
    blocks = row["blocks"]
    if row["waiting"] and not blocks["free"] + blocks["cached"]:
        what = f"all {blocks['total']} KV blocks are used and {row['waiting']} requests wait"
        cure = f"{start} --kv-cache-bytes N, more than now, or one more worker"
        found.append(warning("memory", name, what, cure))
    computes = row["computes"]
    said = f"{state}, computes with {computes['arithmetic']}, {computes['threads']} threads"
    what = f"{said}, {blocks['free']} of {blocks['total']} blocks free"
    return found or [ok("workers", name, what)]


def check_alike(live: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check that workers have one KV layout and one arithmetic."""
    layouts = {layout for row in live if (layout := row.get("kv", {}).get("layout"))}
    kinds = {row["computes"]["arithmetic"] for row in live}
    found = []
    if len(layouts) > 1:
        what = f"workers have different KV layouts: {'; '.join(sorted(layouts))}"
        cure = "restart all with the same --model, --executor, --dtype and --kv-dtype"
        found.append(fault("layouts", "cluster", what, cure))
    if len(kinds) > 1:
        what = f"workers round differently ({'; '.join(sorted(kinds))}): a retry may change a token"
        cure = "the same processor or GPU and --dtype for all, or ignore this"
        found.append(warning("layouts", "cluster", what, cure))
    return found or [ok("layouts", "cluster", "all workers have one KV layout and one arithmetic")]


def check_loopback(url: str, live: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check that no worker of a cluster of several machines advertises a loopback address."""
    if is_loopback(urlsplit(url).hostname or ""):
        return []
    found = []
    for row in live:
        endpoint = kv_endpoint(row)
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if endpoint and is_loopback(host):
            what = f"{endpoint} is only reached from its own machine"
            cure = (
                f"restart {_name(row)} with --kv-advertise tcp://HOST:PORT, if others send KV to it"
            )
            found.append(warning("address", _name(row), what, cure))
    return found


def is_this_machine(url: str) -> bool:
    """Whether the host of `url` is this machine, as without a host."""
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or host in ("", socket.gethostname())


def kv_endpoint(row: Mapping[str, Any]) -> str:
    """Return where a worker takes KV; "" if it takes none, or for a router before 0.3."""
    return str(row.get("kv", {}).get("endpoint", ""))


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['role']}-{row['rank']}"
