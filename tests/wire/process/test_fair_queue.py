"""The queue does what plain lists do that are searched from end to end."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wire.process.fair_queue import FairQueue

CLIENTS = st.sampled_from("abc")


class QueueBesideAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str, int] = FairQueue()
        self.lines: list[tuple[str, list[int]]] = []  # in the order of turns
        self.items = itertools.count()

    def line_of(self, client: str) -> list[int]:
        return next((line for it, line in self.lines if it == client), [])

    @rule(client=CLIENTS)
    def add(self, client: str) -> None:
        item = next(self.items)
        self.queue.add(client, item)
        if not self.line_of(client):
            self.lines.append((client, []))
        self.line_of(client).append(item)

    @rule(client=CLIENTS)
    def add_first(self, client: str) -> None:
        item = next(self.items)
        self.queue.add_first(client, item)
        line = [item, *self.line_of(client)]
        self.lines = [(client, line), *(it for it in self.lines if it[0] != client)]

    @rule(client=CLIENTS, at=st.integers(0, 5), times=st.integers(1, 2))
    def remove(self, client: str, at: int, times: int) -> None:
        line = self.line_of(client)
        item = line[at % len(line)] if line else -1
        for time in range(times):
            assert self.queue.remove(client, item) is (bool(line) and time == 0)
        if line:
            line.remove(item)
        self.lines = [it for it in self.lines if it[1]]

    @rule(client=CLIENTS)
    def end_turn(self, client: str) -> None:
        self.queue.end_turn(client)
        self.lines.sort(key=lambda it: it[0] == client)

    @invariant()
    def agree(self) -> None:
        assert bool(self.queue) is bool(self.lines)
        for barred in ("", "a", "ab", "abc"):
            first = next(((it, line[0]) for it, line in self.lines if it not in barred), None)
            assert self.queue.first(barred) == first
        for client in "abc":
            line = self.line_of(client)
            assert self.queue.num_of(client) == len(line)
            assert self.queue.last_of(client) == (line[-1] if line else None)


TestQueueBesideAList = QueueBesideAList.TestCase
TestQueueBesideAList.settings = settings(max_examples=40, stateful_step_count=25)
