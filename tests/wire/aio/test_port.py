"""Security options of sockets, and what a port refuses to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from tests.wire.process.key_files import write
from wire.aio.outbox import Limits
from wire.aio.port import Port, link_options, new_key_pair, public_key
from wire.process.keys import Keys
from wire.process.settings import ConfigError


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


def test_the_public_key_of_a_secret_one() -> None:
    pair = new_key_pair()
    assert public_key(pair.secret) == pair.public
