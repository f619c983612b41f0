"""Finds stop strings across token boundaries.

The stop strings are compiled to one Aho-Corasick automaton.  Its state is the longest suffix of the
text that is a prefix of a stop string, so the depth of the state is the number of characters to
hold back.  The time is linear in the text, regardless of the number and length of stop strings.

The first match to complete ends the text; if several complete together, the longest one counts.
The result therefore does not depend on how the text is split into chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The compiled stop strings of one request; immutable and shared by its choices."""

    __slots__ = ("depth", "fail", "goto", "length")

    def __init__(self, stops: Sequence[str]) -> None:
        # State 0 is the root.  `length[s]` is the length of the longest stop string that ends in
        # state s, or 0.
        self.goto: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.length: list[int] = [0]
        self.fail: list[int] = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def next(self, state: int, char: str) -> int:
        """Return the state after `char`."""
        while state and char not in self.goto[state]:
            state = self.fail[state]
        return self.goto[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string is empty")
        state = 0
        for char in stop:
            if char not in self.goto[state]:
                self.goto[state][char] = len(self.goto)
                self.goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.length.append(0)
                self.fail.append(0)
            state = self.goto[state][char]
        self.length[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.goto[state].items():
                self.fail[child] = self.next(self.fail[state], char)
                self.length[child] = self.length[child] or self.length[self.fail[child]]
                queue.append(child)


class StopMatcher:
    """Searches the text of one choice incrementally for stop strings."""

    __slots__ = ("_automaton", "_held", "_state", "stop")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        # The stop string that was found, if any.
        self.stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    @property
    def is_holding(self) -> bool:
        return self._held != ""

    def feed(self, text: str) -> str:
        """Return the text that is certain; hold back the rest or, after a stop, drop it."""
        automaton, state = self._automaton, self._state
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.next(state, char)
            if automaton.length[state]:
                begin = position - automaton.length[state]
                self.stop = pending[begin:position]
                self._state, self._held = 0, ""
                return pending[:begin]
        shown = len(pending) - automaton.depth[state]
        self._state, self._held = state, pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held, self._state = self._held, "", 0
        return held
