"""Coroutines that are begun before it is known whether they wait, and mostly do not.

Who begins one with `send(None)` has its result at once, in a StopIteration, and needs neither a
task for it nor a timer.  Where it does wait, a task goes on with it.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def go_on(begun: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Await a coroutine that has begun outside of this task, or before, and waits for `awaited`."""
    try:
        while True:
            try:
                yield awaited
            except BaseException as error:
                awaited = begun.throw(error)
            else:
                awaited = begun.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
