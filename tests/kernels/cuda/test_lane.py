"""The stream beside the one that computes; what it promises shows on a GPU only."""

from __future__ import annotations

import pytest
import torch

from kernels import KernelError
from kernels.cuda import backend as cuda
from kernels.cuda.lane import SideStream
from tests.gpu.timing import spend


@pytest.fixture
def lane() -> SideStream:
    try:
        cuda.require_device()
    except KernelError as error:
        pytest.skip(str(error))
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
