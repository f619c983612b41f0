"""The chunks and preemptions of one sequence; `worker.engine.recorder` adds its steps."""

from __future__ import annotations

from typing import Final

from wire.timeline import Entry, Kind

# The first chunks and preemptions have entries of their own.
MAX_CHUNKS: Final = 32
MAX_PREEMPTIONS: Final = 16


class Timeline:
    """The chunks and preemptions of a sequence; times are on the engine's clock.

    Attributes:
        is_read: The first token is sampled, here or by another worker.
        first_s: When it was sampled here.
        preempted_s: When the sequence was last preempted.
    """

    __slots__ = ("_chunks", "_num_chunks", "first_s", "is_read", "preempted_s", "preemptions")

    def __init__(self) -> None:
        self.is_read = False
        self.first_s: float | None = None
        self.preempted_s = 0.0
        self.preemptions: list[Entry] = []
        self._chunks: list[Entry] = []
        self._num_chunks = 0

    def add_chunk(self, start_s: float, end_s: float, num_tokens: int) -> None:
        """Record a step that prefilled tokens of the prompt."""
        self._num_chunks += 1
        if len(self._chunks) < MAX_CHUNKS:
            self._chunks.append(Entry(Kind.CHUNK, start_s, end_s - start_s, num_tokens))

    def on_first_token(self, now: float) -> list[Entry]:
        """Record the first token; return the entries up to here."""
        self.is_read, self.first_s = True, now
        start_s = self._chunks[0].start_s
        whole = Entry(Kind.PREFILL, start_s, now - start_s, self._num_chunks)
        entries = [whole, *self._chunks, *self.preemptions]
        self._chunks, self.preemptions = [], []
        return entries

    def resume(self, preempted_by: int, now: float) -> None:
        """Record that the sequence has blocks again, which request `preempted_by` had got."""
        if len(self.preemptions) < MAX_PREEMPTIONS:
            start_s = self.preempted_s
            away = Entry(Kind.PREEMPTION, start_s, now - start_s, preempted_by)
            self.preemptions.append(away)
