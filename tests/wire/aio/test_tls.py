"""Errors of certificates are named; a client whose records bring no data is cut off."""

from __future__ import annotations

import asyncio
import ctypes
import random
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import certificate
from wire.aio.listener import bind, listen
from wire.aio.tls import (
    LEAST_BYTES,
    MOST_BYTES,
    MOST_IDLE,
    Records,
    Sealed,
    server_context,
)
from wire.process.settings import ConfigError

# Whether a KeyUpdate asks the other end for one of its own; and its size.
NOT_ASKED, ASKED = 0, 1
KEY_UPDATE_BYTES = 27


def test_a_bad_certificate_or_key_is_named(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        server_context(made.cert, tmp_path / "nothing.pem")
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        server_context(tmp_path / "nothing.pem", made.key)
    other = tmp_path / "other"
    other.mkdir()
    second = certificate.make(other)
    with pytest.raises(ConfigError, match=f"cannot use {made.cert} with {second.key}: "):
        server_context(made.cert, second.key)
    with pytest.raises(ConfigError, match=f"{second.cert} has no private key in PEM"):
        server_context(made.cert, second.cert)
    with pytest.raises(ConfigError, match=f"{second.key} has no certificate in PEM"):
        server_context(second.key, second.cert)  # the one for the other
    with pytest.raises(ConfigError, match="Is a directory"):
        server_context(made.cert, tmp_path)
    made.key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        server_context(made.cert, made.key)


def test_a_certificate_may_have_comments_in_any_encoding(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    made.cert.write_bytes("für Zürich\n".encode("latin-1") + made.cert.read_bytes())
    assert server_context(made.cert, made.key) is not None


def test_an_encrypted_key_is_refused_without_a_prompt(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    sealed = tmp_path / "sealed.pem"
    command = ["openssl", "pkey", "-in", str(made.key), "-aes256", "-passout", "pass:secret"]
    subprocess.run([*command, "-out", str(sealed)], check=True, capture_output=True)
    sealed.chmod(0o600)
    with pytest.raises(ConfigError, match=r"sealed\.pem is encrypted"):
        server_context(made.cert, sealed)


class Taker(asyncio.Protocol):
    """Keeps what comes, and stops reading once it has `most` bytes."""

    def __init__(self, most: int = 1 << 62) -> None:
        self.came, self.most = bytearray(), most
        self.error: Exception | None = None
        self.has_most, self.ended = asyncio.Event(), asyncio.Event()
        self.is_paused, self.is_resumed = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.came += data
        if len(self.came) >= self.most and not self.has_most.is_set():
            self.transport.pause_reading()
            self.has_most.set()

    def pause_writing(self) -> None:
        self.is_paused.set()

    def resume_writing(self) -> None:
        self.is_resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.ended.set()


class Rude:
    """A blocking client of TLS 1.3 that can ask for new keys, as Python's own cannot."""

    def __init__(self, port: int) -> None:
        self._lib = lib = ctypes.CDLL("libssl.so.3")
        pointer = ctypes.c_void_p
        for function in (lib.TLS_client_method, lib.SSL_CTX_new, lib.SSL_new):
            function.restype = pointer
        context = pointer(lib.SSL_CTX_new(pointer(lib.TLS_client_method())))
        self._ssl = pointer(lib.SSL_new(context))
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lib.SSL_set_fd(self._ssl, self._socket.fileno())
        assert lib.SSL_connect(self._ssl) == 1

    def ask(self, kind: int) -> bool:
        """Send a KeyUpdate; tell whether the connection took it."""
        self._lib.SSL_key_update(self._ssl, kind)
        return bool(self._lib.SSL_do_handshake(self._ssl) == 1)

    def say(self, data: bytes) -> bool:
        """Send a record; tell whether the connection took it."""
        return bool(self._lib.SSL_write(self._ssl, data, len(data)) == len(data))

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@dataclass
class Served:
    """A taker behind TLS, and what the loop read for it, a size each time."""

    port: int
    trust: ssl.SSLContext
    taker: Taker
    read: list[int]


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def serving(
    made: certificate.Certificate, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 62
) -> AsyncIterator[Served]:
    sizes, pass_on = list[int](), Sealed.buffer_updated

    def note(self: Sealed, nbytes: int) -> None:
        sizes.append(nbytes)
        pass_on(self, nbytes)

    monkeypatch.setattr(Sealed, "buffer_updated", note)
    sock, taker = bind("127.0.0.1", 0), Taker(most)
    tls = server_context(made.cert, made.key)
    listener = await listen(lambda: taker, sock, tls, handshake_s=10.0, max_handshakes=1)
    try:
        yield Served(sock.getsockname()[1], made.trust, taker, sizes)
    finally:
        if hasattr(taker, "transport"):  # its handshake was over
            taker.transport.abort()
            await taker.ended.wait()
        listener.close()
        await listener.wait_closed()


@pytest.fixture
def serve(made: certificate.Certificate, monkeypatch: pytest.MonkeyPatch) -> Serve:
    return partial(serving, made, monkeypatch)


@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 0xFFFF)), max_size=20),
    cuts=st.lists(st.integers(0, 100_000), max_size=30),
)
def test_records_are_counted_wherever_they_are_cut(lengths: list[int], cuts: list[int]) -> None:
    sent = b"".join(b"\x17\x03\x03%b%b" % (size.to_bytes(2), bytes(size)) for size in lengths)
    records, edges = Records(), sorted({0, len(sent), *(cut % (len(sent) + 1) for cut in cuts)})
    pieces = [sent[start:end] for start, end in pairwise(edges)]
    assert sum(records.count(memoryview(piece)) for piece in pieces) == len(lengths)


