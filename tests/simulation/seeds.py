"""Runs one seed and says what it came to."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from tests.simulation.world import Violation, World


@dataclass(frozen=True)
class Outcome:
    """`problem` is empty when every invariant held; `digest` is that of the whole history."""

    seed: int
    problem: str
    digest: str
    num_events: int
    ends: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


# What the code under test logged as an exception since the seed began.
_exceptions: list[str] = []


def run_seed(seed: int, *, keep_trace: bool = False) -> Outcome:
    """Run a seed to its rest or to its first violation."""
    _exceptions.clear()
    world = World(seed, keep_trace=keep_trace)
    problem = ""
    try:
        world.run()
    except Violation as violation:
        problem = str(violation)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if _exceptions:
        problem = f"{problem} [{_exceptions[0]}]" if problem else _exceptions[0]
    ends = [client.end or "open" for client in world.clients]
    return Outcome(seed, problem, world.digest, world.timeline.num_events, ends, list(world.trace))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the log to what is an exception: each is a violation."""
    before = structlog.get_config()
    structlog.configure(
        processors=[_collect], wrapper_class=structlog.make_filtering_bound_logger(40)
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _collect(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    error = event.get("exc_info")
    if error is True:
        error = sys.exc_info()[1]
    if error:
        _exceptions.append(f"{event.get('event')}: {error!r}")
    raise structlog.DropEvent
