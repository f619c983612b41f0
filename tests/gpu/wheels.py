"""Packages for a machine that has torch, NumPy and CuPy but no registry, carried as a folder.

Only the stages that serve a model need them.  They go before the machine's own packages, so a
folder holds neither torch nor NumPy: CuPy there was built beside those.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
# What the machine must have, with all that belongs to it.
PRESENT: Final = ("torch", "numpy")
# Of our own: `tests.cluster` and `scripts.bench_serve` are HTTP clients.
BESIDE: Final = ("httpx",)
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def needed() -> dict[str, str]:
    """Return the packages to carry, by name, in the versions that are installed here."""
    # Not at the top: the machine that is checked need not have it.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *BESIDE)]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in PRESENT:
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


def gather(directory: Path, python: str) -> None:
    """Download wheels of `needed` for a Python version, such as "3.12", from pip's registry."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--dest", str(directory)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *(f"{name}=={at}" for name, at in needed().items())], check=True)


def install(directory: Path, target: Path) -> None:
    """Unpack a folder's wheels to where PYTHONPATH can point.

    Raises:
        ValueError: There is none, or pip refuses one; says why.
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
