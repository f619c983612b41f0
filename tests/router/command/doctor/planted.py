"""Faults to plant: each puts a real one into a directory, the environment or a cluster."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from router.command.main import main
from tests.cluster import ROOT, START_S, Cluster, until
from wire.aio.port import new_key_pair
from wire.process.keys import KeyPair
from wire.process.model import DEMO

DEFAULTS = {
    "--http": "127.0.0.1:0",
    "--tcp": "127.0.0.1:0",
    "--bus": "tcp://127.0.0.1:0",
    "--executor": "hash",
}
LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@dataclass
class Site:
    """Where faults are planted."""

    path: Path
    environ: pytest.MonkeyPatch
    cluster: Cluster | None = None

    @property
    def running(self) -> Cluster:
        """The cluster, for faults that need one."""
        assert self.cluster is not None
        return self.cluster

    def program(self, name: str, script: str) -> None:
        """Put a program into PATH."""
        directory = self.path / "bin"
        directory.mkdir(exist_ok=True)
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
        self.environ.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def keys(self, *names: str) -> dict[str, KeyPair]:
        """Make keys as scripts/keys does, and set BATON_KEYS."""
        pairs = {name: new_key_pair() for name in names}
        (self.path / "keys").mkdir(mode=0o700)
        for name, pair in pairs.items():
            (self.path / "keys" / f"{name}.key").write_text(pair.text())
            (self.path / "keys" / f"{name}.key").chmod(0o600)
        lines = [f"{pair.public} {name}\n" for name, pair in pairs.items()]
        (self.path / "keys" / "authorized_keys").write_text("".join(lines))
        self.environ.setenv("BATON_KEYS", str(self.path / "keys"))
        return pairs

    def model(self) -> Path:
        """Copy the model demo."""
        shutil.copytree(DEMO, self.path / "model")
        return self.path / "model"


def isolate(environ: pytest.MonkeyPatch, path: Path) -> None:
    """Take out the settings of this machine, and give it a cache in `path`."""
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        environ.delenv(name)
    environ.setenv("XDG_CACHE_HOME", str(path / "cache"))


def diagnosed(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its status and the findings.

    The executor is hash and ports are free ones, unless the flags say otherwise.
    """
    capsys.readouterr()
    defaults = {name: value for name, value in DEFAULTS.items() if name not in flags}
    given = [part for pair in defaults.items() for part in pair]
    status = main(["doctor", "--json", *given, *flags])
    return status, json.loads(capsys.readouterr().out)["findings"]


