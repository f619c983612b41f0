"""The scenes catch broken kernels: each mutation is one bug, and none may pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.shim.backend import CSRC, ROOT, why_not

MUTATIONS = {
    "no barrier before a tile": ("    __syncthreads();  // everybody's", "    // everybody's"),
    "the wait is one group too weak": ("copies_wait<STAGES - 2>", "copies_wait<STAGES - 1>"),
    "one key too many": ("key <= position &&", "key <= position + 1 &&"),
    "the window is one too wide": ("position - a.window : -1", "position - a.window - 1 : -1"),
    "no mask beyond the end": ("bool valid = key < key_end;", "bool valid = true;"),
    "another head": ("kv_head * group + row % group", "kv_head * group + (row + 1) % group"),
    "minus infinity unguarded": ("now == MINUS_INFINITY ? 0.f : now", "now"),
    "the sum is not rescaled": ("sum[h] * shrink + added", "sum[h] + added"),
    "the ring is one short": ("load(tile + STAGES - 1);\n    c", "load(tile + STAGES);\n    c"),
    "half a row is summed": ("    sum[h] += from_lane_xor(sum[h], 2);\n", ""),
    "parts are not weighted": ("a.logs[place(part)] - highest)", "0.f)"),
    "values for keys": ("T* values = keys + BN * LD", "T* values = keys"),
}
ROW_MUTATIONS = {
    "the sum of one warp": ("sums[0] + sums[1] + sums[2] + sums[3]", "sums[0] * 4.f"),
    "no barrier before the sum": ("  __syncthreads();\n  const float total", "  const float total"),
    "what is added is not kept": ("x[i] = value = narrow", "value = narrow"),
    "one value too many": ("i >= a.size", "i > a.size"),
    "gate for up": ("widen(row[a.size + i])", "widen(row[i])"),
}
# A process of its own: a broken kernel may abort.
PROGRAM = """
import sys, torch
from kernels import launch
from tests.kernels.scenes import check, scene
from tests.kernels.shim.backend import Shim
it = Shim({"attention": launch.attention_kernels(torch.bfloat16, 64)},
          texts={"attention": sys.stdin.read()})
for lens in ([(70, 33), (129, 64), (17, 1)], [(700, 1), (66, 3)]):
    for window in (None, 24):
        check(scene(lens, head_dim=64, dtype=torch.bfloat16), window, it)
"""
ROW_PROGRAM = """
import sys, torch
from kernels import launch_rows, reference
from tests.kernels.shim.backend import Shim
it = Shim({"rowwise": launch_rows.row_kernels(torch.float32)}, texts={"rowwise": sys.stdin.read()})
for size in (130, 1000):
    x, added, weight = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
    copy, both = x.clone(), torch.cat((x, added), dim=1)
    want = reference.add_rms_norm(copy, added, weight, 1e-5)
    torch.testing.assert_close(it.add_rms_norm(x, added, weight, 1e-5), want)
    torch.testing.assert_close(x, copy)
    # Room behind the last row, to see who writes there.
    out = torch.full((4, size), 7.0)
    it.run(launch_rows.gate(both, out[:3]))
    torch.testing.assert_close(out[:3], reference.silu_gate(both))
    assert (out[3] == 7.0).all()
"""


def survives(text: str, program: str = PROGRAM) -> bool:
    command = [sys.executable, "-c", program]
    return (
        subprocess.run(command, input=text.encode(), cwd=ROOT, capture_output=True).returncode == 0
    )


def test_the_scenes_pass_what_is_whole() -> None:
    if reason := why_not():
        pytest.skip(reason)
    assert survives((CSRC / "attention.cu").read_text())


@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_bug_is_caught(bug: str, pytestconfig: pytest.Config) -> None:
    if reason := why_not():
        pytest.skip(reason)
    if list(MUTATIONS).index(bug) % 4 and not pytestconfig.getoption("--full"):
        pytest.skip("a compile of several seconds: with --full")
    text, (old, new) = (CSRC / "attention.cu").read_text(), MUTATIONS[bug]
    assert text.count(old) == 1, "the mutation no longer fits the source"
    assert not survives(text.replace(old, new))


def test_rows_pass_what_is_whole() -> None:
    if reason := why_not():
        pytest.skip(reason)
    assert survives((CSRC / "rowwise.cu").read_text(), ROW_PROGRAM)


@pytest.mark.parametrize("bug", ROW_MUTATIONS)
def test_a_bug_in_rows_is_caught(bug: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    text, (old, new) = (CSRC / "rowwise.cu").read_text(), ROW_MUTATIONS[bug]
    assert text.count(old) == 1, "the mutation no longer fits the source"
    assert not survives(text.replace(old, new), ROW_PROGRAM)
