"""Authentication on real sockets: a known key, an unknown one, none, no authenticator."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tests.wire.aio.house import LOOPBACK, House
from tests.wire.process.key_files import write
from wire.aio.outbox import Limits
from wire.aio.port import (
    ZAP_DOMAIN,
    Context,
    Port,
    client_options,
    new_key_pair,
    server_options,
)
from wire.aio.zap import ENDPOINT, Authenticator, Gate, prove
from wire.aio.zmq import Hub
from wire.process.keys import Keys
from wire.process.settings import ConfigError

ADMITTED, REFUSED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH
MISMATCH, CUT = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    await house.close()


async def knock(endpoint: str, options: object = None) -> int:
    """Connect as these options say; return the first event that says how it went."""
    with Context() as context:
        stranger = context.socket(zmq.DEALER)
        for name, value in dict(options or {}).items():  # type: ignore[call-overload]
            stranger.setsockopt(getattr(zmq, name), value)
        stranger.setsockopt(zmq.LINGER, 0)
        monitor = stranger.get_monitor_socket(ADMITTED | REFUSED | MISMATCH | CUT)
        try:
            stranger.connect(endpoint)
            assert await asyncio.to_thread(monitor.poll, 20_000)
            return int(recv_monitor_message(monitor)["event"])
        finally:
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close()


async def test_a_client_without_curve_is_refused(house: House) -> None:
    assert await knock(house.endpoint) in (MISMATCH, CUT)
    assert house.messages.empty()


@pytest.mark.parametrize("where", ["nowhere", "another context", "another domain"])
async def test_without_an_authenticator_of_its_own_a_socket_admits_nobody(
    tmp_path: Path, where: str
) -> None:
    pairs = write(tmp_path, "router", "prefill-0")
    context, other = Context(), Context()
    router = context.socket(zmq.ROUTER)
    for name, value in server_options(pairs["router"]).items():
        router.setsockopt(getattr(zmq, name), value)
    keys, authenticator = Keys(tmp_path, "router"), None
    if where == "another context":
        authenticator = Authenticator(other, keys)
    elif where == "another domain":
        authenticator = Authenticator(context, keys, b"elsewhere")
    router.bind(LOOPBACK)
    endpoint = bytes(router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    try:
        known = client_options(pairs["prefill-0"], pairs["router"].public)
        stranger = client_options(new_key_pair(), pairs["router"].public)
        assert await knock(endpoint, known) != ADMITTED
        assert await knock(endpoint, stranger) != ADMITTED
    finally:
        if authenticator is not None:
            authenticator.close()
        router.close(0)
        context.term()
        other.term()


async def test_the_list_is_read_at_each_request_and_only_curve_proves_a_key(
    tmp_path: Path,
) -> None:
    pairs = write(tmp_path, "router", "prefill-0")
    listed = tmp_path / "authorized_keys"
    both, router = listed.read_text(), f"{pairs['router'].public} router\n"
    shown = z85.decode(pairs["prefill-0"].public.encode())
    with Context() as context, context.socket(zmq.REQ) as asker:
        authenticator = Authenticator(context, Keys(tmp_path, "router"))
        asker.connect(ENDPOINT)
        for lines, mechanism, status in (
            (router, b"CURVE", b"400"),
            (both, b"CURVE", b"200"),
            (both, b"PLAIN", b"400"),
            (both, b"NULL", b"400"),
        ):
            listed.write_text(lines)
            asker.send_multipart([b"1.0", b"7", ZAP_DOMAIN, b"127.0.0.1", b"", mechanism, shown])
            authenticator.turn()
            answer = asker.recv_multipart() if asker.poll(30_000) else []
            assert answer[:3] == [b"1.0", b"7", status]
        authenticator.close()


@pytest.mark.parametrize("is_there", [False, True])
async def test_no_port_is_opened_when_nobody_decides(
    tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an authenticator of another context, and with one that does not answer."""
    write(tmp_path, "router")
    keys = Keys(tmp_path, "router")
    security = server_options(keys.pair)
    port = Port(None, zmq.ROUTER, Limits(1 << 10, 1 << 20), 1, zero_copy=False, security=security)
    with Context() as other:
        authenticator = Authenticator(port.context if is_there else other, keys)
        monkeypatch.setattr(authenticator, "turn", lambda: None)
        with pytest.raises(ConfigError, match="not listening"):
            prove(port, keys, authenticator, probe_s=0.3)
        authenticator.close()
    await port.close(0.0)


async def test_refusals_after_the_probe_of_the_start_are_logged_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as logs:
        house = House(tmp_path)
    assert logs == []
    now, authenticator = 1e9, vars(house.hub)["_gate"].authenticator
    monkeypatch.setattr(authenticator, "_clock", lambda: now)
    options = client_options(new_key_pair(), house.pairs["router"].public)
    with capture_logs() as logs:
        for _ in range(6):
            assert await knock(house.endpoint, options) == REFUSED
        now += 1.0
        assert await knock(house.endpoint, options) == REFUSED
    assert [line["reason"] for line in logs] == ["unknown key"] * 2
    assert authenticator.num_refused >= logs[-1]["refused_so_far"] >= 7
    await house.close()


