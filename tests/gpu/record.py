"""kernels/verified.json: which kernel was right on which GPU, and kernels/README.md's table of it.

A kernel is a `__global__` function of csrc/; its hash is that of all it is compiled from.  What has
another hash now has changed since, and what is not in the file has never run on a GPU.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Final

from kernels.cuda import backend as cuda
from tests.gpu.trail import Figures, Finding, State

ROOT: Final = Path(__file__).resolve().parents[2]
PATH: Final = ROOT / "kernels" / "verified.json"
README: Final = ROOT / "kernels" / "README.md"
BEGIN: Final = "<!-- kernels on a GPU: written by scripts/gpu_check --readme -->"
# The name of each kernel in a source without comments.
KERNEL: Final = re.compile(r"__global__\s+void\s*(?:__launch_bounds__\(.*?\))?\s*(\w+)\s*\(")
END: Final = "<!-- end of kernels on a GPU -->"
# The first word of a part to the kernels that it runs.
COVERED_BY: Final[dict[str, tuple[str, ...]]] = {
    "tiled": ("attend",),
    "wide": ("attend_wide",),
    "plain": ("attend_plain",),
    "heads": ("rotate_and_append",),
    "move": ("move",),
    "rows": ("rms_norm", "gate"),
    "draw": ("draw",),
    "pieces": ("copy_pieces",),
}


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a kernel's last check on a GPU."""

    source: str  # file of csrc/, without .cu
    hash: str  # `cuda.source_hash` of it then
    passed: bool
    device: str
    date: str  # YYYY-MM-DD
    seed: int


@dataclass(frozen=True, slots=True)
class Record:
    """The file: kernels by name, and the figures of the last run on a GPU, by name."""

    kernels: dict[str, Verified] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)


def sources() -> dict[str, str]:
    """Return every kernel's file of csrc/, without .cu, by the kernel's name."""
    found: dict[str, str] = {}
    for path in sorted((resources.files("kernels") / "csrc").iterdir(), key=lambda it: it.name):
        if path.name.endswith(".cu"):
            text = re.sub(r"//.*", "", path.read_text())
            found |= dict.fromkeys(KERNEL.findall(text), path.name.removesuffix(".cu"))
    return found


def uncovered() -> list[str]:
    """Return the kernels that no part of the verification runs."""
    covered = {kernel for kernels in COVERED_BY.values() for kernel in kernels}
    return [kernel for kernel in sources() if kernel not in covered]


def read(path: Path = PATH) -> Record:
    """Read the file.

    Raises:
        ValueError: It names a kernel that does not exist.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    kernels = {name: Verified(**entry) for name, entry in content["kernels"].items()}
    if unknown := kernels.keys() - sources().keys():
        raise ValueError(f"{path.name}: there is no kernel {', '.join(sorted(unknown))}")
    return Record(kernels, content["figures"])


def write(record: Record, path: Path = PATH) -> None:
    text = json.dumps(asdict(record), indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def merged(record: Record, findings: list[Finding], *, device: str, day: str, seed: int) -> Record:
    """Add what a run on a GPU found: a kernel passed if every part that runs it did."""
    files, kernels = sources(), dict(record.kernels)
    for kernel, is_right in results(findings).items():
        kernels[kernel] = Verified(
            files[kernel], cuda.source_hash(files[kernel]), is_right, device, day, seed
        )
    figures: Figures = {"device": device, "date": day}
    for finding in findings:
        if finding.state is State.OK and finding.stage.startswith(("bench", "system")):
            figures |= finding.figures
    return Record(kernels, figures)


def results(findings: list[Finding]) -> dict[str, bool]:
    """Return the kernels of which something is known, and whether all their parts ended well.

    One part that failed or was lost is enough to be wrong; one that was not tried leaves a kernel
    open, unless another has failed.
    """
    states: dict[str, set[State]] = {}
    for finding in findings:
        if finding.stage.startswith("verify"):
            for kernel in COVERED_BY.get(finding.part.split()[0], ()):
                states.setdefault(kernel, set()).add(finding.state)
    wrong = {State.FAILED, State.LOST}
    return {
        kernel: not seen & wrong
        for kernel, seen in states.items()
        if seen & wrong or seen == {State.OK}
    }


def state_of(kernel: str, record: Record) -> str:
    """Say in words what is known of a kernel on a GPU."""
    verified = record.kernels.get(kernel)
    if verified is None:
        return "never run on a GPU"
    where = f"on {verified.device}, {verified.date}"
    if not verified.passed:
        return f"failed {where}"
    if verified.hash != cuda.source_hash(sources()[kernel]):
        return f"changed since it was right {where}"
    return f"right {where}"


def table(record: Record) -> str:
    """Return the table of kernels/README.md."""
    rows = [
        f"| `{kernel}` | `csrc/{source}.cu` | {state_of(kernel, record)} |"
        for kernel, source in sources().items()
    ]
    return "\n".join(["| kernel | in | on a GPU |", "|---|---|---|", *rows])


def with_table(text: str, record: Record) -> str:
    """Return the document's text with the table of now.

    Raises:
        ValueError: The marks between which it stands are not there.
    """
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"kernels/README.md lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(record)}\n{END}{after}"
