"""Security options of sockets, and what a port refuses to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from tests.wire.process.key_files import write
from wire.aio.outbox import Limits
from wire.aio.port import Port, client_options, link_options, new_key_pair, server_options
from wire.process.keys import Keys
from wire.process.settings import ConfigError


@pytest.mark.parametrize("is_server", [True, False])
def test_the_options_make_a_curve_socket(is_server: bool) -> None:
    pair = new_key_pair()
    security = server_options(pair) if is_server else client_options(pair, pair.public)
    port = Port(None, zmq.ROUTER, Limits(1 << 10, 1 << 20), 1, zero_copy=False, security=security)
    try:
        assert port.socket.get(zmq.MECHANISM) == zmq.CURVE
        assert bool(port.socket.get(zmq.CURVE_SERVER)) == is_server
        if is_server:
            assert bytes(port.socket.get(zmq.ZAP_DOMAIN)).rstrip(b"\0") == b"baton"
            assert port.socket.get(zmq.ZAP_ENFORCE_DOMAIN) == 1
    finally:
        port.shut(0.0)
        port.context.term()


def test_one_socket_too_many_is_an_os_error() -> None:
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 1)
        with context.socket(zmq.DEALER), pytest.raises(OSError, match="cannot open a socket"):
            Port(context, zmq.DEALER, Limits(1, 1000), 1, zero_copy=False, security={})


def test_a_link_expects_the_party_it_means(tmp_path: Path) -> None:
    pairs = write(tmp_path, "router", "prefill-0")
    keys = Keys(tmp_path, "prefill-0")
    assert link_options(None, "router") == {}
    assert link_options(keys, "router")["CURVE_SERVERKEY"] == pairs["router"].public.encode()
    with pytest.raises(ConfigError, match="no key of decode-0"):
        link_options(keys, "decode-0")
