"""`baton doctor`: the flags, the order of the checks, and the report."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router.command.client import read_api_key
from router.command.doctor import access, cluster, machine, network, splitting, storage
from router.command.doctor.finding import Finding, fault, json_of, ok, text_of
from router.command.doctor.settings import Site, read_site
from router.command.operator import new_parser
from router.config import Config, split_endpoint
from wire.process.api_keys import open_api_keys
from wire.process.keys import credential
from wire.process.log import configure
from wire.process.memory import free_memory
from wire.process.settings import ConfigError

PROLOGUE = """Check this machine before a start, and a running cluster.

Besides the flags below it takes those of `baton router`, and flags of workers in --worker-args, and
reads the same environment variables: it checks what these settings would start here.  Nothing is
changed and nothing downloaded.  With --url it checks a worker's machine against the router there.
The exit status is 1 if there is a fault.
"""


def run(argv: Sequence[str]) -> int:
    """Run all checks, write the findings to stdout; return 1 if one is a fault, else 0."""
    parser = new_parser("doctor", PROLOGUE)
    parser.add_argument("--url", default="", help="HTTP endpoint of a running router, elsewhere")
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    given, rest = parser.parse_known_args(argv)
    configure("error")
    findings = diagnose(given.url, rest)
    sys.stdout.write(json_of(findings) if given.json else text_of(findings))
    return int(any(each.level == "fault" for each in findings))


def diagnose(url: str, argv: Sequence[str]) -> list[Finding]:
    """Return the findings about this machine and the router at `url`, or at --http of `argv`."""
    site, found = read_site(argv)
    if site is None:
        return [*found, *check_machine()]
    config = site.router
    at = url or own_url(config)
    certificate = config.tls_cert if cluster.is_this_machine(url) else None
    reply = cluster.fetch(at, api_key(config, url), certificate) if at else None
    is_serving = isinstance(reply, cluster.Reply)
    live: list[dict[str, Any]] = []
    fingerprint = ""
    if isinstance(reply, cluster.Reply):
        found += cluster.check_cluster(at, reply)
        live = [row for row in reply.body["workers"] if row["state"] != "lost"]
        fingerprint = reply.body["router"].get("fingerprint", "")
    elif isinstance(reply, Finding):
        found.append(reply)
    elif url:
        cure = "start the router there, or open its port in the firewalls between"
        found.append(fault("reach", url, "nobody listens there", cure))
    else:
        found.append(ok("reach", f"--http {config.http}", "no router answers there now"))
    if not url:
        found += network.check_ports(config, is_serving=reply is not None)
    found += check_site(site, fingerprint, has_router=not url, is_serving=is_serving)
    rate = splitting.loopback_rate()
    found += splitting.check_links(rate, live)
    found.append(splitting.predict(live, rate))
    return found + check_machine(site)


def check_site(
    site: Site, fingerprint: str, *, has_router: bool, is_serving: bool
) -> list[Finding]:
    """Check what the settings name: keys, certificate, addresses, model, directories, memory."""
    config, found = site.router, list[Finding]()
    parties = [worker.party for worker in site.workers] if site.is_local else []
    directory = access.key_directory(config)
    found += access.check_keys(directory, ["router", *parties] if has_router else parties)
    if has_router:
        found += access.check_api_keys(config)
        found.append(access.check_certificate(config, datetime.now(UTC)))
    buses = {config.bus} if has_router else {each for it in site.workers for each in it.router}
    if is_serving:  # else there is no bus; with port 0, only the router's log says where it is
        known = sorted(bus for bus in buses if not bus.endswith(":0"))
        found += [network.check_bus(bus, has_keys=directory is not None) for bus in known]
    found += network.check_advertised(site.workers)
    found += storage.check_model(
        config.model,
        has_weights=config.executor == "torch",
        cluster_fingerprint=fingerprint,
    )
    is_whole = found[-1].level == "ok"
    path = storage.find_model(config.model)
    if isinstance(path, Path) and is_whole and config.executor == "torch" and not is_serving:
        on_gpu = None
        if config.device != "cpu":
            on_gpu = machine.free_gpu_memory(site.workers[0].num_processes)
        free = free_memory() if on_gpu is None else on_gpu
        found.append(storage.check_memory(site.workers, path, free, is_gpu=on_gpu is not None))
    kept = [storage.check_disk_kv(worker) for worker in site.workers]
    return [*found, *(each for each in kept if each is not None)]


def check_machine(site: Site | None = None) -> list[Finding]:
    """Check what is there whatever the settings: processor, cores, files, GPU, systemd, cache."""
    found = [machine.check_processor(machine.processor_flags())]
    if site is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_files = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        found.append(machine.check_descriptors(site.router, num_files))
        found += machine.check_threads(site.workers, os.environ)
        if site.router.executor == "torch":
            found += machine.check_gpu(site.router.device)
    return [*found, storage.check_cache(os.environ), *machine.check_units()]


def own_url(config: Config) -> str:
    """Return the URL of a router that runs here with these settings; "" if its port is 0."""
    host, port = split_endpoint(config.http, "--http")
    if not port:
        return ""
    host = "127.0.0.1" if host in ("*", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{port}"


def api_key(config: Config, url: str) -> str:
    """Return $BATON_API_KEY, else for the router of this machine the first key of its file.

    A key of the file is never sent to another machine.
    """
    path = config.api_keys or credential("api_keys")
    given = read_api_key(None)
    if given or path is None or not cluster.is_this_machine(url):
        return given
    try:
        open_api_keys(path)
    except ConfigError:
        return ""
    return read_api_key(path)
