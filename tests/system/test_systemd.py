"""A real systemd starts the target with the units as they are installed, sandbox, keys and all.

It runs as the first process of namespaces of its own (`boot_systemd.sh`), which takes root; where
that cannot be, this is skipped and says why, and `test_units.py` is all there is.  The one thing
that is added to the units is a file for their logs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster import ROOT, until

BOOT = ROOT / "tests/system/boot_systemd.sh"
PYTHON = "/opt/baton/bin/python"
SERVICES = ("baton-router", "baton-prefill@0", "baton-decode@0")
ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
headers = {"content-type": "application/json", "authorization": f"Bearer {sys.argv[1]}"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
print(json.load(urllib.request.urlopen(request, timeout=60))["usage"]["completion_tokens"])
"""
CLUSTER = """
import json, sys, urllib.request
headers = {"authorization": f"Bearer {sys.argv[1]}"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/cluster", None, headers)
router = json.load(urllib.request.urlopen(request, timeout=60))["router"]
print(router.get("processes", [{"pid": 0}])[0]["pid"])
"""
BATON = "import sys; from router.command.main import main; sys.exit(main())"


class Machine:
    """A booted systemd; `pid` is its own."""

    def __init__(self, directory: Path) -> None:
        self._cgroup = cgroup_root() / f"baton-test-{os.getpid()}"
        self._cgroup.mkdir()
        (directory / "root").mkdir()
        python, packages = Path(sys.base_prefix), sysconfig.get_path("purelib")
        flags = "--mount --pid --fork --kill-child --net --ipc --uts --cgroup --propagation private"
        self._log = directory / "boot.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *flags.split(), BOOT, directory / "root", ROOT, python, packages],
                stdout=log,
                stderr=log,
                # Its cgroups are below this one, and end with it.
                preexec_fn=lambda: (self._cgroup / "cgroup.procs").write_text("0"),
            )
        self.pid = 0

    def until_booted(self) -> None:
        """Skip the test if it does not come up: not every machine lets root do this."""

        def is_booted() -> bool:
            if self._process.poll() is not None:
                pytest.skip(f"no systemd boots here: {self._log.read_text()[-300:]}")
            children = psutil.Process(self._process.pid).children()
            self.pid = children[0].pid if children else 0
            return bool(self.pid) and self.run("systemctl", "is-system-running") == "running"

        until(is_booted, "systemd runs")

    def run(self, *command: str) -> str:
        """Run a command inside; return its output, whatever its status."""
        inside = ["nsenter", "--target", str(self.pid), "--all", *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=60).stdout.strip()

    def path(self, name: str) -> Path:
        """A file of the machine, from outside."""
        return Path(f"/proc/{self.pid}/root/{name}")

    def show(self, service: str, setting: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={setting}", service)

    def states(self) -> list[str]:
        return [self.show(service, "ActiveState") for service in SERVICES]

    def logs(self) -> str:
        files = sorted(self.path("var/log").iterdir())
        return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in files)

    def end(self) -> None:
        """Kill everything and leave nothing."""
        self._process.kill()  # with it its child, the first process, and with that all others
        self._process.wait()
        while (self._cgroup / "cgroup.events").read_text().startswith("populated 1"):
            time.sleep(0.01)
        for path in sorted(self._cgroup.rglob("*/"), reverse=True):
            path.rmdir()
        self._cgroup.rmdir()


def cgroup_root() -> Path:
    """Where this process may make cgroups of version 2."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2" and "ro" not in options.split(","):
            own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
            return Path(where) / own
    pytest.skip("no cgroup2 file system that can be written to")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    tools = ("unshare", "nsenter", "findmnt", "pivot_root", "ip", "systemctl", "ldconfig")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing or not Path("/bin").is_symlink():
        pytest.skip(f"needs root, a merged /usr and these commands: {missing or 'all there'}")
    try:
        machine = Machine(tmp_path_factory.mktemp("machine"))
    except OSError as error:
        pytest.skip(f"no cgroup for a systemd: {error}")
    try:
        machine.until_booted()
        yield machine
    finally:
        machine.end()


@pytest.fixture(scope="module")
def key(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Install as the README says; give an API key."""
    machine.run("/opt/source/scripts/systemd/install", "--python", PYTHON)
    for name in ("router", "prefill", "decode"):
        with machine.path(f"etc/baton/{name}.env").open("a") as settings:
            settings.write("PYTHONPATH=/opt/source\nBATON_EXECUTOR=hash\n")
    keys = tmp_path_factory.mktemp("keys")
    run = [sys.executable, "-m", "router.command", "keys"]
    subprocess.run([*run, keys, "router", "prefill-0", "decode-0"], check=True, capture_output=True)
    for name in ("api_keys", "admin_keys"):
        subprocess.run([*run, "--api-key", keys / name], check=True, capture_output=True)
    for file in keys.iterdir():
        shutil.copy(file, machine.path(f"etc/credstore/baton.{file.name}"))
    yield (keys / "api_keys").read_text().splitlines()[-1]
    sys.stdout.write(machine.logs())  # shown when a test fails


