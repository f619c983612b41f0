"""ASGI without a server: a request's scope, and its two callables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


class Wire:
    """ASGI's two callables over lists."""

    def __init__(self, incoming: Sequence[dict[str, Any]] = ()) -> None:
        self.incoming = list(incoming)
        self.sent: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        return self.incoming.pop(0)

    async def send(self, event: Any) -> None:
        self.sent.append(event)
