"""Ports, addresses and endpoints that need no planted cluster."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.command.doctor import network
from router.command.doctor.network import check_advertised, check_port, check_ports
from router.config import Config


def test_a_privileged_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int) -> None:  # the tests may run as root, which may bind it
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(network, "try_bind", refuse)
    found = check_port("--http", "127.0.0.1:80", is_serving=False)
    assert found.level == "fault" and "ip_unprivileged_port_start=80" in found.cure


def test_every_process_has_a_bus_and_a_name_must_be_known() -> None:
    config = Config(
        processes=2, bus="tcp://127.0.0.1:0", http="nothing.invalid:0", tcp="[::1]:0", insecure=True
    )
    levels = [each.level for each in check_ports(config, is_serving=False)]
    assert levels[0] == "fault" and levels[2:] == ["ok", "ok"]


def test_the_directory_of_a_socket_file(tmp_path: Path) -> None:
    assert check_port("--bus", f"ipc://{tmp_path}/bus", is_serving=False).level == "ok"
    found = check_port("--bus", f"ipc://{tmp_path}/none/bus", is_serving=False)
    assert found.level == "fault" and f"mkdir -p {tmp_path}/none" in found.cure


@pytest.mark.parametrize(
    ("role", "advertise", "router", "level"),
    [
        ("decode", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", []),
        ("decode", "tcp://127.0.0.1:1", "tcp://192.0.2.1:2", ["fault"]),
        ("any", "tcp://192.0.2.7:1", "tcp://192.0.2.1:2", ["warning"]),
        ("any", "tcp://nothing.invalid:1", "tcp://192.0.2.1:2", ["fault"]),
        ("prefill", "tcp://127.0.0.1:1", "tcp://192.0.2.1:2", []),
        ("decode", "ipc:///tmp/kv", "tcp://127.0.0.1:2", []),
    ],
)
def test_the_address_that_a_worker_advertises(
    role: str, advertise: str, router: str, level: list[str]
) -> None:
    worker = SimpleNamespace(
        role=role, party=f"{role}-0", kv_advertise=advertise, kv_bind="", router=(router,)
    )
    assert [each.level for each in check_advertised([worker])] == level