def bad(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings that are not ok."""
    return [each for each in findings if each["level"] != "ok"]


Plant = Callable[[Site], list[str]]


@dataclass
class Fault:
    """A planted fault, and what the finding and its cure must name.

    `plant` is flags and variables, or plants the fault and returns the flags.
    """

    plant: Plant | str
    check: str
    says: str
    cure: str

    def __str__(self) -> str:
        return f"{self.check}: {self.says}"

    def is_found(
        self, site: Site, capsys: pytest.CaptureFixture[str], also: Set[str] = frozenset()
    ) -> None:
        """Check that the command finds it once, with its cure, and no fault of other checks.

        `also` are checks that may find faults too.
        """
        names: dict[str, object] = {"path": site.path}
        if site.cluster is not None:
            names |= {"router": site.cluster.router.pid, "bus": site.cluster.bus}
            names["http"] = site.cluster.http.removeprefix("http://")
        if isinstance(self.plant, str):
            words = shlex.split(self.plant.format(**names))
            flags = [word for word in words if not word.startswith("BATON_")]
            for variable in {*words} - {*flags}:
                site.environ.setenv(*variable.split("=", 1))
        else:
            flags = self.plant(site)
        status, findings = diagnosed(flags, capsys)
        cure = self.cure.format(**names)
        faults = [each for each in findings if each["level"] == "fault"]
        wanted = [
            each
            for each in faults
            if each["check"] == self.check and self.says in each["what"] and cure in each["cure"]
        ]
        assert status == 1 and len(wanted) == 1, bad(findings)
        assert {each["check"] for each in faults} <= also | {self.check}, bad(findings)


def open_key(site: Site) -> list[str]:
    site.keys("router")
    (site.path / "keys" / "router.key").chmod(0o644)
    return []


def mixed_key(site: Site) -> list[str]:
    public, secret = site.keys("router")["router"].public, new_key_pair().secret
    (site.path / "keys" / "router.key").write_text(KeyPair(public, secret).text())
    return []


def unlisted_key(site: Site) -> list[str]:
    listed = f"{site.keys('router', 'prefill-0')['router'].public} router\n"
    (site.path / "keys" / "authorized_keys").write_text(listed)
    return []


def missing_key(site: Site) -> list[str]:
    site.keys("router", "prefill-0")
    return ["--local", "1,1"]


def writable_list(site: Site) -> list[str]:
    site.keys("router")
    (site.path / "keys" / "authorized_keys").chmod(0o666)
    return []


def short_api_key(site: Site) -> list[str]:
    path = site.path / "api-keys"
    path.write_text("secret\n")
    path.chmod(0o600)
    return ["--api-keys", str(path)]


def expired_certificate(site: Site) -> list[str]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baton test")])
    made = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=now - timedelta(days=2),
        not_valid_after=now - timedelta(days=1),
    ).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (site.path / "cert.pem").write_bytes(made.public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (site.path / "key.pem").write_bytes(secret)
    (site.path / "key.pem").chmod(0o600)
    return ["--tls-cert", str(site.path / "cert.pem"), "--tls-key", str(site.path / "key.pem")]


def truncated_weights(site: Site) -> list[str]:
    weights = next(site.model().glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    return ["--model", str(weights.parent), "--executor", "torch"]


def another_model(site: Site) -> list[str]:
    (site.model() / "tokenizer.json").unlink()
    site.environ.setenv("BATON_ROUTER", site.running.bus)
    return ["--url", site.running.http, "--model", str(site.path / "model")]


def disk_kv_is_a_file(site: Site) -> list[str]:
    (site.path / "kv").write_text("")
    return ["--worker-args", f"--disk-kv {site.path}/kv --disk-kv-bytes 4096"]


def open_cache(site: Site) -> list[str]:
    cache = site.path / "cache" / "baton" / "kernels"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    return []


def bus_without_keys(site: Site) -> list[str]:
    site.keys("router", "decode-0")
    site.environ.setenv("BATON_ROUTER", site.running.bus)
    return ["--url", site.running.http]


def start_limit(site: Site) -> list[str]:
    unit = "Id=baton-router.service\\nActiveState=failed\\nResult=start-limit-hit\\n"
    site.program("systemctl", f"printf '{unit}'")
    return []


def no_cupy(site: Site) -> list[str]:
    site.program("nvidia-smi", "echo '| Driver Version: 580.1  CUDA Version: 13.0 |'")
    return ["--executor", "torch"]


def dead_driver(site: Site) -> list[str]:
    site.program("nvidia-smi", "echo 'Unable to determine the device handle'; exit 9")
    return ["--executor", "torch"]


# Of a machine.
FAULTS = (
    Fault("--tcp 192.0.2.7:8001 --insecure", "ports", "no interface", "ip -brief address"),
    Fault("--max-connections 0", "settings", "--max-connections", "run baton doctor again"),
    Fault(open_key, "keys", "everybody here can read", "chmod 600 {path}/keys/router.key"),
    Fault(mixed_key, "keys", "does not belong to the public key", "rm {path}/keys/router.key"),
    Fault(unlisted_key, "keys", "has no such key", "prefill-0' >> {path}/keys/authorized_keys"),
    Fault(missing_key, "keys", "no key of decode-0", "keys {path}/keys decode-0"),
    Fault(writable_list, "keys", "can add keys", "chmod o-w {path}/keys/authorized_keys"),
    Fault(short_api_key, "api keys", "fewer than 16", "keys --api-key {path}/api-keys"),
    Fault(expired_certificate, "tls", "expired on", "put a new certificate into {path}/cert.pem"),
    Fault(truncated_weights, "model", "is the file whole?", "--local-dir {path}/model"),
    Fault("--model {path}/nothing", "model", "no such directory", "--model DIR"),
    Fault(
        "--executor torch --worker-args '--kv-cache-bytes 1125899906842624'",
        *("memory", "are free", "--kv-cache-bytes "),
    ),
    Fault(
        "--worker-args '--disk-kv {path}/kv --disk-kv-bytes 1152921504606846976'",
        *("disk", "there is room for", "--disk-kv-bytes "),
    ),
    Fault(disk_kv_is_a_file, "disk", "no directory", "mkdir -p {path}/kv"),
    Fault(open_cache, "cache", "other users could put code", "rm -r {path}/cache/baton/kernels"),
    Fault(
        "BATON_ROUTER=tcp://192.0.2.7:5570",
        *("address", "the router is at tcp://192.0.2.7", "--kv-advertise"),
    ),
    Fault("--url http://127.0.0.1:1", "reach", "nobody listens", "start the router there"),
    Fault(start_limit, "systemd", "starts it no more", "systemctl reset-failed baton-router"),
    Fault(no_cupy, "gpu", "no CuPy", "pip install 'baton-serve[cuda]'"),
    Fault(dead_driver, "gpu", "Unable to determine the device handle", "dmesg"),
)

# Of a cluster, or beside one.
SICK = "--url http://{http}"
WITH_BUS = f"{SICK} BATON_ROUTER=tcp://"
CLUSTER_FAULTS = (
    Fault("--bus {bus}", "ports", "an old process", "kill {router}"),
    Fault(another_model, "model", "and the router has", "the same --model"),
    Fault(f"{WITH_BUS}127.0.0.1:1", "reach", "Connection refused", "--bus tcp://127.0.0.1:1"),
    Fault(f"{WITH_BUS}{{http}}", "reach", "does not speak ZeroMQ", "the --bus of the router"),
    Fault(bus_without_keys, "reach", "has no keys", "start the router with --keys DIR"),
    Fault(SICK, "reach", "KV cannot be sent there", "start decode-7 with --kv-advertise"),
    Fault(SICK, "workers", "lost", "baton worker --role decode --rank 8"),
    Fault(SICK, "workers", "model fingerprint", "restart decode-9"),
)


@contextmanager
def sickened(cluster: Cluster, directory: Path) -> Iterator[None]:
    """Add a worker that nobody reaches, one that was killed, and one that was refused."""
    other = directory / "other"
    shutil.copytree(DEMO, other)
    (other / "tokenizer.json").unlink()
    flags = ("--role", "decode", "--rank", "9", "--executor", "hash", "--model", str(other))
    cluster.worker("decode", 7, "--kv-advertise", "tcp://127.0.0.1:1")
    cluster.worker("decode", 8).send_signal(signal.SIGKILL)
    command = [sys.executable, "-m", "worker", *flags, "--router", cluster.bus]
    with (directory / "refused.log").open("wb") as log:
        refused = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: cluster.status()["refused"], "a worker refused", START_S)
        until(lambda: cluster.find("decode", 8, "lost"), "a worker lost")
        yield
    finally:
        refused.terminate()
        refused.wait()


@contextmanager
def listener() -> Iterator[tuple[int, int]]:
    """Another process that listens on a port; yields the port and the process id."""
    program = [sys.executable, "-c", LISTEN]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        yield int(process.stdout.readline()), process.pid
        process.stdin.close()
