"""vLLM's tests out of its source distribution: fetched once, checked by its hash, never in here."""

from __future__ import annotations

import hashlib
import os
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, Final

from pip._internal.commands import create_command

VERSION: Final = "0.32.0"
SHA256: Final = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
# The two that hold vLLM's own fixtures; `baton_server` stands in for them.
FIXTURES: Final = {"tests/conftest.py", "tests/utils.py"}


def cache() -> Path:
    """Where everything that comes from a registry is kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton" / "clients"


def tests() -> Path:
    """The directory that holds vLLM's `tests`, without its fixtures.

    Raises:
        ValueError: what came is not the file that was published.
    """
    there = cache() / f"vllm-{VERSION}"
    if not there.exists():
        there.parent.mkdir(parents=True, exist_ok=True)
        archive = there.with_name(f"{there.name}.tar.gz")
        _fetch(archive)
        unpacked = there.with_name(f"{there.name}.unpacked")
        _unpack(archive, unpacked)
        unpacked.rename(there)
    return there / f"vllm-{VERSION}"


def _fetch(archive: Path) -> None:
    if not archive.exists():
        with urllib.request.urlopen(_published(), timeout=300) as response:
            archive.write_bytes(response.read())
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        archive.unlink()
        raise ValueError(f"vllm {VERSION} has the hash {found}, not {SHA256}")


def _published() -> str:
    """Where the registry that pip is set to has the source distribution.

    pip itself can only download it by building it, which takes a compiler and gigabytes.
    """
    command: Any = create_command("download")
    options, _ = command.parse_args(["vllm", "--no-binary", ":all:"])
    with command.main_context():
        finder = command._build_package_finder(options, command.get_default_session(options))  # noqa: SLF001
        found = [it for it in finder.find_all_candidates("vllm") if str(it.version) == VERSION]
    return str(found[0].link.url)


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if path.startswith("tests/") and path not in FIXTURES:
                tar.extract(member, into, filter="data")
