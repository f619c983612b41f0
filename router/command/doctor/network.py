"""Checks of the network: ports, the bus and the KV endpoints, addresses that workers advertise."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from router.command.doctor.finding import Finding, fault, ok, warning
from router.command.doctor.sockets import holder, is_own, mechanism, try_bind
from router.config import Config, split_endpoint
from router.http.origin import is_loopback

RECEIVERS: Final = ("decode", "any")


def check_ports(config: Config, *, is_serving: bool) -> list[Finding]:
    """Check that the router can bind its endpoints; `is_serving` if one already has them."""
    buses = [("--bus", config.bus_of(index)) for index in range(config.processes)]
    endpoints = [("--http", config.http), ("--tcp", config.tcp), *buses]
    return [check_port(flag, endpoint, is_serving=is_serving) for flag, endpoint in endpoints]


def check_port(flag: str, endpoint: str, *, is_serving: bool) -> Finding:
    """Check that a process could listen at HOST:PORT, tcp://HOST:PORT or ipc://PATH."""
    where = f"{flag} {endpoint}"
    if endpoint.startswith("ipc://"):
        return _check_socket_file(where, Path(endpoint.removeprefix("ipc://")))
    host, port = split_endpoint(endpoint, flag)
    try:
        try_bind(host, port)
    except socket.gaierror as error:
        cure = f"{flag} 127.0.0.1:{port}, or put the name {host} into DNS or /etc/hosts"
        return fault("ports", where, f"the name {host} cannot be resolved: {error.strerror}", cure)
    except OSError as error:
        return _cannot_bind(where, flag, port, error.errno or 0, is_serving=is_serving)
    return ok("ports", where, "is free")


def _cannot_bind(where: str, flag: str, port: int, number: int, *, is_serving: bool) -> Finding:
    if number == errno.EADDRINUSE:
        taken_by = holder(port)
        who, cure = "a process of another user", f"sudo ss -ltnp 'sport = :{port}'"
        if taken_by is not None:
            who, cure = str(taken_by), f"kill {taken_by.pid}"
        if taken_by is not None and taken_by.is_baton:
            if is_serving:
                return ok("ports", where, f"is taken by the router that answers, {who}")
            who = f"an old {who}, which does not answer here"
        return fault("ports", where, f"is taken by {who}", f"{cure}, or give {flag} another port")
    if number == errno.EACCES:
        cure = f"sudo sysctl net.ipv4.ip_unprivileged_port_start={port}, or a port from 1024"
        return fault("ports", where, f"port {port} is privileged, and this user may not bind", cure)
    if number == errno.EADDRNOTAVAIL:
        cure = f"`ip -brief address` lists the addresses of this machine: give {flag} one of them"
        return fault("ports", where, "no interface of this machine has this address", cure)
    return fault("ports", where, os.strerror(number), f"give {flag} another address")


def _check_socket_file(where: str, path: Path) -> Finding:
    if os.access(path.parent, os.W_OK | os.X_OK):
        return ok("ports", where, "can be created")
    cure = f"mkdir -p {path.parent} && chown $USER {path.parent}"
    return fault("ports", where, f"{path.parent} is missing or not writable", cure)


def check_bus(endpoint: str, *, has_keys: bool) -> Finding:
    """Check that a worker here could connect to a router's bus, and that both or none have keys."""
    where = f"bus {endpoint}"
    if endpoint.startswith("ipc://"):
        if Path(endpoint.removeprefix("ipc://")).is_socket():
            return ok("reach", where, "is there")
        return fault("reach", where, "there is no such socket", f"baton router --bus {endpoint}")
    host, port = split_endpoint(endpoint, "--bus")
    host = "127.0.0.1" if host in ("*", "0.0.0.0") else host
    try:
        found = mechanism(host, port)
    except OSError as error:
        cure = f"start the router there with --bus tcp://{host}:{port}, or open its firewalls"
        return fault("reach", where, f"cannot be reached from here: {_reason(error)}", cure)
    except ValueError as error:
        cure = "say the --bus of the router, not its --http or --tcp"
        return fault("reach", where, str(error), cure)
    if found == "CURVE" and not has_keys:
        cure = "start workers here with --keys DIR"
        return fault("reach", where, "has keys, and workers here would have none", cure)
    if found != "CURVE" and has_keys:
        cure = "start the router with --keys DIR"
        return fault("reach", where, "has no keys, and workers here would use some", cure)
    return ok("reach", where, "answers" + (" and has keys" if has_keys else ""))


def check_kv_endpoint(worker: str, endpoint: str) -> Finding:
    """Check that this machine can connect to the KV endpoint of a running worker."""
    where = f"{worker} {endpoint}"
    if not endpoint.startswith("tcp://"):
        return ok("reach", where, "is for workers of its own machine")
    host, port = split_endpoint(endpoint, "--kv-advertise")
    try:
        mechanism(host, port)
    except (OSError, ValueError) as error:
        cure = (
            f"start {worker} with --kv-advertise tcp://HOST:{port}, an address of its machine that "
            f"others reach, and open port {port} there"
        )
        return fault("reach", where, f"KV cannot be sent there from here: {_reason(error)}", cure)
    return ok("reach", where, "takes KV from here")


def check_advertised(workers: Sequence[Any]) -> list[Finding]:
    """Check the KV endpoints that workers of this machine would advertise.

    `workers` are of `worker.config.Config`, which has refused wildcards already.
    """
    found = []
    for worker in workers:
        endpoint = worker.kv_advertise or worker.kv_bind
        if worker.role in RECEIVERS and endpoint.startswith("tcp://"):
            host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            others = [each for each in worker.router if not is_loopback(_host(each))]
            if others or not is_loopback(host):  # else nobody elsewhere is to reach it
                found.append(_check_address(f"{worker.party} {endpoint}", host, others))
    return found


def _check_address(where: str, host: str, others: Sequence[str]) -> Finding:
    if is_loopback(host):
        cure = "--kv-bind tcp://0.0.0.0:5600 --kv-advertise tcp://ADDRESS:5600 --keys DIR"
        what = f"only this machine can send KV there, and the router is at {others[0]}"
        return fault("address", where, what, cure)
    try:
        is_here = is_own(host)
    except OSError as error:
        cure = f"--kv-advertise with an address, or put the name {host} into DNS or /etc/hosts"
        return fault("address", where, f"{host} cannot be resolved: {error.strerror}", cure)
    if not is_here:
        cure = "`ip -brief address` lists those of this machine; ignore this behind port mapping"
        return warning("address", where, "no interface of this machine has this address", cure)
    return ok("address", where, "is an address of this machine")


def _host(endpoint: str) -> str:
    return split_endpoint(endpoint, "--bus")[0]


def _reason(error: Exception) -> str:
    is_late = isinstance(error, TimeoutError)
    return "no answer in time" if is_late else str(getattr(error, "strerror", None) or error)
