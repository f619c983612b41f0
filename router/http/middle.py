"""The middle of a stream: tokens of one choice that show nothing but their text.

That is what a router does all day, so it has a way of its own from the choice to the connection,
past `Completion`, `Answer` and `ResponseWriter`.  When a stream has a token every 10 ms, half of
what one costs is the interpreter with cold caches, so every call and every object counts.  At the
first sign of anything else, an end or a client that lags, the writer goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from router.api.answered.completion import Choice
from router.http.asgi import Push
from wire.aio.turns import Turns, Writer

_encode: Final = msgspec.json.Encoder().encode


class GeneralWriter(Writer, Protocol):
    """Who writes whatever is not text alone."""

    def fail(self, error: Exception) -> None:
        """The stream cannot go on."""


class Middle:
    """Writes the texts of `choice`, each between the two of `around`, until `end`.

    `last` is when it wrote last.
    """

    __slots__ = (
        "_around",
        "_choice",
        "_on_tokens",
        "_push",
        "_turns",
        "_wake",
        "_writer",
        "is_over",
        "last",
    )

    def __init__(
        self,
        writer: GeneralWriter,
        turns: Turns,
        choice: Choice,
        around: tuple[bytes, bytes],
        push: Push,
        on_tokens: Callable[[float, int], None],
        last: float,
    ) -> None:
        self._writer, self._turns = writer, turns
        self._choice, self._around = choice, around
        self._push, self._on_tokens = push, on_tokens
        self.last, self.is_over = last, False
        self._wake, choice.wake = choice.wake, self.wake

    def wake(self, choice: Choice) -> None:
        self._turns.take(self)

    def prepare(self, now: float) -> bytes:
        if self.is_over:
            return b""
        try:
            texts = self._choice.take_texts()
        except Exception as error:
            self.end()
            self._writer.fail(error)
            return b""
        if texts is None:
            self.end()
            return self._writer.prepare(now)
        if not texts:
            return b""
        self._on_tokens(now - self.last, len(texts))
        self.last = now
        before, after = self._around
        if len(texts) == 1:
            return before + _encode(texts[0]) + after
        return b"".join([before + _encode(text) + after for text in texts])

    def transmit(self, body: bytes) -> None:
        if self.is_over or not self._push(body):
            self.end()
            self._writer.transmit(body)

    def end(self) -> None:
        """Leave the rest to the writer, which is woken; idempotent."""
        if not self.is_over:
            self.is_over, self._choice.wake = True, self._wake
            self._wake(self._choice)
