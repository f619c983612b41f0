"""The fast path of a stream, for tokens of one choice that show only their text.

It leads from the core to the connection past `Choice`, `Completion`, `Answer` and `ResponseWriter`.
At a token every 10 ms, half of a token's cost is the interpreter with cold caches, so every call
and object counts: a token becomes an event where it comes in, and is written when the iteration of
the event loop ends.  At anything else, an end or a slow reader, the writer takes over.
"""

from __future__ import annotations

from collections.abc import Callable

from router.api.completions.completion import Choice
from router.http.asgi import Push
from wire.aio.fair_writes import FairWrites, Writer
from wire.payloads import Logprobs


class TokenEvents:
    """Writes the texts of `choice`, each between the two of `around`, until `end`.

    `last` is the time of its last write.
    """

    __slots__ = (
        "_around",
        "_choice",
        "_json_of",
        "_num_diverted",
        "_num_left",
        "_on_tokens",
        "_push",
        "_texts",
        "_turns",
        "_writer",
        "is_over",
        "last",
    )

    def __init__(
        self,
        writer: Writer,
        turns: FairWrites,
        choice: Choice,
        around: tuple[bytes, bytes],
        push: Push,
        on_tokens: Callable[[float, int], None],
        last: float,
    ) -> None:
        self._writer, self._turns, self._choice = writer, turns, choice
        self._around = around
        self._push, self._on_tokens = push, on_tokens
        self._texts: list[bytes] | None = None  # not written yet
        self.last, self.is_over = last, False
        self._num_left = self._num_diverted = choice.num_divertible
        self._json_of = choice.divert(self.on_token, self._on_other)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Handle a token in place of the choice."""
        if not self._num_left:
            self.end()
            self._choice.on_token(token_id, logprobs)
            return
        text = self._json_of(token_id)
        self._num_left -= 1
        if self._texts:
            self._texts.append(text)
        else:
            self._texts = [text]
            self._turns.take(self)

    def take(self) -> tuple[bytes, int]:
        """Return the unwritten events and the number of their tokens."""
        texts, self._texts = self._texts, None
        if not texts:
            return b"", 0
        before, after = self._around
        return b"".join((before, (after + before).join(texts), after)), len(texts)

    def prepare(self, now: float) -> bytes:
        if self.is_over:  # the writer has taken the rest
            return b""
        body, num_tokens = self.take()
        self._on_tokens(now - self.last, num_tokens)
        self.last = now
        return body

    def transmit(self, body: bytes) -> None:
        if not self._push(body):
            self.end()
            self._writer.transmit(body)

    def end(self) -> None:
        """Give the stream back to the choice and the writer; idempotent."""
        if not self.is_over:
            self.is_over = True
            self._choice.end_diversion(self._num_diverted - self._num_left)

    def _on_other(self, choice: Choice) -> None:
        self.end()
