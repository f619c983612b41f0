"""Packages for a machine that has torch, NumPy and CuPy but no registry, carried as a folder.

Only the stages that serve a model need them.  They go before the machine's own packages, so a
folder holds neither torch nor NumPy: CuPy there was built beside those.
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
# What the machine must have, with all that belongs to it.
PRESENT: Final = ("torch", "numpy")
# Of our own: `tests.cluster` and `scripts.bench_serve` are HTTP clients.
BESIDE: Final = ("httpx",)
# pip compares tags as texts: each glibc up to a recent one is named, the widest choice of machines
# first, and the older names of some.
PLATFORMS: Final = (
    *("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
)


def read_present(path: Path) -> dict[str, str]:
    """Read what `pip list --format=freeze` has said on a machine: versions by name.

    Raises:
        ValueError: A line is neither NAME==VERSION nor a name; names the line.
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
    """Return the packages to carry, by name, in the versions that are installed here.

    Args:
        present: What the other machine has beside `PRESENT`, with all that belongs to it; a
            version that is not wanted there is carried all the same, an empty one is wanted.
    """
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
    """Download wheels of `needed` for a Python version, such as "3.12", from pip's registry.

    Returns:
        How many there are and what they take, in words.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--dest", str(directory)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    names = [f"{name}=={at}" for name, at in needed(present).items()]
    subprocess.run([*command, *names], check=True)
    sizes = [path.stat().st_size for path in directory.glob("*.whl")]
    return f"{len(sizes)} wheels, {sum(sizes) / 2**20:.1f} MiB in {directory}"


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
