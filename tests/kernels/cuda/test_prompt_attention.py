"""Whole prompts go the way that was quicker when both were timed; all else is our kernel's."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch

import kernels
from kernels import PagedBatch
from kernels.cuda import backend as cuda
from kernels.cuda import prompt_attention as prompts
from kernels.cuda.prompt_attention import Way
from tests.kernels.scenes import check, scene, sinks_of
from tests.kernels.shim.cupy import Cupy
from tests.kernels.shim.cupy import cupy as cupy

PROMPTS = [(37, 37), (90, 90)]


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_fastest", {})


def seconds(way: Way, length: int) -> float:
    """Flash takes less from 100 tokens on, but has no room for 4096; the wide one from 1000 on."""
    flash = 100 if length < 4096 else float("inf")
    return {Way.OURS: length, Way.WIDE: length / 2 + 500, Way.FLASH: flash}[way]


def test_a_table_has_the_quicker_way_of_each_length() -> None:
    lengths = (50, 200, 4096)
    found = prompts.measure(seconds, lengths)
    assert found == ((0, Way.OURS), (50, Way.OURS), (200, Way.FLASH), (4096, Way.OURS))
    found = prompts.measure(seconds, lengths, has_wide=True)
    assert found == ((0, Way.WIDE), (50, Way.FLASH), (200, Way.FLASH), (4096, Way.WIDE))
    found = prompts.measure(seconds, lengths[:2], has_wide=True)
    assert found == ((0, Way.OURS), (50, Way.OURS), (200, Way.FLASH))


@pytest.mark.parametrize(
    ("lens", "way"),
    [
        ([(37, 37)], Way.OURS),  # shorter than any that was measured
        ([(300, 300), (200, 200)], Way.FLASH),
        ([(300, 300), (199, 199)], Way.OURS),
        ([(5000, 5000)], Way.OURS),
        ([(300, 299)], Way.OURS),  # has a past
        ([(300, 300), (250, 210)], Way.OURS),
        ([(1, 1)] * 3, Way.OURS),  # as a recorded step is at first
    ],
)
def test_a_step_goes_as_its_shortest_prompt(lens: list[tuple[int, int]], way: Way) -> None:
    table = ((0, Way.OURS), (200, Way.FLASH), (4096, Way.OURS))
    queries = torch.tensor([0, *(count for _, count in lens)])
    contexts = torch.tensor([context for context, _ in lens], dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    batch = PagedBatch(none, queries.cumsum(0, dtype=torch.int32), contexts, none)
    assert prompts.choose(table, batch) is way
    assert prompts.choose(((0, Way.WIDE),), batch) is way, "it is asked once a step"


def test_a_prompt_goes_to_torch_where_that_was_quicker(cupy: Cupy) -> None:
    for head_dim in (64, 128):
        it = scene([(300, 300), (256, 256)], head_dim=head_dim, dtype=torch.bfloat16)
        cuda.measure_prompts(it.pool, 4, lambda way, _: int(way is Way.OURS))
        check(it, None, cuda)
        assert not cupy.launched, "torch has attended"
    check(scene([(256, 256)], num_kv_heads=4, head_dim=128, dtype=torch.bfloat16), None, cuda)
    assert cupy.launched, "a pool of other heads has not been measured"


def test_what_has_a_past_a_window_a_cap_or_sinks_is_our_kernel_s(cupy: Cupy) -> None:
    it = scene(PROMPTS, head_dim=64, dtype=torch.bfloat16)
    past = scene([(90, 40)], head_dim=64, dtype=torch.bfloat16)
    cuda._fastest[prompts.kind(it.pool, 4)] = (0, Way.OURS), (1, Way.FLASH)  # noqa: SLF001
    check(it, 24, cuda)
    check(it, None, cuda, cap=3.0)
    check(it, None, cuda, sinks=sinks_of(it))
    check(past, None, cuda)
    assert len(cupy.launched) == 2 * 4


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: cuda.HOPPER)
    monkeypatch.setattr(cuda, "is_verified", lambda kernel, _: kernel == "attend_wide")


def test_a_kernel_is_used_only_as_it_was_verified(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, digest = tmp_path / "verified.json", cuda.source_hash("attention_hopper")
    (tmp_path / "csrc").symlink_to(Path(kernels.__file__).with_name("csrc"))
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: cuda.HOPPER)
    it = scene([(70, 70)], head_dim=64, dtype=torch.bfloat16)
    for entry, way in (
        ({}, Way.OURS),
        ({"attend_wide": {"passed": False, "hash": digest}}, Way.OURS),
        ({"attend_wide": {"passed": True, "hash": "of an earlier one"}}, Way.OURS),
        ({"attend_wide": {"passed": True, "hash": digest}}, Way.WIDE),
    ):
        file.write_text(json.dumps({"kernels": entry}))
        assert cuda.measure_prompts(it.pool, 4, wide_first)[0] == (0, way)


def wide_first(way: Way, _: int) -> float:
    return float([Way.WIDE, Way.OURS, Way.FLASH].index(way))


def test_many_rows_go_the_wide_way_where_that_is_quicker(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = scene([(300, 300), (90, 40), (70, 1)], head_dim=64, dtype=torch.bfloat16)
    assert cuda.measure_prompts(it.pool, 4, wide_first)[0] == (0, Way.OURS), "it is no Hopper"
    on_hopper(monkeypatch)
    assert cuda.measure_prompts(it.pool, 4, wide_first)[0] == (0, Way.WIDE)
    for window, cap in ((None, None), (24, 3.0)):
        cupy.launched.clear()
        check(it, window, cuda, cap=cap, sinks=sinks_of(it))
        names = {name.partition("<")[0] for *_, name in cupy.launched}
        assert names == {"attend", "attend_wide"}, "generation is what attend is for"


@pytest.mark.parametrize("bug", ["wrong", "no compiler"])
def test_a_wide_kernel_that_does_not_do_as_the_other_is_never_used(
    bug: str, cupy: Cupy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = cuda.source_text

    def broken(source: str) -> str:
        if source == "attention_hopper" and bug == "no compiler":
            raise ValueError("sm_90a is unknown")
        return text(source).replace("values + n * 16 * ROW", "values + n * 8 * ROW")

    monkeypatch.setattr(cuda, "source_text", broken)
    on_hopper(monkeypatch)
    it = scene([(70, 70)], head_dim=64, dtype=torch.bfloat16)
    assert cuda.measure_prompts(it.pool, 4, wide_first)[0] == (0, Way.OURS)
    (record,) = caplog.records
    reason = {"wrong": "its results are not those of attend", "no compiler": "sm_90a is unknown"}
    assert record.levelname == "ERROR" and reason[bug] in record.message
    cupy.launched.clear()
    check(it, None, cuda)
    assert {name.partition("<")[0] for *_, name in cupy.launched} == {"attend"}
