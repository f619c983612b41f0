"""Copies into large pages are equal to the originals, wherever they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu.large_pages import PAGE_BYTES, in_large_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("rows", [0, 3, 2000])
def test_a_copy_is_contiguous_and_has_the_numbers(rows: int, dtype: torch.dtype) -> None:
    x = torch.randint(-99, 99, (rows, 700, 2)).to(dtype).transpose(0, 1)
    copy = in_large_pages(x)
    assert copy.is_contiguous() and torch.equal(copy, x) and copy.dtype is dtype
    again = in_large_pages(copy)
    assert rows == 0 or len({x.data_ptr(), copy.data_ptr(), again.data_ptr()}) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_a_large_copy_begins_a_page_and_asks_for_large_ones() -> None:
    copy = in_large_pages(torch.zeros(2 * PAGE_BYTES + 4096, dtype=torch.int8))
    assert copy.data_ptr() % PAGE_BYTES == 0
    areas = Path("/proc/self/smaps").read_text()
    of_copy = areas[areas.index(f"{copy.data_ptr():x}-") :]
    flags = of_copy[of_copy.index("VmFlags:") :].partition("\n")[0].split()
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
