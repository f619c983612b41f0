"""The commands of "Several machines" in scripts/README.md, in network namespaces of their own.

They run as printed but for what belongs to one machine: the directory /etc/baton, and `python`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import ROOT, START_S, until

DOCUMENT = (ROOT / "scripts" / "README.md").read_text()
SECTION = DOCUMENT[DOCUMENT.index("## Several machines") : DOCUMENT.index("## Security")]
COMMANDS: list[str] = re.findall(r"^    (.+)$", SECTION, re.MULTILINE)
PYTHON = os.environ | {"PYTHON": sys.executable}
# A bridge with a machine each at these addresses.
HOSTS = {"router": "10.0.0.1", "prefill": "10.0.0.2", "decode": "10.0.0.3"}
NAME = f"bt{os.getpid() % 100_000}"


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def make_hosts(stack: ExitStack) -> None:
    """Three network namespaces on one bridge, which is in a fourth, so that nothing outside is
    changed."""
    ip("netns", "add", f"{NAME}-net")
    stack.callback(ip, "netns", "del", f"{NAME}-net")
    ip("-n", f"{NAME}-net", "link", "add", "bridge", "type", "bridge")
    ip("-n", f"{NAME}-net", "link", "set", "bridge", "up")
    for host, address in HOSTS.items():
        space = f"{NAME}-{host}"
        ip("netns", "add", space)
        stack.callback(ip, "netns", "del", space)
        peer = ["peer", "name", f"to-{host}", "netns", f"{NAME}-net"]
        ip("-n", space, "link", "add", "eth0", "type", "veth", *peer)
        ip("-n", f"{NAME}-net", "link", "set", f"to-{host}", "master", "bridge", "up")
        ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    with ExitStack() as stack:
        if shutil.which("ip") is None or os.geteuid() != 0:
            pytest.skip("network namespaces need root and the ip command")
        try:
            make_hosts(stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield


def command(text: str, etc: Path) -> list[str]:
    """The command line for a command of the document, with our Python and one host's /etc/baton."""
    words = shlex.split(text.replace("/etc/baton", str(etc)))
    words[0] = {"python": sys.executable, "scripts/keys": str(ROOT / "scripts/keys")}.get(
        words[0], words[0]
    )
    return words


def on(host: str, words: list[str]) -> list[str]:
    return ["ip", "netns", "exec", f"{NAME}-{host}", *words]


def the(mark: str) -> str:
    """The one command of the section with this in it."""
    (found,) = [text for text in COMMANDS if mark in text]
    return found


def copy(source: Path, target: Path, *names: str) -> None:
    (target / "keys").mkdir(parents=True)
    for name in names:
        shutil.copy(source / "keys" / name, target / "keys" / name)


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command of the document on a host; its output goes to a file named like the host."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(host: str, text: str, etc: Path, executor: str = "hash") -> subprocess.Popen[bytes]:
        with (tmp_path / f"{host}.log").open("ab") as log:
            process = subprocess.Popen(
                on(host, [*command(text, etc), "--executor", executor]),
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        processes.append(process)
        return process

    yield run
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(START_S)


@pytest.mark.usefixtures("hosts")
def test_the_printed_commands_make_a_cluster(tmp_path: Path, start: Start) -> None:
    etc = {host: tmp_path / host / "etc" for host in HOSTS}
    for mark in ("keys router", "--api-key "):
        subprocess.run(command(the(mark), etc["router"]), check=True, env=PYTHON)
    for host in ("prefill", "decode"):
        copy(etc["router"], etc[host], f"{host}-0.key", "authorized_keys")
        (etc["router"] / "keys" / f"{host}-0.key").unlink()
    # A decode worker that joins first would read the prompt itself, and no KV would be sent.
    start("router", the("-m router") + " --local-prefill off", etc["router"])
    start("prefill", the("--role prefill"), etc["prefill"])
    # No KV comes with its offer, so that a short prompt takes the way of a long one.
    start("decode", the("--role decode") + " --kv-unasked-bytes 0", etc["decode"])

    def ask(host: str, key: str) -> str:
        text = the("curl").replace("$KEY", key)
        done = subprocess.run(
            on(host, ["curl", "-s", *command(text, tmp_path)[1:]]), capture_output=True, text=True
        )
        return done.stdout

    key = (etc["router"] / "api_keys").read_text().splitlines()[-1]
    answer = until(
        lambda: (text := ask("decode", key)) and "usage" in text and text, "answer", START_S
    )
    # Sampled without a seed, as the document says it: an EOS may come early.
    assert '"finish_reason":"length"' in answer or '"finish_reason":"stop"' in answer
    assert "invalid_api_key" in ask("prefill", "sk-wrong")

    # KV takes the port of its own, once that is open: here it is.  Asked again, as an answer whose
    # first token is EOS needs no KV.
    def is_open() -> bool:
        ask("decode", key)
        log = (tmp_path / "prefill.log").read_text()
        return "segments have a connection of their own" in log

    until(is_open, "segments")

    # One more worker while everything runs, as the section says.
    more = re.search(r"`(scripts/keys .* decode-1)`", SECTION)
    assert more is not None
    subprocess.run(command(more[1], etc["router"]), check=True, env=PYTHON)
    stranger = start("decode", the("--role decode").replace("--rank 0", "--rank 1"), etc["decode"])
    assert stranger.wait(START_S) == 78, "its key was not copied"
    copied = etc["decode"] / "keys"
    for host in ("prefill", "decode"):
        shutil.copy(etc["router"] / "keys" / "authorized_keys", etc[host] / "keys")
    shutil.copy(etc["router"] / "keys" / "decode-1.key", copied)
    start(
        "decode",
        the("--role decode")
        .replace("--rank 0", "--rank 1")
        .replace(":5580", ":5581")
        .replace("5590", "5591"),
        etc["decode"],
    )
    header = ["-H", f"authorization: Bearer {key}"]
    status = on("prefill", ["curl", "-s", *header, "http://10.0.0.1:8000/v1/cluster"])
    until(
        lambda: subprocess.run(status, capture_output=True, text=True).stdout.count('"ready"') == 3,
        "decode-1 ready",
        START_S,
    )
