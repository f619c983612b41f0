"""The carried folder contains every package that the stages import, and is unpacked by pip."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu import wheels

# Import what the stages import on a machine with a GPU, also in the processes they start.
PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Bare(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
import router.app, worker.app, worker.executor.torch, worker.executor.hash, worker.compute.graphs
import tests.gpu.bench, tests.gpu.graphs, tests.gpu.logits, tests.gpu.system, tests.gpu.serve
"""


def closure(names: tuple[str, ...]) -> set[str]:
    """Return these distributions and all their dependencies."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        needs = [Requirement(text) for text in metadata.requires(name) or ()]
        waiting += [it.name for it in needs if not it.marker or it.marker.evaluate({"extra": ""})]
    return found


def imported(there: set[str]) -> subprocess.CompletedProcess[str]:
    """Import everything in a process where only these packages exist."""
    absent = [
        module
        for module, names in metadata.packages_distributions().items()
        if not there & {canonicalize_name(name) for name in names}
    ]
    command = [sys.executable, "-c", PROGRAM, *absent]
    return subprocess.run(command, cwd=wheels.ROOT, capture_output=True, text=True, check=False)


def test_the_folder_beside_torch_is_enough() -> None:
    carried = set(wheels.needed())
    assert not carried & {"torch", "numpy", "cupy-cuda13x", "transformers"}
    there = closure(wheels.PRESENT) | carried | {"baton-serve"}
    done = imported(there)
    assert done.returncode == 0, done.stderr


def wheel(directory: Path, name: str, tag: str = "py3-none-any") -> None:
    """Write a wheel of one module."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", "ANSWER = 42\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")


def test_wheels_of_every_glibc_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"recent": "manylinux_2_31_x86_64", "old": "manylinux1_x86_64"}
    for name, platform in names.items():
        wheel(tmp_path / "registry", name, f"py3-none-{platform}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    monkeypatch.setattr(wheels, "needed", lambda *_: dict.fromkeys(names, "1.0"))
    summary = wheels.gather(tmp_path / "wheels", "3.12")
    assert len(list((tmp_path / "wheels").iterdir())) == 2
    assert summary.startswith("2 wheels, 0.0 MiB")


def test_what_the_machine_has_is_not_carried_unless_it_is_too_old(tmp_path: Path) -> None:
    file = tmp_path / "freeze"
    file.write_text("# of that machine\nNumba==99.0\n\nllvmlite\npydantic==1.0\n")
    left_out = set(wheels.needed()) - set(wheels.needed(wheels.read_present(file)))
    assert left_out == {"numba", "llvmlite"}
    file.write_text("numba @ file:///elsewhere\n")
    with pytest.raises(ValueError, match="'numba @ file:///elsewhere' is neither NAME==VERSION"):
        wheels.read_present(file)


def test_a_folder_s_packages_are_unpacked(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "carried_one")
    wheel(tmp_path / "wheels", "carried_two")
    wheels.install(tmp_path / "wheels", tmp_path / "target")
    assert {it.name for it in (tmp_path / "target").glob("*.py")} == {
        "carried_one.py",
        "carried_two.py",
    }


def test_a_wheel_of_another_machine_is_named(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "carried", "cp27-cp27m-win32")
    with pytest.raises(ValueError, match=r"carried-1\.0-cp27-cp27m-win32\.whl is not a supported"):
        wheels.install(tmp_path / "wheels", tmp_path / "target")
