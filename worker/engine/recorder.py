"""Records what the engine did for sequences, and when, for requests that ask for it.

Every step adds its end to one log for all sequences, so that tokens cost a sequence nothing: when
it ends, its steps are those in the log since it began.  Times are on the engine's clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Many
from operator import sub
from typing import Final, NamedTuple

from wire.timeline import Entry, Kind
from worker.engine.outputs import Timed
from worker.engine.scheduler import Plan
from worker.engine.sequence import Sequence

# The latest steps that are evaluated for a sequence.
MAX_STEPS: Final = 4096
# A stall is a step that took this many times the median, and at least MIN_STALL_S longer.
STALL_RATIO: Final = 4
MIN_STALL_S: Final = 0.001
MAX_STALLS: Final = 8


class _Reading(NamedTuple):
    """A chunk of the current step, after which the KV of `end` tokens exists."""

    sequence: Sequence
    num_tokens: int
    end: int


class Recorder:
    """The log of steps, and the timelines of sequences that have one."""

    def __init__(self) -> None:
        self._ends = array("d")
        self._prompt_tokens = array("q")  # that each step prefilled
        self._reading: list[_Reading] = []
        self._planned_s = 0.0

    def on_plan(self, plan: Plan, now: float) -> None:
        """Record the sequences that a step starts, preempts, resumes and prefills."""
        self._planned_s = now
        for sequence in plan.started:
            sequence.started_s = now
        for sequence in plan.preempted:
            if sequence.timeline is not None:
                sequence.timeline.preempted_s = now
        for sequence in plan.resumed:
            if sequence.timeline is not None:
                sequence.timeline.resume(sequence.preempted_by, now)
        self._reading = [
            _Reading(it.sequence, it.num_tokens, it.sequence.num_computed_tokens + it.num_tokens)
            for it in plan.prefill
        ]

    def on_commit(self, ended: Iterable[Sequence], now: float) -> list[Timed]:
        """Record the end of a step; return outputs that belong before those of its tokens."""
        timed: list[Timed] = []
        # While one step is planned, the step before it may be committed.
        done = [it for it in self._reading if it.sequence.num_computed_tokens >= it.end]
        for sequence, num_tokens, _ in done:
            timeline = sequence.timeline
            if timeline is None or timeline.is_read:
                continue
            timeline.add_chunk(self._planned_s, now, num_tokens)
            if sequence.num_new_tokens:
                timed.append(Timed(sequence.request_id, timeline.on_first_token(now)))
        if done:
            self._reading = [it for it in self._reading if it.sequence.num_computed_tokens < it.end]
        self._log(now, sum([it.num_tokens for it in done]))
        for sequence in ended:
            timeline = sequence.timeline
            if timeline is not None and not sequence.transfer:
                start_s = timeline.first_s or sequence.started_s or now
                entries = self._steps(start_s, timeline.preemptions)
                timed.append(Timed(sequence.request_id, entries + timeline.preemptions))
        return timed

    def _log(self, now: float, prompt_tokens: int) -> None:
        self._ends.append(now)
        self._prompt_tokens.append(prompt_tokens)
        if len(self._ends) > 2 * MAX_STEPS:
            del self._ends[:MAX_STEPS], self._prompt_tokens[:MAX_STEPS]

    def _steps(self, start_s: float, preemptions: Iterable[Entry]) -> list[Entry]:
        """Summarize the steps since `start_s`, except those during a preemption."""
        first = max(bisect_right(self._ends, start_s), len(self._ends) - MAX_STEPS)
        ends = self._ends[first:].tolist()
        starts = [max(start_s, self._ends[first - 1]) if first else start_s, *ends[:-1]]
        lengths = list(map(sub, ends, starts))
        own: Many[int] = range(len(ends))
        for away in preemptions:
            back_s = away.start_s + away.duration_s
            own = [index for index in own if not away.start_s < ends[index] <= back_s]
        if len(own) == 0:
            return []
        ordered = sorted(lengths if isinstance(own, range) else [lengths[it] for it in own])
        median, p99 = _percentile(ordered, 50), _percentile(ordered, 99)
        longest = lengths.index(ordered[-1])
        limit = max(STALL_RATIO * median, median + MIN_STALL_S)
        stalls: list[int] = []
        if ordered[-1] > limit:
            slow = [index for index in own if lengths[index] > limit]
            stalls = sorted(sorted(slow, key=lengths.__getitem__)[-MAX_STALLS:])
        return [
            Entry(Kind.DECODE, start_s, ends[-1] - start_s, len(ordered)),
            Entry(Kind.STEP_P50, start_s, median),
            Entry(Kind.STEP_P99, start_s, p99),
            Entry(Kind.STEP_MAX, starts[longest], ordered[-1]),
            *(
                Entry(Kind.STALL, starts[it], lengths[it], self._prompt_tokens[first + it])
                for it in stalls
            ),
        ]


def _percentile(ordered: list[float], percent: int) -> float:
    """Return the nearest-rank percentile of ascending values."""
    return ordered[-(-len(ordered) * percent // 100) - 1]
