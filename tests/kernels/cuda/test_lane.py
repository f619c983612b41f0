"""The stream beside the one that computes; what it promises of time shows on a GPU only."""

from __future__ import annotations

import pytest
import torch

from kernels import KernelError, reference
from kernels.cuda import launch
from kernels.cuda.lane import SideStream, lane_of
from tests.gpu.timing import spend
from tests.kernels.backends import require_gpu
from tests.kernels.shim.cupy import Cupy
from tests.kernels.shim.cupy import cupy as cupy


@pytest.fixture
def lane() -> SideStream:
    require_gpu()
    return SideStream(torch.device("cuda", 0))


@pytest.mark.gpu
def test_work_waits_for_what_was_marked_and_is_done_at_the_end(lane: SideStream) -> None:
    source = torch.zeros(1 << 20, device="cuda")
    target = lane.pinned(source.shape, source.dtype)
    assert target.is_pinned()
    spend(20_000_000)  # the stream that computes is late
    source.fill_(7)
    lane.mark()
    spend(2_000_000_000)  # the next step
    with lane.working():
        target.copy_(source, non_blocking=True)
    assert bool((target == 7).all())
    assert not torch.cuda.default_stream().query(), "it waited for a step that was asked for later"


@pytest.mark.gpu
def test_a_pool_that_no_kernel_serves_is_refused(lane: SideStream) -> None:
    with pytest.raises(KernelError, match="block_size is 12"):
        lane.require(torch.zeros(2, 1, 2, 1, 12, 64, dtype=torch.bfloat16, device="cuda"))


def test_a_lane_starts_kernels_on_its_device(cupy: Cupy) -> None:
    lane = object.__new__(SideStream)  # a stream needs a GPU, and a start asks for none here
    lane.device = torch.device("cpu")
    held = torch.randn(6, 3, 2, 2, 8, 16, generator=torch.Generator().manual_seed(3))
    table, filled = [4, 0, 3, 1], torch.zeros_like(held)
    layers, heads, tokens = range(1, 3), range(1, 2), range(5, 29)
    want = reference.pack_kv(held, table, layers, tokens, held.dtype, heads)
    rectangle, segment = (layers, heads, tokens), lane.buffer(want.shape, want.dtype)
    lane.start(launch.move(held, lane.upload(table), *rectangle, segment, into_pool=False))
    assert torch.equal(segment, want)
    lane.start(launch.move(filled, lane.upload(table), *rectangle, segment, into_pool=True))
    assert torch.equal(reference.pack_kv(filled, table, layers, tokens, held.dtype, heads), want)
    assert filled.count_nonzero() == want.count_nonzero()


def test_the_host_has_no_lane() -> None:
    assert lane_of(torch.device("cpu")) is None