async def test_no_port_is_opened_when_strangers_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "router")
    hub = Hub(lambda peer, parts: None, keys=Keys(tmp_path, "router"))
    monkeypatch.setattr(Keys, "party", lambda self, public: "prefill-0")
    with pytest.raises(ConfigError, match="admitted an unknown key"):
        hub.bind(LOOPBACK)
    await hub.close()


async def test_a_key_does_not_speak_for_another_party(house: House) -> None:
    is_down = asyncio.Event()
    liar = house.link("prefill-0", b"decode-0-1", on_down=is_down.set)
    liar.send([b"I am decode-0", b"prefill-0-1", b"and these are no messages of others"])
    await is_down.wait()
    honest = house.link("prefill-0", b"prefill-0-1")
    honest.send([b"I am prefill-0"])
    assert await house.messages.get() == (b"prefill-0-1", [b"I am prefill-0"])
    assert house.hub.peers == [b"prefill-0-1"]


async def test_a_revoked_key_loses_its_connection_and_gets_no_other(house: House) -> None:
    down: asyncio.Queue[str] = asyncio.Queue()
    revoked = house.link("prefill-0", b"prefill-0-1", on_down=lambda: down.put_nowait("down"))
    kept = house.link("decode-0", b"decode-0-1")
    revoked.send([b"hello"])
    kept.send([b"hello"])
    await house.messages.get(), await house.messages.get()
    house.authorize("router", "decode-0")
    assert await down.get() == "down"
    assert await house.lost.get() == b"prefill-0-1"
    options = client_options(house.pairs["prefill-0"], house.pairs["router"].public)
    assert await knock(house.endpoint, options) == REFUSED
    kept.send([b"still here"])
    assert await house.messages.get() == (b"decode-0-1", [b"still here"])
    house.authorize("router", "decode-0", "prefill-0")
    revoked.send([b"back"])
    assert await house.messages.get() == (b"prefill-0-1", [b"back"])
    house.authorize("router", "decode-0")
    async with asyncio.timeout(30):  # the list is looked at again and again
        assert await down.get() == "down"


async def test_a_key_that_is_another_partys_now_loses_its_connection(house: House) -> None:
    down: asyncio.Queue[str] = asyncio.Queue()
    link = house.link("prefill-0", b"prefill-0-1", on_down=lambda: down.put_nowait("down"))
    link.send([b"hello"])
    await house.messages.get()
    router, prefill = (house.pairs[name].public for name in ("router", "prefill-0"))
    (house.directory / "authorized_keys").write_text(f"{router} router\n{prefill} decode-0\n")
    assert await down.get() == "down"
    assert await house.lost.get() == b"prefill-0-1"


async def test_a_revoked_key_costs_no_one_the_connection_that_has_its_descriptor_now(
    tmp_path: Path,
) -> None:
    """Descriptors are used again: who has left is heard of before anyone is cut."""
    pairs = write(tmp_path, "router", "prefill-0", "decode-0")
    here, there = socket.socketpair()
    gone, other = socket.socketpair()
    with Context() as context, here, there, gone, other:
        gate = Gate(context, Keys(tmp_path, "router"), lambda: gate.remove(gone.fileno()))
        for party, its in (("prefill-0", here), ("decode-0", gone)):
            peer = f"{party}-1".encode()
            assert gate.admit(peer, pairs[party].public, its.fileno(), is_live=True)
        (tmp_path / "authorized_keys").write_text(f"{pairs['router'].public} router\n")
        for _ in range(2):
            gate.cut_revoked()
            assert there.recv(1) == b"", "its key is revoked"
            gone.send(b"x")
            assert other.recv(1) == b"x", "it is another's by now"
            # As libzmq does: it closes what was cut, and the next connection has the descriptor.
            os.dup2(gone.fileno(), here.fileno())
        gate.close()


async def test_a_peer_that_left_with_its_first_message_holds_no_descriptor(tmp_path: Path) -> None:
    pairs = write(tmp_path, "router", "prefill-0")
    ours, theirs = socket.socketpair()
    with Context() as context, ours, theirs:
        gate = Gate(context, Keys(tmp_path, "router"), lambda: None)
        public = pairs["prefill-0"].public
        assert gate.admit(b"prefill-0-1", public, ours.fileno(), is_live=False)
        (tmp_path / "authorized_keys").write_text(f"{pairs['router'].public} router\n")
        gate.cut_revoked()
        ours.send(b"x")
        assert theirs.recv(1) == b"x", "it is another's by now"
        gate.close()
