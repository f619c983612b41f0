"""Processors, CUDA and units that this machine does not have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from router.command.doctor.machine import (
    check_cuda,
    check_processor,
    check_threads,
    check_unit,
    installed,
    output_of,
    processor_flags,
)


@pytest.mark.parametrize(
    ("flags", "level", "says"),
    [
        ("avx2 avx512_bf16 amx_tile amx_bf16 amx_int8", "ok", "AMX"),
        ("avx2 avx512_bf16", "ok", "AVX512-BF16"),
        ("avx2", "ok", "float32"),
        ("sse2", "warning", "several times slower"),
    ],
)
def test_the_arithmetic_of_a_processor(tmp_path: Path, flags: str, level: str, says: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n")
    found = check_processor(processor_flags(cpuinfo))
    assert found.level == level and says in found.what


@pytest.mark.parametrize(
    ("driver", "versions", "cures"),
    [
        (13, {"cupy-cuda13x": "14.0", "torch": "2.13.0"}, []),
        (13, {"cupy-cuda12x": "14.0", "torch": "2.13.0"}, []),
        (12, {"torch": "2.13.0"}, ["baton-serve[cuda12]"]),
        (12, {"cupy-cuda13x": "14.0", "torch": "2.13.0"}, ["uninstall -y cupy-cuda13x"]),
        (13, {"cupy": "14.0", "torch": "2.13.0+cpu"}, ["--force-reinstall torch"]),
    ],
)
def test_cupy_and_torch_fit_the_driver(
    driver: int, versions: dict[str, str], cures: list[str]
) -> None:
    found = [each for each in check_cuda(driver, versions) if each.level != "ok"]
    assert len(found) == len(cures)
    assert all(cure in each.cure for each, cure in zip(found, cures, strict=True))


@pytest.mark.parametrize(
    ("unit", "level", "cure"),
    [
        ({"ActiveState": "active", "NRestarts": "0"}, "ok", ""),
        ({"ActiveState": "active", "NRestarts": "3"}, "warning", "journalctl -u baton-x.service"),
        ({"ActiveState": "failed", "ExecMainStatus": "78"}, "fault", "correct /etc/baton"),
        ({"ActiveState": "failed", "Result": "oom-kill"}, "fault", "systemctl restart"),
        ({"ActiveState": "failed", "Result": "start-limit-hit"}, "fault", "reset-failed"),
    ],
)
def test_the_state_of_a_unit(unit: dict[str, str], level: str, cure: str) -> None:
    found = check_unit({"Id": "baton-x.service", **unit})
    assert found.level == level and cure in found.cure


def test_threads_of_a_setting_and_cores_that_are_not_there() -> None:
    worker = SimpleNamespace(threads=4096, cores="65535")
    found = check_threads([worker], {})
    assert [each.level for each in found] == ["fault", "warning"]
    assert found[0].cure == "leave out --cores" and found[1].cure.startswith("--threads ")


def test_a_program_that_is_missing_or_fails() -> None:
    assert output_of(["/nothing/here"])[0] == 1
    assert output_of(["sh", "-c", "echo said >&2; exit 3"]) == (3, "said\n")
    assert "pytest" in installed()
