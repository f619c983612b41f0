"""The sockets for KV: a ZeroMQ context apart from the bus, with limits for segments.

Segments are large and few: a long queue in libzmq would hold uncounted gigabytes.  So its queues
are short, and `wire.aio.zmq` counts the rest; the credit bounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypedDict

from wire.aio.zmq import Context, Hub, Link, terminate
from wire.parts import Buffer
from wire.process.frame_counters import Traffic
from wire.process.keys import Keys
from wire.transfer import MAX_SEGMENT_BYTES, Sealing, new_key

# Messages that libzmq may hold for one peer and direction.
HIGH_WATER_MARK: Final = 16
# Bytes that may wait for one peer, more than receivers grant together: beyond it sending fails.
MAX_QUEUE_BYTES: Final = 1 << 30
# Bytes of a map beside its one large field, the token ids of an offer.
MAP_BYTES: Final = 64 << 10


class _Bounds(TypedDict):
    zero_copy: bool
    max_message_bytes: int
    max_queue_bytes: int
    high_water_mark: int
    context: Context
    keys: Keys | None
    traffic: Traffic


class KVPlane:
    """Makes KV sockets, and counts their frames in `traffic`.  Close them first, then this."""

    def __init__(self, max_model_len: int, keys: Keys | None = None) -> None:
        # The largest part is a segment, or the offer of the longest prompt.
        part_bytes = max(MAX_SEGMENT_BYTES, 4 * max_model_len) + MAP_BYTES
        self.traffic = Traffic()
        self._bounds = _Bounds(
            zero_copy=True,
            max_message_bytes=part_bytes,
            max_queue_bytes=max(MAX_QUEUE_BYTES, 2 * part_bytes),
            high_water_mark=HIGH_WATER_MARK,
            context=Context(),
            keys=keys,
            traffic=self.traffic,
        )
        self.is_encrypted = keys is not None
        if self.is_encrypted:
            Sealing(new_key())  # the cipher is loaded now, not while a request waits

    def hub(
        self,
        on_message: Callable[[bytes, list[Buffer]], None],
        on_lost: Callable[[bytes], None],
    ) -> Hub:
        """Return the unbound socket of a decode worker: few ACKs and errors may wait for a peer."""
        bounds: _Bounds = {**self._bounds, "max_queue_bytes": 2 * self._bounds["max_message_bytes"]}
        return Hub(on_message, on_lost=on_lost, **bounds)

    def link(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        on_down: Callable[[], None],
        server: str = "",
    ) -> Link:
        """Connect a prefill worker to a decode worker; with keys, only to the party `server`.

        Raises:
            OSError: The endpoint is malformed.
            ConfigError: The key of that party is not known.
        """
        return Link(identity, endpoint, on_message, on_down=on_down, server=server, **self._bounds)

    async def close(self) -> None:
        await terminate(self._bounds["context"])