def test_only_enabled_units_start_at_boot(machine: Machine, key: str) -> None:
    machine.run("systemctl", "enable", "baton-router")
    machine.run("systemctl", "start", "multi-user.target")  # as a boot does
    until(lambda: machine.states()[0] == "active", "the router is ready")
    assert machine.states() == ["active", "inactive", "inactive"]
    assert machine.show("baton.target", "ActiveState") == "inactive"
    machine.run("systemctl", "stop", "baton.target")
    until(lambda: machine.states() == ["inactive"] * 3, "it has stopped")


def test_the_target_serves_brings_back_who_is_killed_and_stops(machine: Machine, key: str) -> None:
    machine.run("systemctl", "enable", *SERVICES)
    machine.run("systemctl", "start", "baton.target")
    until(lambda: machine.states() == ["active"] * 3, "all three are ready")
    assert machine.run(PYTHON, "-c", ASK, key) == "4"
    assert machine.run(PYTHON, "-c", ASK, "sk-unknown") == ""

    killed = machine.show("baton-decode@0", "MainPID")
    machine.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "baton-decode@0")
    until(lambda: machine.show("baton-decode@0", "NRestarts") == "1", "it is started again")
    until(lambda: machine.states() == ["active"] * 3, "it is ready again")
    assert machine.show("baton-decode@0", "MainPID") != killed
    assert machine.run(PYTHON, "-c", ASK, key) == "4"

    machine.run("systemctl", "stop", "baton.target")
    until(lambda: machine.states() == ["inactive"] * 3, "all three have stopped")
    assert [machine.show(service, "Result") for service in SERVICES] == ["success"] * 3


def test_everything_is_restarted_by_one_command(machine: Machine, key: str) -> None:
    """The unit's main process stays; `systemctl reload` replaces the router below it alone."""
    machine.run("systemctl", "start", *SERVICES)
    until(lambda: machine.states() == ["active"] * 3, "all three are ready")
    before = [machine.show(service, "MainPID") for service in SERVICES]
    admin = machine.path("etc/credstore/baton.admin_keys").read_text().splitlines()[-1]
    environ = ("env", "PYTHONPATH=/opt/source", f"BATON_API_KEY={admin}")

    def router_pid() -> str:
        return machine.run(PYTHON, "-c", CLUSTER, key)

    done = machine.run(*environ, PYTHON, "-c", BATON, "restart")
    assert done.splitlines()[-1].startswith("router: the new one serves after"), done
    after = [machine.show(service, "MainPID") for service in SERVICES]
    assert after[0] == before[0] and not set(after[1:]) & set(before[1:])
    assert machine.states() == ["active"] * 3
    assert machine.run(PYTHON, "-c", ASK, key) == "4"

    successor = router_pid()
    assert successor not in ("", before[0])
    machine.run("systemctl", "reload", "baton-router")
    until(lambda: router_pid() != successor, "the next successor serves")
    assert machine.show("baton-router", "MainPID") == before[0]
    assert machine.run(PYTHON, "-c", ASK, key) == "4"

    machine.run(*environ, PYTHON, "-c", BATON, "drain", "decode-0")
    until(lambda: machine.states()[2] == "inactive", "the worker has left for good")
    machine.run("systemctl", "stop", *SERVICES)
    until(lambda: machine.states() == ["inactive"] * 3, "all three have stopped")
    assert [machine.show(service, "Result") for service in SERVICES] == ["success"] * 3


def test_uninstalling_leaves_no_link(machine: Machine, key: str) -> None:
    units = machine.path("etc/systemd/system")
    machine.run("systemctl", "enable", *SERVICES, "baton-decode@7")
    assert (units / "multi-user.target.wants/baton-decode@7.service").is_symlink()
    machine.run("/opt/source/scripts/systemd/uninstall")
    assert list(units.rglob("baton*")) == []
    assert machine.path("etc/baton/router.env").exists()
