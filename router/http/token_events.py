"""The fast path of a stream, for tokens of a single choice whose events contain only text.

Tokens go from the core to the connection without `Choice`, `Completion`, `Answer` and
`ResponseWriter`.  At one token every 10 ms, half of the cost of a token is the interpreter running
with cold caches, so every call and object counts.  A token is converted to an event when the core
delivers it, and written at the end of the iteration of the event loop.  At any other event, at the
end of the stream, or if the client reads too slowly, the writer takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.api.completions.completion import Choice
from router.http.asgi import Push
from wire.aio.fair_writes import FairWrites, Writer
from wire.payloads import Logprobs


@dataclass(eq=False, repr=False, slots=True)
class TokenEvents:
    """Writes the tokens of `choice` as events, until `end`.

    An event is the JSON text of a token between the two strings of `around`.  `last` is the time of
    the last write.
    """

    writer: Writer
    fair_writes: FairWrites
    choice: Choice
    around: tuple[bytes, bytes]
    push: Push
    on_tokens: Callable[[float, int], None]
    last: float
    is_over: bool = False
    _texts: list[bytes] | None = None  # not written yet
    _num_left: int = field(init=False)
    _num_diverted: int = field(init=False)
    _json_of: Callable[[int], bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._num_left = self._num_diverted = self.choice.num_divertible
        self._json_of = self.choice.divert(self.on_token, self._on_other)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Convert a token to an event, in place of `Choice.on_token`."""
        if not self._num_left:
            self.end()
            self.choice.on_token(token_id, logprobs)
            return
        text = self._json_of(token_id)
        self._num_left -= 1
        if self._texts:
            self._texts.append(text)
        else:
            self._texts = [text]
            self.fair_writes.take(self)

    def take(self) -> tuple[bytes, int]:
        """Return the unwritten events as bytes, and their number."""
        texts, self._texts = self._texts, None
        if not texts:
            return b"", 0
        before, after = self.around
        return b"".join((before, (after + before).join(texts), after)), len(texts)

    def prepare(self, now: float) -> bytes:
        if self.is_over:  # the writer already took the rest
            return b""
        body, num_tokens = self.take()
        self.on_tokens(now - self.last, num_tokens)
        self.last = now
        return body

    def transmit(self, body: bytes) -> None:
        if not self.push(body):
            self.end()
            self.writer.transmit(body)

    def end(self) -> None:
        """Return control of the stream to the choice and the writer.  Idempotent."""
        if not self.is_over:
            self.is_over = True
            self.choice.end_diversion(self._num_diverted - self._num_left)

    def _on_other(self, choice: Choice) -> None:
        self.end()
