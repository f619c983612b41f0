"""The options are on the sockets, by their names in libzmq."""

from __future__ import annotations

from typing import Any, ClassVar

import zmq

from wire.aio import sockopts
from wire.aio.zmq import Context, Hub, Link, terminate


class Watched(Context):
    """A context that keeps the first socket of each kind."""

    made: ClassVar[dict[int, zmq.Socket[bytes]]] = {}

    def socket(self, kind: int, **options: Any) -> zmq.Socket[bytes]:  # type: ignore[override]
        made = super().socket(kind, **options)
        self.made.setdefault(kind, made)
        return made


async def test_sockets_have_their_options() -> None:
    context = Watched()
    hub = Hub(
        lambda peer, parts: None,
        max_message_bytes=1 << 20,
        high_water_mark=8,
        context=context,
    )
    link = Link(
        b"decode-0-1",
        hub.bind("tcp://127.0.0.1:*"),
        lambda parts: None,
        max_message_bytes=1 << 20,
        high_water_mark=8,
        context=context,
    )
    bounds = {"MAXMSGSIZE": 1 << 20, "SNDHWM": 8, "RCVHWM": 8}
    # libzmq does not tell the write-only ones.
    untold = {"ROUTER_MANDATORY", "ROUTER_HANDOVER"}
    for socket, role in (
        (context.made[zmq.ROUTER], sockopts.ROUTER),
        (context.made[zmq.DEALER], sockopts.DEALER),
    ):
        expected = bounds | sockopts.COMMON | role
        told = {name: socket.get(getattr(zmq, name)) for name in expected.keys() - untold}
        assert told == {name: expected[name] for name in told}
    await link.close()
    await hub.close()
    await terminate(context)
