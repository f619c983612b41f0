"""ZeroMQ socket options by their libzmq names, each with its reason.

Options with values from the caller (MAXMSGSIZE, SNDHWM, RCVHWM, ROUTING_ID) are set in
`wire.aio.port` and `wire.aio.zmq`.
"""

from __future__ import annotations

from typing import Final

COMMON: Final[dict[str, int]] = {
    # `Hub.close` and `Link.close` flush queued messages with a time limit of their own.
    "LINGER": 0,
    # A silent peer is disconnected after this time.
    "HANDSHAKE_IVL": 5_000,
    # ZMTP heartbeats are off: a stalled reader or one long frame would end a healthy connection.
    "HEARTBEAT_IVL": 0,
    # An idle connection whose peer has vanished is detected after about 25 s ...
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 10,
    "TCP_KEEPALIVE_INTVL": 5,
    "TCP_KEEPALIVE_CNT": 3,
    # ... and one with unacknowledged bytes or a closed TCP window after this time.
    "TCP_MAXRT": 30_000,
}

ROUTER: Final[dict[str, int]] = {
    # Sending to an unknown or full peer is an error; libzmq must not drop messages silently.
    "ROUTER_MANDATORY": 1,
    # A new connection cannot take over the identity of a connected peer.
    "ROUTER_HANDOVER": 0,
    # All workers of a cluster reconnect at once when the router restarts.
    "BACKLOG": 1024,
}

DEALER: Final[dict[str, int]] = {
    # Messages are not queued in libzmq before the connection is established.
    "IMMEDIATE": 1,
    # `wire.aio.reconnect` reconnects, not libzmq.  An unresponsive host times out after 5 s, where
    # the kernel would wait for minutes.
    "RECONNECT_IVL": -1,
    "CONNECT_TIMEOUT": 5_000,
}
