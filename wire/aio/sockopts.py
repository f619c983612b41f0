"""Options of our ZeroMQ sockets, by their libzmq names, each with its reason.

Bounds that a caller chooses (MAXMSGSIZE, SNDHWM, RCVHWM, ROUTING_ID) are set in `wire.aio.zmq`.
"""

from __future__ import annotations

from typing import Final

COMMON: Final[dict[str, int]] = {
    # What must be sent before closing is waited for by `close`, with a bound.
    "LINGER": 0,
    # A peer that connects and says nothing holds a socket no longer than this.
    "HANDSHAKE_IVL": 5_000,
    # A stalled reader or one long frame makes ZMTP heartbeats cut a healthy connection.
    "HEARTBEAT_IVL": 0,
    # An idle connection whose other end vanished is found after about 25 s ...
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 10,
    "TCP_KEEPALIVE_INTVL": 5,
    "TCP_KEEPALIVE_CNT": 3,
    # ... and one with bytes unacknowledged, or a window closed, for this long is dead too.
    "TCP_MAXRT": 30_000,
}

ROUTER: Final[dict[str, int]] = {
    # An unknown or full peer is an error, not a silent drop.
    "ROUTER_MANDATORY": 1,
    # No one takes over the identity of a connected peer.
    "ROUTER_HANDOVER": 0,
    # All workers of a cluster come back at once when the router restarts.
    "BACKLOG": 1024,
}

DEALER: Final[dict[str, int]] = {
    # Nothing is queued for a peer that never came.
    "IMMEDIATE": 1,
    # `wire.aio.reconnect` tries again, not libzmq; a host that does not answer is given up after
    # this, where the kernel would wait for minutes.
    "RECONNECT_IVL": -1,
    "CONNECT_TIMEOUT": 5_000,
}
