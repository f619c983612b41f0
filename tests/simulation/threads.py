"""The worker's two threads as events: the engine's and the one that copies KV.

A step and a copy take seeded virtual time.  A step is computed at its beginning or at its end, and
an unpack writes at its end: whoever reads or frees blocks too early is caught by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.simulation.loop import Process, State, Timeline
from wire.layout import KVGroup, KVLayout
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.window_blocks import NONE
from worker.engine.engine import Engine
from worker.engine.outputs import Output
from worker.engine.thread import Call
from worker.executor.contract import ModelInfo
from worker.executor.hash import HashExecutor, HashKVCache


class Late(NamedTuple):
    """A write to the KV of some blocks that is yet to be made, in layers of one group."""

    blocks: Sequence[int]
    group: int
    write: Callable[[], None]


class SlowCache(HashKVCache):
    """KV whose unpacked bytes can be held back until a copy is over.

    If it `is_late`, nothing is copied straight into its blocks either.
    """

    def __init__(
        self, num_blocks: int, block_size: int, layout: KVLayout, *room: int, is_late: bool
    ) -> None:
        super().__init__(num_blocks, block_size, layout, *room)
        self._is_late = is_late
        self.late: list[Late] | None = None

    def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
        return None if self._is_late else super().view(block_table, rectangle)

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        if self.late is None:
            super().unpack(block_table, rectangle, segment)
        else:
            write = super().unpack
            tokens, size = rectangle.tokens, self.block_size
            blocks = [*block_table[tokens.start // size : -(-tokens.stop // size)]]
            if rectangle.group in self.windowed:
                beside = {self.window_blocks.table([it])[0]: it for it in range(self.num_blocks)}
                blocks = [beside[number] for number in blocks if number != NONE]
            late = Late(blocks, rectangle.group, lambda: write(block_table, rectangle, segment))
            self.late.append(late)

    @property
    def windowed(self) -> list[int]:
        """The groups of layers with a window."""
        groups = enumerate(self.layout.groups)
        return [index for index, it in groups if isinstance(it, KVGroup) and it.window is not None]

    def is_held(self, late: Late, is_used: Callable[[int], bool]) -> bool:
        """Whether blocks are used, and layers with a window still have what lies beside them."""
        is_beside = late.group not in self.windowed or all(
            block in self.window_blocks for block in late.blocks
        )
        return is_beside and all(is_used(block) for block in late.blocks)


class SlowExecutor(HashExecutor):
    """The `hash` executor over such a cache."""

    cache: SlowCache

    def __init__(self, info: ModelInfo, *, is_late: bool) -> None:
        super().__init__(info)
        self._is_late = is_late

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> HashKVCache:
        room = num_states, num_window_blocks
        self._cache = self.cache = SlowCache(
            num_blocks, block_size, self.info.layout, *room, is_late=self._is_late
        )
        return self.cache


class EventThread:
    """An engine driven by events, as `worker.engine.thread`; `step_s` is the range of steps."""

    def __init__(
        self,
        timeline: Timeline,
        process: Process,
        random: Random,
        step_s: tuple[float, float],
        engine: Engine,
        deliver: Callable[[list[Output]], object],
        on_crash: Callable[[BaseException], object],
    ) -> None:
        self.engine = engine
        self.is_busy = False
        self.slowness = 1.0
        engine.announce = deliver
        self._timeline, self._process, self._random, self._step_s = (
            timeline,
            process,
            random,
            step_s,
        )
        self._deliver, self._on_crash = deliver, on_crash
        self._calls: deque[Call] = deque()
        self._is_started = self._is_over = self._is_planned = False
        self._num_rests = 0

    def start(self) -> None:
        self._is_started = True
        self._plan(0.0)

    def post(self, call: Call) -> None:
        self._calls.append(call)
        self.is_busy = True
        self._plan(self._random.uniform(0.0, 0.0005))

    def stop(self, *, wait_s: float | None = None) -> bool:
        self._is_over = True
        return True

    def _plan(self, delay_s: float) -> None:
        if self._is_started and not self._is_planned and self._process.state is not State.DEAD:
            self._is_planned = True
            self._timeline.after(delay_s, self._process, self._guarded, self._turn)

    def _guarded(self, part: Callable[..., None], *args: Any) -> None:
        if self._is_over:
            return
        try:
            part(*args)
        except BaseException as error:
            self._is_over = True
            self._on_crash(error)

    def _turn(self) -> None:
        self.is_busy = True
        while self._calls:
            self._calls.popleft()(self.engine)
        if not self.engine.has_work():
            self._rest()
            return
        duration_s = self._random.uniform(*self._step_s) * self.slowness
        if self._random.random() < 0.5:
            outputs = self.engine.step()
            self._timeline.after(duration_s, self._process, self._guarded, self._finish, outputs)
        else:
            self._timeline.after(duration_s, self._process, self._guarded, self._step_late)

    def _step_late(self) -> None:
        self._finish(self.engine.step())

    def _finish(self, outputs: list[Output]) -> None:
        if outputs:
            self._deliver(outputs)
        self._turn()

    def _rest(self) -> None:
        self.engine.check()
        self.is_busy = self._is_planned = False
        idle_s = self.engine.idle_s()
        self._num_rests += 1
        if idle_s is not None:  # a deadline; a little later, for the rounding of sums
            self._timeline.after(idle_s + 1e-6, self._process, self._wake, self._num_rests)

    def _wake(self, rest: int) -> None:
        if rest == self._num_rests:
            self._plan(0.0)


class EventCopies:
    """Copies one after another (`worker.transfer.thread.Copies`), each with a beginning and an end.

    `is_used` says of a block whether a sequence holds it.
    """

    num_at_once = 1

    def __init__(
        self,
        timeline: Timeline,
        process: Process,
        random: Random,
        copy_s: tuple[float, float],
        executor: SlowExecutor,
        is_used: Callable[[int], bool],
    ) -> None:
        self._is_used = is_used
        self._timeline, self._process, self._random = timeline, process, random
        self._copy_s, self._executor = copy_s, executor
        self._free_at = 0.0

    async def run(self, copy: Callable[..., Any], *args: Any, num_bytes: int) -> Any:
        begins = max(self._free_at, self._timeline.now)
        ends = self._free_at = begins + self._random.uniform(*self._copy_s)
        await self._until(self._random.choice((begins, ends)))
        cache = self._executor.cache
        late: list[Late] = []
        cache.late = late
        try:
            result = copy(*args)
        finally:
            cache.late = None
        await self._until(ends)
        for it in late:
            if not cache.is_held(it, self._is_used):
                raise AssertionError("KV is written to blocks that were given back")
            it.write()
        return result

    async def _until(self, when: float) -> None:
        done = self._process.create_future()
        self._process.call_at(when, _set, done)
        await done

    def close(self) -> None:
        """Nothing runs outside the loop."""


def _set(done: Any) -> None:
    if not done.done():
        done.set_result(None)