def test_a_record_counts_when_its_header_is_there() -> None:
    records = Records()
    sent = [b"\x17\x03\x03\x00", b"\x02", b".", b".\x17\x03\x03\x00\x00\x17"]
    assert [records.count(memoryview(piece)) for piece in sent] == [0, 1, 0, 1]


async def test_a_client_that_repeats_key_updates_is_cut_off(serve: Serve) -> None:
    def flood(port: int, kind: int) -> None:
        client = Rude(port)
        while client.ask(kind):
            pass
        client.close()

    problems = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
    for kind in (NOT_ASKED, ASKED):
        async with serve() as served:
            await asyncio.to_thread(flood, served.port, kind)
            await served.taker.ended.wait()
            # With the handshake, and what else came in the last read.
            least, most = 25 * KEY_UPDATE_BYTES, MOST_IDLE * KEY_UPDATE_BYTES + 2000
            assert least < sum(served.read) < most
            assert not served.taker.came and not problems


async def test_key_updates_between_data_are_counted_from_the_last_data(serve: Serve) -> None:
    def say(client: Rude, num_asks: int) -> bool:
        return all(
            all(client.ask(NOT_ASKED) for _ in range(num_asks)) and client.say(b".")
            for _ in range(100)
        )

    async with serve(most=100) as served:
        client = await asyncio.to_thread(Rude, served.port)
        assert await asyncio.to_thread(say, client, MOST_IDLE - 1)
        await served.taker.has_most.wait()
        # Of short records only some are read at once.
        assert max(served.read[8:]) < 2 * LEAST_BYTES
        client.close()
    async with serve() as served:
        client = await asyncio.to_thread(Rude, served.port)
        await asyncio.to_thread(say, client, 3 * MOST_IDLE)
        await served.taker.ended.wait()
        assert len(served.taker.came) < 2
        client.close()


async def test_all_comes_as_it_was_sent_though_it_was_not_read_for_a_while(serve: Serve) -> None:
    sent = random.Random(1).randbytes(3_000_001)

    async with serve(most=100_000) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=served.trust)
        writer.write(sent)
        taker = served.taker
        await taker.has_most.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert MOST_BYTES <= sum(served.read) - len(taker.came) < 3 * MOST_BYTES
        taker.transport.resume_reading()
        writer.close()
        await writer.wait_closed()
        await taker.ended.wait()
        assert taker.came == sent and max(served.read) == MOST_BYTES
        assert all(size <= LEAST_BYTES << i for i, size in enumerate(served.read[:8]))


async def test_a_client_that_reads_nothing_pauses_the_writer_until_it_reads(serve: Serve) -> None:
    async with serve(most=1) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=served.trust)
        client, taker = cast(asyncio.Transport, writer.transport), served.taker
        client.pause_reading()
        writer.write(b".")
        await taker.has_most.wait()
        num_bytes = 0
        while not taker.is_paused.is_set():
            taker.transport.write(bytes(1 << 16))
            num_bytes += 1 << 16
            assert num_bytes < 64 << 20, "what nobody reads fills the memory"
            await asyncio.sleep(0)
        client.resume_reading()
        await reader.readexactly(num_bytes)
        await taker.is_resumed.wait()
        writer.transport.abort()


async def test_records_are_not_counted_while_reading_is_paused(serve: Serve) -> None:
    async with serve(most=1) as served:
        client, taker = await asyncio.to_thread(Rude, served.port), served.taker
        await asyncio.to_thread(client.say, b".")
        await taker.has_most.wait()
        for _ in range(3 * MOST_IDLE):
            await asyncio.to_thread(client.say, b".")
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not taker.ended.is_set()
        taker.has_most.clear()
        taker.most = 1 + 3 * MOST_IDLE
        taker.transport.resume_reading()
        await taker.has_most.wait()
        client.close()


async def test_a_long_handshake_is_taken_but_not_one_without_end(serve: Serve) -> None:
    async with serve(most=1) as served:
        trust = served.trust
        trust.set_alpn_protocols([f"{number:0200}" for number in range(60)])  # 12 KB
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trust)
        writer.write(b".")
        await served.taker.has_most.wait()
        assert sum(served.read) > 12_000
        writer.transport.abort()
    async with serve() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        # Of a ClientHello of 120 KB, which OpenSSL takes, a byte in each record.
        writer.write(b"\x16\x03\x01\x00\x04\x01\x01\xd4\xc0")
        writer.write(b"\x16\x03\x01\x00\x01\x00" * 1000)
        with suppress(ConnectionResetError):
            await reader.read()
        assert sum(served.read) < MOST_IDLE * 6 + 2 * LEAST_BYTES
        writer.transport.abort()
