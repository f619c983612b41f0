"""Verify and measure the CUDA kernels on this machine's GPU, unattended, in under 9 minutes.

    scripts/gpu_check                               everything; writes kernels/verified.json
    scripts/gpu_check --wheels DIR --out DIR        the same on a machine that has torch, NumPy and
                                                    CuPy but no registry for the other packages
    scripts/gpu_check --gather-wheels DIR --python 3.12 --present FILE
                                                    download those packages on a machine with a
                                                    registry and this project's .venv; FILE is
                                                    `pip list --format=freeze` of the GPU machine
    scripts/gpu_check --seed 17 --only "verify kv"  a stage, on the inputs of an earlier run
    scripts/gpu_check --backend shim --quick        the same kernels compiled by g++, on the CPU:
                                                    tries this script, says nothing about a GPU
    scripts/gpu_check --readme                      write verified.json into kernels/README.md

Kernels run on fresh random inputs; the seed is printed.  Every stage is a process of its own.  OUT
holds findings.jsonl, written at once, log.txt, what the processes said, report.txt, and of a full
run verified.json, written after every stage there and to kernels/.

Exit status: 0 all right and every target reached; 1 something is wrong or broke; 2 usage; 3 there
is no GPU or no cupy, so nothing was checked; 4 all right, but a target was missed or not measured.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from kernels import KernelError
from kernels.cuda import backend as cuda
from tests.gpu import record, wheels
from tests.gpu.child import run_parts
from tests.gpu.parent import run_process, run_stage, skip
from tests.gpu.report import EXIT_NO_DEVICE, EXIT_USAGE, exit_status, render
from tests.gpu.settings import Settings
from tests.gpu.stages import STAGES, Stage, stage_named
from tests.gpu.trail import Trail, figures_of

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.readme:
        text = record.README.read_text(encoding="utf-8")
        record.README.write_text(record.with_table(text, record.read()), encoding="utf-8")
        return 0
    if args.gather_wheels:
        return _gather(args)
    if args.backend == "cuda":
        try:
            cuda.require_device()
        except KernelError as error:
            print(f"nothing was checked: {error}", file=sys.stderr)
            return EXIT_NO_DEVICE
    settings = Settings(args.backend, args.seed, args.quick)
    trail = Trail(args.out / "findings.jsonl")
    if args.stage:
        stage = stage_named(args.stage)
        return run_parts(stage.name, stage.parts_of(settings), trail, args.first)
    if args.wheels is None:
        return check(args, settings, trail, run)
    target = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    try:
        wheels.install(args.wheels, target)
        _put_on_path(target)
        return check(args, settings, trail, run)
    except ValueError as error:
        print(f"--wheels {error}", file=sys.stderr)
        return EXIT_USAGE
    finally:
        shutil.rmtree(target)


def _gather(args: argparse.Namespace) -> int:
    try:
        present = wheels.read_present(args.present) if args.present else {}
    except (ValueError, OSError) as error:
        print(f"--present {error}", file=sys.stderr)
        return EXIT_USAGE
    print(wheels.gather(args.gather_wheels, args.python, present))
    return 0


def _put_on_path(packages: Path) -> None:
    """Make this process and its children import from this folder first."""
    sys.path.insert(1, str(packages))
    earlier = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), earlier)))


def check(
    args: argparse.Namespace,
    settings: Settings,
    trail: Trail,
    run: Callable[[Stage, argparse.Namespace, Settings, Trail, float], None],
) -> int:
    """Run the stages, keep what they find, report."""
    print(f"seed {settings.seed}, backend {settings.backend}, findings in {trail.path}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("findings.jsonl", "log.txt", "report.txt", "verified.json"):
        (args.out / name).unlink(missing_ok=True)
    deadline = time.monotonic()
    is_full = settings.backend == "cuda" and not settings.is_quick
    skip("verify coverage", record.uncovered(), "no part of this check runs it", trail)
    for stage in STAGES:
        if args.only and stage.name not in args.only:
            continue
        deadline += stage.limit_s
        run(stage, args, settings, trail, deadline)
        if is_full and not args.only:
            keep(trail, settings, (record.PATH, args.out / "verified.json"))
    is_full = is_full and not args.only
    title = "CUDA kernels on a GPU" if settings.backend == "cuda" else "CUDA kernels, NOT on a GPU"
    report = render(trail.findings(), f"{title}, seed {settings.seed}", is_full=is_full)
    (args.out / "report.txt").write_text(report + "\n", encoding="utf-8")
    print(report)
    return exit_status(trail.findings(), is_full=is_full)


def run(
    stage: Stage, args: argparse.Namespace, settings: Settings, trail: Trail, deadline: float
) -> None:
    print(f"{stage.name} ...", flush=True)
    try:
        names = list(stage.parts_of(settings))
    except ImportError as error:  # a machine that has torch and cupy need not have the rest
        skip(stage.name, ["all"], f"{error}: see --wheels, or pip install -e '.[dev]'", trail)
        return
    command = [sys.executable, "-m", "tests.gpu", "--stage", stage.name, "--out", str(args.out)]
    command += ["--seed", str(settings.seed), "--backend", settings.backend]
    command += ["--quick"] if settings.is_quick else []

    def child(first: int, limit_s: float) -> str:
        return run_process([*command, "--first", str(first)], args.out / "log.txt", limit_s, ROOT)

    run_stage(stage.name, names, child, trail, deadline - time.monotonic())
    for finding in trail.findings():
        if finding.stage == stage.name:
            print(f"    {finding.part}: {finding.state} {finding.problem}".rstrip(), flush=True)


def keep(trail: Trail, settings: Settings, places: Sequence[Path]) -> None:
    """Bring kernels/verified.json up to date with what is known so far; write it to all places."""
    findings = trail.findings()
    device = str(figures_of(findings).get("device", "an unnamed GPU"))
    keep = partial(record.merged, record.read(), findings, device=device, seed=settings.seed)
    kept = keep(day=datetime.now(UTC).date().isoformat())
    for path in places:
        record.write(kept, path)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=("cuda", "shim"), default="cuda")
    parser.add_argument("--seed", type=int, default=None, help="of all inputs; drawn if not given")
    parser.add_argument("--quick", action="store_true", help="few, small inputs; nothing is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check", metavar="DIR")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="import packages from this folder too"
    )
    parser.add_argument(
        "--gather-wheels", type=Path, metavar="DIR", help="only download packages for --wheels"
    )
    parser.add_argument(
        "--present", type=Path, metavar="FILE", help="pip list --format=freeze of the GPU machine"
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="Python version to gather wheels for")
    parser.add_argument(
        "--readme", action="store_true", help="only write the table of kernels/README.md"
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--only", action="append", choices=names, help="this stage; may be repeated"
    )
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    return args


if __name__ == "__main__":
    sys.exit(main())
