"""The warmup of the models: the engine thread's first job, before any router knows the worker.

It may compile for minutes, and nothing can interrupt that.  So the loop goes on meanwhile, and who
is told to stop does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

log = structlog.get_logger("worker")


class Warmup:
    """All `warm_ups` in turn; `on_end` is called where they ran, however they ended.

    Attributes:
        is_over: Whether it has returned or raised.
        is_done: Whether it has returned: the worker can serve.
    """

    def __init__(
        self,
        warm_ups: Sequence[Callable[[], None]],
        clock: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        self.is_over = self.is_done = False
        self._warm_ups, self._clock, self._on_end = warm_ups, clock, on_end

    def run(self, _: object = None) -> None:
        """Warm up, on the engine's thread.  Raises what a model does."""
        started_s = self._clock()
        try:
            for warm_up in self._warm_ups:
                warm_up()
            self.is_done = True
            log.info("warmed up", seconds=round(self._clock() - started_s, 3))
        except Exception as error:
            log.error("the warmup failed", reason=f"{type(error).__name__}: {error}")
            raise
        finally:
            self.is_over = True
            self._on_end()
