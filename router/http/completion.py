"""One HTTP request as the router core sees it: several choices, submitted and ended together.

All or nothing: when one of the requests is refused or fails, the others are cancelled.  Pure: the
gateway gives it a writer to wake when there is something to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from router.core.request import Request
from router.http.choice import MAX_PENDING_TOKENS, Choice, OutputOptions, Piece
from router.http.responses import UsageBody, usage_body
from wire.errors import ErrorCode, WireError

# Tokens that are taken before others have their turn: some milliseconds, with their scores.
MAX_AT_ONCE: Final = 64


class Core(Protocol):
    """What of `router.core.dispatcher.Dispatcher` is used here."""

    def submit(self, request: Request, sink: Choice) -> int: ...

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None: ...

    def stop(self, handle: int) -> None: ...


class Writer(Protocol):
    """Who writes the answer."""

    def wake(self) -> None:
        """There is something to take."""

    def overrun(self) -> None:
        """A choice has more untaken tokens than anyone should let pile up."""


class Completion:
    """The choices of one HTTP request: ``num_choices`` for each prompt, in that order."""

    def __init__(
        self, core: Core, output: OutputOptions, writer: Writer, *, num_choices: int
    ) -> None:
        self._core = core
        self._terms = output
        self._writer = writer
        self._num_choices = num_choices
        self._dirty: dict[Choice, None] = {}
        self._num_open = 0
        self.choices: list[Choice] = []
        self.error: WireError | None = None
        # Tokens that the last `take` took.
        self.num_new_tokens = 0

    @property
    def is_over(self) -> bool:
        return self._num_open == 0 or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum([choice.num_tokens for choice in self.choices])

    @property
    def usage(self) -> UsageBody:
        """What it has cost so far."""
        return usage_body(self.choices, self._num_choices)

    def submit(self, requests: Iterable[tuple[Request, str]]) -> None:
        """Submit every request, each with the text to echo before its answer.

        Raises:
            WireError: One was refused.  Whatever is raised, none is left running.
        """
        try:
            for index, (request, prefix) in enumerate(requests):
                choice = Choice(index, request.token_ids, self._terms, self._on_wake, prefix)
                choice.handle = self._core.submit(request, choice)
                self.choices.append(choice)
                self._num_open += 1
        except BaseException:
            self.cancel()
            raise

    def take(self) -> list[tuple[Choice, list[Piece]]]:
        """Return what the choices that moved since the last call have to show.

        Of very much it is a part, and the writer is woken for the rest.
        """
        taken = []
        self.num_new_tokens = 0
        for choice in tuple(self._dirty):
            if self.num_new_tokens >= MAX_AT_ONCE:
                break
            lag = choice.lag
            taken.append((choice, choice.take(MAX_AT_ONCE - self.num_new_tokens)))
            self.num_new_tokens += lag - choice.lag
            if choice.is_over or not choice.lag:
                del self._dirty[choice]
            if choice.error is not None:
                self.error = self.error or choice.error
                self.cancel()
            elif choice.finish_reason is not None:
                self._num_open -= 1
                self._cancel(choice)  # If a stop string ended it, no worker knows of it.
        if self._dirty:
            self._writer.wake()
        return taken

    def cancel(self) -> None:
        """Free what every open choice holds on the workers; idempotent."""
        for choice in self.choices:
            self._cancel(choice)

    def _cancel(self, choice: Choice) -> None:
        if choice.handle is not None and choice.usage is None and choice.error is None:
            if choice.finish_reason is not None or choice.is_stopped_at_once:
                self._core.stop(choice.handle)  # A stop string ended it.
            else:
                self._core.cancel(choice.handle)
        choice.handle = None

    def _on_wake(self, choice: Choice) -> None:
        if choice.is_stopped_at_once:
            self._cancel(choice)
        if choice in self._dirty:
            if choice.lag > MAX_PENDING_TOKENS:
                self._writer.overrun()
        elif choice.finish_reason is None:  # Else a stop string ended it, and more was under way.
            self._dirty[choice] = None
            self._writer.wake()
