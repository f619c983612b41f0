"""Fast path of a stream: tokens of one choice that show nothing but their text.

These are most of a router's work, so they go from the core to the connection past `Choice`,
`Completion`, `Answer` and `ResponseWriter`.  With a token every 10 ms half of its cost is the
interpreter with cold caches, so every call and object counts: a token becomes an event where it
arrives, and is written at the end of the loop's iteration.  At anything else, an end or a slow
client, the writer takes over.
"""

from __future__ import annotations

from collections.abc import Callable

from router.api.completions.completion import Choice
from router.http.asgi import Push
from wire.aio.fair_writes import FairWrites, Writer
from wire.payloads import Logprobs


class TokenEvents:
    """Writes the texts of `choice`, each between the two of `around`, until `end`.

    `last` is when it wrote last.
    """

    __slots__ = (
        "_around",
        "_choice",
        "_json_of",
        "_num_left",
        "_num_lent",
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
        self._texts: list[bytes] | None = None  # of every event that is not written yet
        self.last, self.is_over = last, False
        self._num_left = self._num_lent = choice.num_lendable
        self._json_of = choice.lend(self.on_token, self._on_other)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Take a token, as the choice would."""
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
        """Return the events that are not written yet, and of how many tokens they are."""
        texts, self._texts = self._texts, None
        if not texts:
            return b"", 0
        before, after = self._around
        return b"".join((before, (after + before).join(texts), after)), len(texts)

    def prepare(self, now: float) -> bytes:
        if self.is_over:  # the writer has what was left
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
        """Leave the rest to the choice and the writer; idempotent."""
        if not self.is_over:
            self.is_over = True
            self._choice.take_back(self._num_lent - self._num_left)

    def _on_other(self, choice: Choice) -> None:
        self.end()
