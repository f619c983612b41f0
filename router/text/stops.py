"""Finds stop strings across token boundaries.

The stop strings become one automaton (Aho and Corasick): its state after a character is the longest
end of the text that begins some stop string, so the depth of the state is exactly how much text
must be held back.  Work is linear in the text, however many and however long the stop strings are.

The match that completes first ends the text; of those that complete together the longest one does.
How the text is cut into pieces therefore never matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The compiled stop strings of one request; shared by its choices, never changed."""

    __slots__ = ("depth", "fail", "goto", "length")

    def __init__(self, stops: Sequence[str]) -> None:
        # State 0 is the root.  `length[s]` is that of the longest stop string ending in state s.
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
    """Reads the text of one choice piece by piece and says how much of it may be shown."""

    __slots__ = ("_automaton", "_held", "_state", "stop")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        # The stop string that was found.
        self.stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    @property
    def is_holding(self) -> bool:
        return self._held != ""

    def feed(self, text: str) -> str:
        """Return the text that may be shown; the rest is held back or, after a stop, dropped."""
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
        """Return what was held: the text ended and no stop string was completed."""
        held, self._held, self._state = self._held, "", 0
        return held
