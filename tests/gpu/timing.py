"""Seconds on the GPU, between events, with a cold cache; and of the host for what it starts.

Without a GPU each call is made once, and its time says nothing; but that of launches, see
`launch_s`, is what the host does for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median

import torch

# Several times the second-level cache of any card, and long enough for Python to get ahead: a
# kernel that waits for its launch would be timed with the wait.
FLUSH_BYTES = 1 << 30


def device_s(call: Callable[[], object], repeats: int = 15, warmup: int = 3) -> float:
    """Return the median time of what `call` starts; compiled and warmed up before."""
    if not torch.cuda.is_available():
        return wall_s(call)
    for _ in range(warmup):
        call()
    durations: list[float] = []
    for _ in range(repeats):
        start, end = _event(), _event()
        _flush().zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        durations.append(start.elapsed_time(end) / 1000)
    return median(durations)


def spend(cycles: int) -> None:
    """Keep the stream that computes busy; torch has no other wait of a known length."""
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001


def wall_s(call: Callable[[], object], repeats: int = 15, warmup: int = 3) -> float:
    """Return the median time of a call that returns when it is done."""
    if not torch.cuda.is_available():
        repeats, warmup = 1, 0
    for _ in range(warmup):
        call()
    durations = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start_s)
    return median(durations)


def launch_s(call: Callable[[], object], batches: int = 20, count: int = 25) -> float:
    """Return the host's time for starting `call`, which must be quick on the device."""
    for _ in range(20):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    durations = []
    for _ in range(batches):
        start_s = time.perf_counter()
        for _ in range(count):
            call()
        durations.append((time.perf_counter() - start_s) / count)
    return median(durations)


def replay_s(call: Callable[[], object], count: int = 50) -> float:
    """Return the device's time for each of `count` calls captured in one graph."""
    if not torch.cuda.is_available():
        return wall_s(call)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what is made once must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return device_s(graph.replay) / count


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@cache
def _flush() -> torch.Tensor:
    free_bytes, _ = torch.cuda.mem_get_info()
    return torch.empty(min(FLUSH_BYTES, free_bytes // 8), dtype=torch.uint8, device="cuda")
