"""What is dear to read comes in the least portions, what is cheap in large ones, and all of it."""

from __future__ import annotations

import asyncio
import random
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests import certificate
from wire.aio import portions
from wire.aio.listener import bind, listen, server_context
from wire.aio.portions import CHEAP_S, LEAST_BYTES, MOST_BYTES, Portions

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Sealed(asyncio.BufferedProtocol):
    """Takes bytes, each portion in the time that comes next."""

    def __init__(self, costs: list[float]) -> None:
        self.now = 0.0
        self.heard: list[object] = []
        self._costs, self._buffer = costs, bytearray(256 << 10)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.heard.append(nbytes)
        self.now += self._costs.pop(0)

    def connection_made(self, transport: object) -> None:
        self.heard.append(("made", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(("lost", exc))

    def eof_received(self) -> bool:
        self.heard.append("eof")
        return True

    def pause_writing(self) -> None:
        self.heard.append("pause")

    def resume_writing(self) -> None:
        self.heard.append("resume")


def read(costs: list[float]) -> list[object]:
    """Read as much as may be each time, and return how much that was."""
    sealed = Sealed(list(costs))
    read_in = Portions(sealed, clock=lambda: sealed.now)
    for _ in costs:
        read_in.buffer_updated(len(read_in.get_buffer(-1)))
    return sealed.heard


def test_a_portion_doubles_while_it_is_cheap_up_to_a_whole_record() -> None:
    sizes = [LEAST_BYTES << doubled for doubled in range(7)]
    assert read([CHEAP_S] * 9) == [*sizes, MOST_BYTES, MOST_BYTES] and sizes[-1] == MOST_BYTES


def test_after_a_dear_one_comes_the_least() -> None:
    cheap, dear = CHEAP_S, 1.01 * CHEAP_S
    least = LEAST_BYTES
    assert read([cheap, cheap, dear, dear, cheap, cheap]) == [
        *(least, 2 * least, 4 * least),
        *(least, least, 2 * least),
    ]


def test_whatever_else_the_loop_says_is_passed_on() -> None:
    sealed, transport, error = Sealed([]), asyncio.Transport(), OSError("gone")
    read_in = Portions(sealed)
    read_in.connection_made(transport)
    read_in.pause_writing()
    read_in.resume_writing()
    assert read_in.eof_received()
    read_in.connection_lost(error)
    assert sealed.heard == [("made", transport), "pause", "resume", "eof", ("lost", error)]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
@pytest.mark.parametrize(("cheap_s", "most_bytes"), [(-1.0, LEAST_BYTES), (1e9, MOST_BYTES)])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_under_tls_all_comes_as_it_was_sent(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    cheap_s: float,
    most_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portions, "CHEAP_S", cheap_s)
    sizes, pass_on = list[int](), Portions.buffer_updated

    def note(self: Portions, nbytes: int) -> None:
        sizes.append(nbytes)
        pass_on(self, nbytes)

    monkeypatch.setattr(Portions, "buffer_updated", note)
    made = certificate.make(tmp_path)
    sent = random.Random(1).randbytes(300_001)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        came = runner.run(sent_over_tls(made, sent))
    assert came == sent and max(sizes) == most_bytes


async def sent_over_tls(made: certificate.Certificate, sent: bytes) -> bytes:
    came, ended = bytearray(), asyncio.Event()

    class Taker(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            came.extend(data)

        def connection_lost(self, exc: Exception | None) -> None:
            ended.set()

    sock = bind("127.0.0.1", 0)
    tls: ssl.SSLContext | None = server_context(made.cert, made.key)
    listener = await listen(Taker, sock, tls, handshake_s=10.0, max_handshakes=1)
    _, writer = await asyncio.open_connection(*sock.getsockname(), ssl=made.trust)
    writer.write(sent)
    writer.close()
    await writer.wait_closed()
    await ended.wait()
    listener.close()
    await listener.wait_closed()
    return bytes(came)
