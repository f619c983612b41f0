"""Streams for copies, simulated; `tests/gpu/verify.py` tries them on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kernels import Rectangle, reference
from kernels.cuda import launch
from kernels.cuda.copy_streams import IN_FLIGHT, SideStream, lane_of
from tests.kernels.shim.cupy import Cupy
from tests.kernels.shim.cupy import cupy as cupy


def test_a_lane_starts_kernels_on_its_device(cupy: Cupy) -> None:
    lane = object.__new__(SideStream)  # a stream needs a GPU, and a start asks for none here
    lane.device = torch.device("cpu")
    held = torch.randn(6, 3, 2, 2, 8, 16, generator=torch.Generator().manual_seed(3))
    table, filled = [4, 0, 3, 1], torch.zeros_like(held)
    rectangle = Rectangle(range(1, 3), range(1, 2), range(5, 29))
    want = reference.pack_kv(held, table, rectangle, held.dtype)
    segment = lane.buffer(want.shape, want.dtype)
    lane.start(launch.move(held, lane.upload(table), rectangle, segment, into_pool=False))
    assert torch.equal(segment, want)
    lane.start(launch.move(filled, lane.upload(table), rectangle, segment, into_pool=True))
    assert torch.equal(reference.pack_kv(filled, table, rectangle, held.dtype), want)
    assert filled.count_nonzero() == want.count_nonzero()


class Stream:
    """A stream of a CPU: its calls run when somebody waits for them."""

    def __init__(self, *_: object, priority: int = 0) -> None:
        self.calls: list[Callable[[], object]] = []
        self.num_asked = self.num_run = 0

    def ask(self, call: Callable[[], object]) -> None:
        self.calls.append(call)
        self.num_asked += 1

    def wait_event(self, event: Event) -> None:
        self.ask(event.synchronize)

    def synchronize(self) -> None:
        self.run(self.num_asked)

    def run(self, number: int) -> None:
        while self.num_run < number:
            self.num_run += 1
            self.calls.pop(0)()


class Event:
    def record(self, stream: Stream) -> None:
        self.synchronize = partial(stream.run, stream.num_asked)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> tuple[SideStream, Stream, list[Stream]]:
    """A lane of streams of the CPU, the one that computes, and those that copies have taken."""
    computing, taken = Stream(), []

    @contextmanager
    def stream(it: Stream) -> Iterator[None]:
        taken.append(it)
        yield

    made = {"Stream": Stream, "Event": Event, "default_stream": lambda _: computing}
    for name, stand_in in {**made, "stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return SideStream(torch.device("cuda", 0)), computing, taken


def test_a_copy_runs_after_the_last_mark_and_is_waited_for(
    simulated: tuple[SideStream, Stream, list[Stream]],
) -> None:
    lane, computing, taken = simulated
    done: list[str] = []
    computing.ask(lambda: done.append("step"))
    lane.mark()
    computing.ask(lambda: done.append("the next step"))
    with lane.working():
        taken[-1].ask(lambda: done.append("copy"))
    assert done == ["step", "copy"]


def test_a_stream_is_given_back_whatever_a_copy_raises(
    simulated: tuple[SideStream, Stream, list[Stream]],
) -> None:
    lane, _, taken = simulated

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for _ in range(IN_FLIGHT):
        with pytest.raises(RuntimeError, match="illegal"), lane.working():
            taken[-1].ask(fail)
    assert len({id(it) for it in taken}) == lane._idle.qsize() == IN_FLIGHT  # noqa: SLF001


def test_the_host_has_no_lane() -> None:
    assert lane_of(torch.device("cpu")) is None
