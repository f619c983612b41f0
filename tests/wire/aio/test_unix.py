"""A descriptor goes to processes of the same user only, by a name that leaves no file."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from wire.aio import unix
from wire.aio.unix import DescriptorPort, fetch_descriptor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the namespace is Linux's")

KNOCK = """
import os, socket, sys
os.setuid(12345)
for _ in range(50):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(30)
        connection.connect("\\0" + sys.argv[1])
        print(*socket.recv_fds(connection, 100, 1)[:2])
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "ANSWER_S", 60.0)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def names() -> list[str]:
    """Return the names of all Unix sockets."""
    return Path("/proc/net/unix").read_text().split()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"what only we may read")
    return path


async def test_a_client_gets_the_descriptor_and_is_closed(secret: Path) -> None:
    content = b"what only we may read"
    with secret.open("rb") as file:
        before = descriptors()
        port = DescriptorPort(file.fileno(), b"prefill-0-1")
        listening = descriptors()
        for _ in range(3):
            fetched, about = await fetch_descriptor(port.name, b"prefill-0-1")
            assert about == b""
            assert os.pread(fetched, 100, 0) == content
            assert not os.get_inheritable(fetched)
            os.close(fetched)
        assert descriptors() == listening
        port.close()
        port.close()
        assert descriptors() == before
        with pytest.raises(ConnectionRefusedError):
            await fetch_descriptor(port.name, b"prefill-0-1")


async def test_another_greeting_is_refused(secret: Path) -> None:
    with secret.open("rb") as file:
        port = DescriptorPort(file.fileno(), b"prefill-1-1")
        before = descriptors()
        for expected in (b"prefill-0-1", b"prefill-1", b"prefill-1-11"):
            with pytest.raises(ConnectionError, match="another worker"):
                await fetch_descriptor(port.name, expected)
        assert descriptors() == before
        port.close()


async def test_the_description_of_a_descriptor_follows_the_greeting(secret: Path) -> None:
    with secret.open("rb") as file:
        before = descriptors()
        for said, about in ((b" cuda 65536", b"cuda 65536"), (b" " + 64 * b"x", 64 * b"x")):
            port = DescriptorPort(file.fileno(), b"prefill-0-1" + said)
            fetched, found = await fetch_descriptor(port.name, b"prefill-0-1")
            assert found == about
            os.close(fetched)
            port.close()
        for said in (b"1 cuda 65536", b" " + 65 * b"x"):
            port = DescriptorPort(file.fileno(), b"prefill-0-1" + said)
            with pytest.raises(ConnectionError, match="another worker"):
                await fetch_descriptor(port.name, b"prefill-0-1")
            port.close()
        assert descriptors() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_gets_nothing_and_cannot_fill_the_log(secret: Path) -> None:
    now = 1.0
    with secret.open("rb") as file, capture_logs() as logs:
        port = DescriptorPort(file.fileno(), b"prefill-0-1", lambda: now)
        for _ in range(2):
            asking = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", KNOCK, port.name), stdout=subprocess.PIPE
            )
            said, _ = await asyncio.wait_for(asking.communicate(), 30)
            assert said == b"b'' []\n" * 50
            now += 1.0
        fetched, _ = await fetch_descriptor(port.name, b"prefill-0-1")  # the same user is served
        os.close(fetched)
        port.close()
    assert [(line["user"], line["refused_so_far"]) for line in logs] == [(12345, 1), (12345, 51)]


LISTEN = """
import os, socket, sys
os.setuid(12345)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen(1)
    print(flush=True)
    connection, _ = listener.accept()
    connection.recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_a_listener_of_another_user_is_refused() -> None:
    name = f"baton-test-{os.getpid()}"
    listening = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", LISTEN, name), stdout=subprocess.PIPE
    )
    assert listening.stdout is not None
    assert await asyncio.wait_for(listening.stdout.readline(), 30) == b"\n"
    with pytest.raises(PermissionError, match="user 12345"):
        await fetch_descriptor(name, b"prefill-0-1")
    assert await asyncio.wait_for(listening.wait(), 30) == 0


async def test_a_silent_listener_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "ANSWER_S", 0.02)
    name = f"baton-test-mute-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        before = descriptors()
        with pytest.raises(TimeoutError, match=r"says nothing for 0\.02 s"):
            await fetch_descriptor(name, b"prefill-0-1")
        assert descriptors() == before


async def test_a_full_backlog_is_tried_again(secret: Path) -> None:
    name = f"baton-test-full-{os.getpid()}"
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, secret.open() as file:
        listener.bind(f"\0{name}")
        listener.listen(0)
        listener.setblocking(False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(f"\0{name}")  # no other fits
            fetching = asyncio.create_task(fetch_descriptor(name, b"prefill-0-1"))
            await asyncio.sleep(0)
            assert not fetching.done()
            for _ in range(2):
                accepted, _ = await loop.sock_accept(listener)
                with accepted:
                    socket.send_fds(accepted, [b"prefill-0-1"], [file.fileno()])
            os.close((await fetching)[0])
