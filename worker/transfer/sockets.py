"""The ZeroMQ sockets for KV transfer, in a context separate from the router bus.

Segments are large and few, so a long queue in libzmq could hold gigabytes that nobody counts.
Therefore libzmq's queues are short, and `wire.aio.zmq` queues the other messages and counts their
bytes.  The credit of the transfers limits their total.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypedDict

from wire.aio.zmq import Context, Hub, Link, terminate
from wire.parts import Buffer
from wire.process.frame_counters import Traffic
from wire.process.keys import Keys
from wire.transfer import MAX_SEGMENT_BYTES, Sealing, new_key

# Number of messages that libzmq may queue per peer and direction.
HIGH_WATER_MARK: Final = 16
# Queued bytes per peer above which sending fails: more than the credit of all its transfers.
MAX_QUEUE_BYTES: Final = 1 << 30
# Maximum size of a msgpack map without its one large field, the token ids of an offer.
MAP_BYTES: Final = 64 << 10


class _SocketOptions(TypedDict):
    zero_copy: bool
    max_message_bytes: int
    max_queue_bytes: int
    high_water_mark: int
    context: Context
    keys: Keys | None
    traffic: Traffic


class KVPlane:
    """Creates KV sockets and counts their frames in `traffic`; close all sockets before it."""

    def __init__(self, max_model_len: int, keys: Keys | None = None) -> None:
        # The largest message part is a segment, or the offer for the longest prompt.
        part_bytes = max(MAX_SEGMENT_BYTES, 4 * max_model_len) + MAP_BYTES
        self.traffic = Traffic()
        self._options = _SocketOptions(
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
            Sealing(new_key())  # loads the cipher now, so that no request has to wait for it

    def hub(
        self, on_message: Callable[[bytes, list[Buffer]], None], on_lost: Callable[[bytes], None]
    ) -> Hub:
        """Create the decode worker's unbound socket; its queues are short: it sends no KV."""
        options = self._options.copy()
        options["max_queue_bytes"] = 2 * options["max_message_bytes"]
        return Hub(on_message, on_lost=on_lost, **options)

    def link(
        self,
        identity: bytes,
        endpoint: str,
        on_message: Callable[[list[Buffer]], None],
        on_down: Callable[[], None],
        server: str = "",
    ) -> Link:
        """Connect a prefill worker to a decode worker; with keys, accept only those of `server`.

        Raises:
            OSError: The endpoint is invalid.
            ConfigError: No public key is configured for `server`.
        """
        return Link(identity, endpoint, on_message, on_down=on_down, server=server, **self._options)

    async def close(self) -> None:
        await terminate(self._options["context"])
