"""Carry packages in a folder to a machine that has torch, NumPy and CuPy but no registry.

Only the stages that serve a model need these packages.  They precede the machine's own packages on
the import path, so the folder contains neither torch nor NumPy: the machine's CuPy needs its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
# Packages that the machine must have, with their dependencies.
PRESENT: Final = ("torch", "numpy")
# `tests.cluster` needs an HTTP client.
BESIDE: Final = ("httpx",)
# pip compares platform tags as strings, so every glibc version is listed, also under its old name.
PLATFORMS: Final = (
    *("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
)


def read_present(path: Path) -> dict[str, str]:
    """Read the output of `pip list --format=freeze`: versions by package name.

    Raises:
        ValueError: A line is neither NAME==VERSION nor a name.
    """
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        if (parts := re.fullmatch(r"([A-Za-z0-9._-]+)(?:==(\S+))?", text)) is None:
            raise ValueError(f"{path}: {text!r} is neither NAME==VERSION nor a name")
        found[canonicalize_name(parts[1])] = parts[2] or ""
    return found


def needed(present: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the versions of the packages to carry, as installed here, by name.

    Args:
        present: Versions of packages that the other machine has with their dependencies.  They
            are left out unless the version is unsuitable; an empty version is always suitable.
    """
    # Imported here because the GPU machine may lack `packaging`.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *BESIDE)]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        at = (present or {}).get(name)
        if name in PRESENT or at == "" or (at is not None and wanted.specifier.contains(at)):
            continue
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = metadata.version(name)
            for text in metadata.requires(name) or ():
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)
    return dict(sorted(found.items()))


def gather(directory: Path, python: str, present: Mapping[str, str] | None = None) -> str:
    """Download the wheels of `needed` for a Python version such as "3.12"; return a summary."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--dest", str(directory)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    names = [f"{name}=={at}" for name, at in needed(present).items()]
    subprocess.run([*command, *names], check=True)
    sizes = [path.stat().st_size for path in directory.glob("*.whl")]
    return f"{len(sizes)} wheels, {sum(sizes) / 2**20:.1f} MiB in {directory}"


def install(directory: Path, target: Path) -> None:
    """Unpack the folder's wheels into `target`, to be put on PYTHONPATH.

    Raises:
        ValueError: There are no wheels, or pip rejects one.
    """
    wheels = sorted(map(str, directory.glob("*.whl")))
    if not wheels:
        raise ValueError(f"{directory} has no wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(target), *wheels],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{directory}: {done.stderr.strip()[-500:]}")
