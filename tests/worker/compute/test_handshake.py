"""Only processes of one worker connect; others cost a moment, and a line of the log a second."""

from __future__ import annotations

import asyncio
import hmac
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from structlog.testing import capture_logs

from worker.compute import handshake
from worker.compute.connection import Connection, ProcessLost, exchange
from worker.compute.handshake import MAX_PENDING, Caller, Listener, Purpose, Refused, call

SECRET = b"of decode-0"
CALLERS = [Caller(1, 0), Caller(2, 0, Purpose.COPIES)]


opened: list[Connection] = []  # by tests, which leave it to the fixture to close them


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 60.0)
    yield
    while opened:
        opened.pop().close()


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    """Waits for `CALLERS`."""
    if request.param == "tcp":
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"{tmp_path}/meet")
        os.chmod(f"{tmp_path}/meet", 0o777)  # so that it is the handshake that refuses others
        listening.listen(4096)
    with listening:
        made = Listener(listening, SECRET, is_sealed=request.param == "tcp")
        made.missing = set(CALLERS)
        yield made


def knock(listener: Listener) -> socket.socket:
    sock = socket.socket(listener.socket.family)
    sock.connect(listener.socket.getsockname())
    return sock


async def ring(listener: Listener, caller: Caller, secret: bytes = SECRET) -> Connection:
    sock = knock(listener)
    sock.setblocking(False)
    try:
        is_sealed = sock.family != socket.AF_UNIX
        opened.append(await call(sock, caller, secret, is_sealed=is_sealed))
        return opened[-1]
    except BaseException:
        sock.close()
        raise


async def admit(listener: Listener) -> dict[Caller, Connection]:
    found = {}
    async for caller, connection in listener.admit():
        found[caller] = connection
        opened.append(connection)
    return found


async def ring_all(listener: Listener) -> dict[Caller, tuple[Connection, Connection]]:
    """Return both ends of each connection, once all callers are in."""
    admitting = asyncio.create_task(admit(listener))
    calling = {it: await ring(listener, it) for it in CALLERS}
    return {it: (calling[it], called) for it, called in (await admitting).items()}


async def test_each_is_admitted_as_who_it_is_and_hears_the_other(listener: Listener) -> None:
    found = await ring_all(listener)
    assert found.keys() == set(CALLERS) and not listener.missing
    for caller, (calling, called) in found.items():
        assert (calling.peer, called.peer) == (caller.called, caller.caller)
        for one, other in ((calling, called), (called, calling)):
            heard = bytearray(5)
            exchange([(one, b"words")], [])
            exchange([], [(other, memoryview(heard))], 30)
            assert heard == b"words"


@pytest.mark.parametrize("listener", ["tcp"], indirect=True)
async def test_what_is_sent_back_to_who_sent_it_is_refused(listener: Listener) -> None:
    for calling, called in (await ring_all(listener)).values():
        for one, other in ((calling, called), (called, calling)):
            other.socket.sendall(one.seal(b"words"))
            with pytest.raises(ProcessLost, match="was changed in transit"):
                exchange([], [(one, memoryview(bytearray(5)))], 30)


async def test_a_proof_is_made_of_the_secret_of_all_that_was_sent_and_of_what_both_keys_come_to(
    listener: Listener,
) -> None:
    """So who has heard all of it, and learns the secret later, can read nothing."""
    loop, admitting = asyncio.get_running_loop(), asyncio.create_task(admit(listener))
    for is_own_key, wanted in ((False, b""), (True, b"\1")):
        own = X25519PrivateKey.generate()
        said = (
            struct.pack("<8sHHB", b"baton 1\0", *CALLERS[0]) + own.public_key().public_bytes_raw()
        )
        with knock(listener) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, said)
            answer = b""
            while len(answer) < 64:
                answer += await loop.sock_recv(sock, 64 - len(answer))
            public, proof = answer[:32], answer[32:]
            agreed = own.exchange(X25519PublicKey.from_public_bytes(public)) if is_own_key else b""
            shared = hmac.digest(SECRET, said + public + agreed, "sha256")
            assert (proof == hmac.digest(shared, b"called", "sha256")) is is_own_key
            await loop.sock_sendall(sock, hmac.digest(shared, b"caller", "sha256"))
            assert await loop.sock_recv(sock, 1) == wanted
    assert listener.missing == {CALLERS[1]}
    admitting.cancel()


async def test_one_that_does_not_know_the_secret_gets_nothing(listener: Listener) -> None:
    admitting = asyncio.create_task(admit(listener))
    with pytest.raises(Refused, match=r"has another key; .* the same --role, --rank and --keys"):
        await ring(listener, CALLERS[0], b"of decode-1")
    assert listener.missing == set(CALLERS)
    admitting.cancel()


