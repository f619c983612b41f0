"""The sockets where workers lend memory (`wire.aio.unix`), without sockets; the memory is real."""

from __future__ import annotations

import os
from typing import Any, Final

from tests.simulation.loop import Process, State
from tests.simulation.network import Network

# As `wire.aio.unix`: how long to wait for one that is stopped.
ANSWER_S: Final = 2.0


class Port:
    """Lends a descriptor as long as its process lives."""

    def __init__(
        self, network: Network, process: Process, descriptor: int, greeting: bytes
    ) -> None:
        self.process, self.descriptor, self.greeting = process, descriptor, greeting
        self.name = f"baton-{network.new_number()}"
        self._network = network
        network.memory[self.name] = self

    def close(self) -> None:
        self._network.memory.pop(self.name, None)


async def fetch(
    network: Network, process: Process, name: str, greeting: bytes
) -> tuple[int, bytes]:
    """Return the descriptor that is lent under this name."""
    await _pause(process, network.latency())
    port = network.memory.get(name)
    if port is None or port.process.state is State.DEAD:
        raise ConnectionRefusedError("nobody lends this")
    if port.process.state is State.STOPPED:
        await _pause(process, ANSWER_S)
        raise TimeoutError("who lends this does not answer")
    if port.greeting != greeting:
        raise ConnectionError("who lends this is another worker")
    return os.dup(port.descriptor), b""


async def _pause(process: Process, seconds: float) -> None:
    over = process.create_future()
    process.call_later(seconds, _end, over)
    await over


def _end(over: Any) -> None:
    if not over.done():
        over.set_result(None)
