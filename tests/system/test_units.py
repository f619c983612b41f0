"""The systemd units: clean, locked down, and what their own ExecStart lines start really works.

No service manager is booted here (`test_systemd.py` does that, where root may): a socket of our own
hears what the processes would tell it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

import router.config
import worker.config
from tests.cluster import ROOT, START_S, until
from tests.faults.ports import free_port
from wire.process.settings import Settings

UNITS = ROOT / "scripts" / "systemd"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("root")
    install(directory, "--gpu")
    return directory


def install(directory: Path, *flags: str) -> str:
    paths = (UNITS / "install", "--root", directory, "--python", sys.executable)
    command = [*map(str, paths), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def analyze(*args: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    return subprocess.run(["systemd-analyze", *args], capture_output=True, text=True)


def instance(root: Path, directory: Path, name: str, *, gpu: bool = False) -> Path:
    """A unit under the name that it would run by; --offline wants a file."""
    template = name.partition("@")[0] + ("@.service" if "@" in name else "")
    units = root / "etc/systemd/system"
    text = (units / template).read_text()
    if gpu:
        text += (units / f"{template}.d" / "gpu.conf").read_text()
    path = directory / name
    path.write_text(text)
    return path


NAMES = (
    "baton-router.service",
    "baton-prefill@0.service",
    "baton-decode@3.service",
    "baton-any@4.service",
)


def test_verify_has_nothing_to_say(root: Path, tmp_path: Path) -> None:
    paths = [instance(root, tmp_path, name) for name in NAMES]
    found = analyze("verify", "--man=no", *paths, root / "etc/systemd/system/baton.target")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "gpu", "threshold"),
    [*((name, False, 15) for name in NAMES), *((name, True, 20) for name in NAMES[1:])],
)
def test_security(root: Path, tmp_path: Path, name: str, gpu: bool, threshold: int) -> None:
    path = instance(root, tmp_path, name, gpu=gpu)
    found = analyze("security", "--offline=yes", f"--threshold={threshold}", "--no-pager", path)
    assert found.returncode == 0, found.stdout[-300:]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("router.env", router.config.Config),
        ("prefill.env", worker.config.Config),
        ("decode.env", worker.config.Config),
        ("any.env", worker.config.Config),
    ],
)
def test_the_env_files_name_settings_only(file: str, kind: type[Settings]) -> None:
    """Those that are commented out, too."""
    named = re.findall(r"^#?BATON_(\w+)=", (UNITS / file).read_text(), re.MULTILINE)
    assert named and {name.lower() for name in named} <= set(kind.model_fields)


def test_a_dry_run_changes_nothing_and_uninstall_leaves_the_settings(tmp_path: Path) -> None:
    assert "baton.target" in install(tmp_path, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    install(tmp_path, "--gpu")
    settings = tmp_path / "etc/baton/router.env"
    settings.write_text("BATON_MODEL=mine\n")
    install(tmp_path)
    subprocess.run([UNITS / "uninstall", "--root", tmp_path], check=True)
    assert list((tmp_path / "etc/systemd/system").iterdir()) == []
    assert settings.read_text() == "BATON_MODEL=mine\n"


class Service:
    """One unit's ExecStart with its environment files, and a socket that hears what it says."""

    def __init__(self, root: Path, directory: Path, name: str, **changes: str) -> None:
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = directory / f"{name}.notify"
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, daemon=True).start()
        settings = dict(self._settings(root, name)) | changes
        with (directory / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                env=os.environ | {"PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(path)} | settings,
                cwd="/",
                stdout=log,
                stderr=log,
            )

    def _settings(self, root: Path, name: str) -> Iterator[tuple[str, str]]:
        stem, _, rank = name.removesuffix(".service").partition("@")
        unit = root / "etc/systemd/system" / (f"{stem}@.service" if rank else name)
        for line in unit.read_text().replace("%i", rank).splitlines():
            key, _, value = line.partition("=")
            if key == "ExecStart":
                self._command = shlex.split(value)
            file = root / value.removeprefix("-/")
            if key == "EnvironmentFile" and file.exists():
                for setting in file.read_text().splitlines():
                    if setting and not setting.startswith("#"):
                        variable, _, text = setting.partition("=")
                        yield variable, text

    def _listen(self) -> None:
        while heard := self._socket.recv(4096).decode():
            self.said += heard.splitlines()

    @property
    def statuses(self) -> int:
        return sum(line.startswith("STATUS=") for line in self.said)

    def index(self, word: str) -> int | None:
        return next((i for i, line in enumerate(self.said) if line.startswith(word)), None)

    def until_ready(self) -> None:
        until(lambda: "READY=1" in self.said, "READY=1")

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_the_units_own_lines_serve_and_drain(root: Path, tmp_path: Path) -> None:
    http, tcp, bus = (free_port() for _ in range(3))
    ours = {"BATON_ROUTER": f"tcp://127.0.0.1:{bus}", "BATON_EXECUTOR": "hash"}
    slow = ours | {"BATON_HASH_STEP_MS": "20"}
    services: list[Service] = []
    try:
        decode = Service(root, tmp_path, NAMES[2], WATCHDOG_USEC="1000000", **slow)
        services.append(decode)
        until(lambda: decode.index("STATUS=joining") is not None, "joining")
        assert "READY=1" not in decode.said, "it has no router yet"
        router = Service(
            root,
            tmp_path,
            NAMES[0],
            BATON_HTTP=f"127.0.0.1:{http}",
            BATON_TCP=f"127.0.0.1:{tcp}",
            BATON_BUS=f"tcp://127.0.0.1:{bus}",
        )
        services.append(router)
        prefill = Service(root, tmp_path, NAMES[1], **ours)
        services.append(prefill)
        for service in services:
            service.until_ready()
        until(lambda: decode.index("WATCHDOG=1") is not None, "fed")
        extended, ready = decode.index("EXTEND_TIMEOUT_USEC="), decode.index("READY=1")
        assert extended is not None and ready is not None and extended < ready

        ready_status = "STATUS=0 running, 0 waiting, 1 prefill and 1 decode workers ready"
        until(lambda: ready_status in router.said, "live figures")
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 40, "stream": True}
        body |= {"ignore_eos": True}
        url = f"http://127.0.0.1:{http}/v1/completions"
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", url, json=body) as answer,
        ):
            lines = (line for line in answer.iter_lines() if line)
            assert answer.status_code == 200 and next(lines).startswith("data: {")
            for service in (router, decode):  # in the middle of the answer
                service.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and "length" in rest[-2]
        assert [service.process.wait(START_S) for service in (router, decode)] == [0, 0]
        for service in (router, decode):
            until(partial(service.said.count, "STOPPING=1"), "it says that it stops")
            assert service.said.index("STOPPING=1") > service.said.index("READY=1")
        assert prefill.end() == 0
    finally:
        for service in services:
            service.kill()
