"""The container files: what compose.yaml starts serves, and every setting in them exists.

No image is built unless there is a Docker daemon; the commands run as processes of this machine,
with its folders and free ports in the places of the containers'.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import router.config
import worker.config
from tests.cluster import ROOT, START_S, until
from tests.faults.ports import free_port
from wire.process.settings import EX_LEFT, Settings

FILES = ROOT / "scripts" / "container"
COMPOSE = yaml.safe_load((FILES / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
PODS = {
    item["metadata"]["name"]: item["spec"]["template"]["spec"]
    for item in yaml.safe_load((FILES / "kubernetes.yaml").read_text())["items"]
    if "template" in item["spec"]
}
BATON = f'#!/bin/sh\nexec {sys.executable} -c "import sys; from router.command.main import main; '
BATON += 'sys.exit(main())" "$@"\n'


def settings(name: str) -> set[str]:
    kind: type[Settings] = {"router": router.config.Config}.get(name, worker.config.Config)
    return {f"BATON_{field.upper()}" for field in kind.model_fields}


def variables() -> Iterator[tuple[str, str]]:
    for service in SERVICES.values():
        for name in service.get("environment", {}):
            yield service["command"][0], name
    for pod in PODS.values():
        for container in pod["containers"]:
            for variable in container["env"]:
                yield container["args"][0], variable["name"]


@pytest.mark.parametrize(("program", "variable"), sorted(set(variables())))
def test_every_variable_is_a_setting(program: str, variable: str) -> None:
    assert variable in settings(program) | {"POD_IP"}


def test_nothing_runs_as_root_or_writes_beside_its_volumes() -> None:
    assert "\nUSER 10001:10001\n" in (FILES / "Dockerfile").read_text()
    for service in SERVICES.values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    for pod in PODS.values():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["enableServiceLinks"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}


class Containers:
    """Runs the services of compose.yaml as processes on loopback."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ports = {port: free_port() for port in (8000, 8001, 5570, 5580, 5590, 9100)}
        self._processes: list[subprocess.Popen[bytes]] = []
        shim = directory / "bin" / "baton"
        shim.parent.mkdir()
        shim.write_text(BATON)
        shim.chmod(0o755)
        for party in ("router", "prefill-0", "decode-0"):
            (directory / "keys" / party).mkdir(parents=True, mode=0o700)

    def local(self, text: str, keys: str = "") -> str:
        """Return a text of the file with this machine's folders, addresses and ports."""
        text = text.replace("${BATON_MODEL:-demo}", "demo").replace("$$", "$")
        text = text.replace("/etc/baton/keys", f"{self._directory}/keys/{keys}")
        text = text.replace("/tmp/keys", f"{self._directory}/made")
        text = text.replace(" /keys/", f" {self._directory}/keys/")
        text = text.replace('"/keys/', f'"{self._directory}/keys/')
        for host in ("0.0.0.0", "//router", "//decode"):
            text = text.replace(host, "//127.0.0.1" if "/" in host else "127.0.0.1")
        # All at once: a free port may have another's digits.
        return re.sub(r"\b\d{4}\b", lambda port: str(self.ports[int(port[0])]), text)

    def start(self, name: str, keys: str = "") -> subprocess.Popen[bytes]:
        service = SERVICES[name]
        own = {
            key: self.local(str(value), keys)
            for key, value in service.get("environment", {}).items()
        }
        if name == "prefill":  # in a network of its own the two have the same port
            self.ports[9100], own["BATON_METRICS"] = (port := free_port()), f"127.0.0.1:{port}"
        path = f"{self._directory}/bin:{os.environ['PATH']}"
        command = [*service.get("entrypoint", ["baton"]), *map(self.local, service["command"])]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **own}
        environ["BATON_EXECUTOR"] = "hash"  # starts sooner
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def is_healthy(self, name: str) -> bool:
        _, _, *arguments = SERVICES[name]["healthcheck"]["test"]
        arguments = [sys.executable, *map(self.local, arguments)]
        return subprocess.run(arguments, capture_output=True).returncode == 0

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(START_S)


def test_what_compose_starts_serves_with_keys(tmp_path: Path) -> None:
    containers = Containers(tmp_path)
    try:
        for _ in range(2):  # the second time there is nothing to make
            assert containers.start("keys").wait(START_S) == 0
        keys = {
            path.relative_to(tmp_path / "keys").as_posix() for path in tmp_path.glob("keys/*/*")
        }
        assert keys == {
            *("router/router.key", "router/authorized_keys"),
            *("router/api_keys", "router/admin_keys"),
            *("prefill-0/prefill-0.key", "prefill-0/authorized_keys"),
            *("decode-0/decode-0.key", "decode-0/authorized_keys"),
        }
        containers.start("router", "router")
        containers.start("decode", "decode-0")
        until(lambda: containers.is_healthy("decode"), "decode is healthy", START_S)
        prefill = containers.start("prefill", "prefill-0")
        until(lambda: containers.is_healthy("router"), "router is healthy", START_S)
        until(lambda: containers.is_healthy("prefill"), "prefill is healthy", START_S)
        as_client, as_operator = (
            {"authorization": f"Bearer {path.read_text().splitlines()[-1]}"}
            for path in (tmp_path / "keys/router/api_keys", tmp_path / "keys/router/admin_keys")
        )
        url = f"http://127.0.0.1:{containers.ports[8000]}"
        with httpx.Client(trust_env=False, timeout=60) as client:
            until(lambda: client.get(f"{url}/readyz").status_code == 200, "it is ready", START_S)
            body = {"model": "demo", "prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}
            assert client.post(f"{url}/v1/completions", json=body).status_code == 401
            answer = client.post(f"{url}/v1/completions", json=body, headers=as_client)
            assert answer.json()["usage"]["completion_tokens"] == 4
            drain = f"{url}/v1/workers/prefill-0/drain"
            assert client.post(drain, json={}, headers=as_client).status_code == 403
            assert client.post(drain, json={}, headers=as_operator).status_code == 200
        assert prefill.wait(START_S) == EX_LEFT
    except BaseException:
        sys.stderr.write((tmp_path / "log").read_text()[-4000:])
        raise
    finally:
        containers.stop()


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
def test_the_dockerfile_has_no_findings() -> None:
    command = ["hadolint", str(FILES / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def has_builder() -> bool:
    docker = shutil.which("docker") or ""
    return docker != "" and subprocess.run([docker, "info"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_builder(), reason="no Docker daemon runs")
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_shows_its_commands() -> None:
    build = ["docker", "build", "--file", str(FILES / "Dockerfile"), "--tag", "baton", str(ROOT)]
    subprocess.run(build, check=True)
    shown = subprocess.run(["docker", "run", "--rm", "--read-only", "baton"], capture_output=True)
    assert b"usage: baton COMMAND" in shown.stdout