async def test_nobody_comes_twice_nor_as_a_process_that_there_is_not(listener: Listener) -> None:
    admitting = asyncio.create_task(admit(listener))
    await ring(listener, CALLERS[0])
    for caller in (CALLERS[0], Caller(3, 0), Caller(2, 1, Purpose.COPIES)):
        with pytest.raises(ValueError, match=r"has come before, .* each process its own --process"):
            await ring(listener, caller)
    assert listener.missing == {CALLERS[1]}
    admitting.cancel()


async def test_strangers_leave_no_descriptor_and_one_line_a_second(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: 7.0))
    before, draw = len(os.listdir("/proc/self/fd")), random.Random(1)
    with capture_logs() as logs:
        for number in range(400):
            with knock(listener) as stranger, suppress(OSError):
                stranger.sendall(bytes(8) if number < 300 else draw.randbytes(number))
        await ring_all(listener)
    while opened:
        opened.pop().close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [it["event"] for it in logs] == ["a connection to a process of the model is refused"]


async def test_of_many_that_say_nothing_the_eldest_are_cut(listener: Listener) -> None:
    strangers = [knock(listener) for _ in range(MAX_PENDING + 9)]
    await ring_all(listener)
    for stranger in strangers:
        stranger.settimeout(30)
    assert [stranger.recv(1) for stranger in strangers[:9]] == [b""] * 9
    for stranger in strangers:
        stranger.close()


async def test_one_that_takes_its_time_is_cut(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.01)
    admitting = asyncio.create_task(admit(listener))
    with knock(listener) as stranger:
        stranger.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stranger, b"baton 1\0")
        assert await asyncio.wait_for(loop.sock_recv(stranger, 1), 30) == b""
    admitting.cancel()


async def test_a_caller_hears_that_the_other_has_hung_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sock = socket.create_connection(listening.getsockname())
        sock.setblocking(False)
        listening.accept()[0].close()
        with sock, pytest.raises(OSError):
            await call(sock, CALLERS[0], SECRET, is_sealed=True)


CALL = """
import os, socket, sys
os.setuid(12345)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + sys.argv[1])
    try:
        sock.sendall(bytes(100))
        print(sock.recv(1))
    except OSError:
        print(b"")
"""
LISTEN = """
import os, socket, sys
os.setuid(12345)
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind("\\0" + sys.argv[1])
    listening.listen()
    print(flush=True)
    print(listening.accept()[0].recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_told_nothing() -> None:
    name = f"baton-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening, capture_logs() as logs:
        listening.bind(f"\0{name}")
        listening.listen()
        listener = Listener(listening, b"", is_sealed=False)
        listener.missing = set(CALLERS)
        admitting = asyncio.create_task(admit(listener))
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", CALL, name), stdout=subprocess.PIPE
        )
        said, _ = await asking.communicate()
        admitting.cancel()
    assert said == b"b''\n" and [it["reason"] for it in logs] == ["it is of user 12345"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_who_listens_is_told_nothing() -> None:
    name = f"baton-test-{os.getpid()}"
    listening = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", LISTEN, name), stdout=subprocess.PIPE
    )
    assert listening.stdout is not None
    await listening.stdout.readline()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{name}")
        with pytest.raises(Refused, match="of user 12345 listens there; choose another address"):
            await call(sock, CALLERS[0], b"", is_sealed=False)
    said, _ = await listening.communicate()
    assert said == b"b''\n"


async def test_a_replayed_proof_is_refused(listener: Listener) -> None:
    """The proof of one connection is none on the next."""
    loop, admitting = asyncio.get_running_loop(), asyncio.create_task(admit(listener))
    heard = []

    class Recording(socket.socket):
        def send(self, message: Any, *args: Any) -> int:
            heard.append(bytes(message))
            return super().send(message, *args)

    sock = Recording(listener.socket.family)
    sock.connect(listener.socket.getsockname())
    sock.setblocking(False)
    opened.append(await call(sock, CALLERS[0], SECRET, is_sealed=False))
    with capture_logs() as logs, knock(listener) as again:
        again.setblocking(False)
        await loop.sock_sendall(again, b"".join(heard))
        answer = b""
        while more := await loop.sock_recv(again, 100):
            answer += more
        assert len(answer) == 64  # a proof that is of no use to it, and no more
    assert [it["reason"] for it in logs] == ["it has another key"]
    admitting.cancel()
