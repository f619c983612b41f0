"""Verify and measure the CUDA kernels on this machine's GPU, unattended, in under 8 minutes.

    scripts/gpu_check                               everything; writes kernels/verified.json
    scripts/gpu_check --seed 17 --only "verify kv"  a stage, on the inputs of an earlier run
    scripts/gpu_check --backend shim --quick        the same kernels compiled by g++, on the CPU:
                                                    tries this script, says nothing about a GPU
    scripts/gpu_check --readme                      write verified.json into the README's table

Kernels run on fresh random inputs; the seed is printed.  Every stage is a process of its own, what
it finds is written at once to OUT/findings.jsonl, and verified.json after every stage.

Exit status: 0 all right and every target reached; 1 something is wrong or broke; 2 usage; 3 there
is no GPU or no cupy, so nothing was checked; 4 all right, but a target was missed or not measured.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kernels import KernelError  # noqa: E402
from kernels.cuda import backend as cuda  # noqa: E402
from scripts.gpucheck import record  # noqa: E402
from scripts.gpucheck.child import run_parts  # noqa: E402
from scripts.gpucheck.parent import run_process, run_stage, skip  # noqa: E402
from scripts.gpucheck.report import EXIT_NO_DEVICE, exit_status, render  # noqa: E402
from scripts.gpucheck.settings import Settings  # noqa: E402
from scripts.gpucheck.stages import STAGES, TOTAL_S, Stage, stage_named  # noqa: E402
from scripts.gpucheck.trail import Finding, State, Trail, figures_of  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.readme:
        text = record.README.read_text(encoding="utf-8")
        record.README.write_text(record.with_table(text, record.read()), encoding="utf-8")
        return 0
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
    return _check(args, settings, trail)


def _check(args: argparse.Namespace, settings: Settings, trail: Trail) -> int:
    """Run the stages, keep what they find, report."""
    print(f"seed {settings.seed}, backend {settings.backend}, findings in {trail.path}", flush=True)
    trail.path.unlink(missing_ok=True)
    deadline = time.monotonic() + TOTAL_S
    is_full = settings.backend == "cuda" and not settings.is_quick
    skip("verify coverage", record.uncovered(), "no part of this check runs it", trail)
    for stage in STAGES:
        if args.only and stage.name not in args.only:
            continue
        _run(stage, args, settings, trail, deadline)
        if is_full and not args.only:
            _keep(trail, settings)
    is_full = is_full and not args.only
    title = "CUDA kernels on a GPU" if settings.backend == "cuda" else "CUDA kernels, NOT on a GPU"
    report = render(trail.findings(), f"{title}, seed {settings.seed}", is_full=is_full)
    (args.out / "report.txt").write_text(report + "\n", encoding="utf-8")
    print(report)
    return exit_status(trail.findings(), is_full=is_full)


def _run(
    stage: Stage, args: argparse.Namespace, settings: Settings, trail: Trail, deadline: float
) -> None:
    if stage.needs_gpu and settings.backend != "cuda":
        skip(stage.name, ["all"], "it needs a GPU", trail)
        return
    print(f"{stage.name} ...", flush=True)
    try:
        names = list(stage.parts_of(settings))
    except ImportError as error:  # a machine that has torch and cupy need not have the rest
        trail.add(Finding(stage.name, "all", State.FAILED, f"{error}: pip install -e '.[dev]'"))
        return
    command = [sys.executable, __file__, "--stage", stage.name, "--out", str(args.out)]
    command += ["--seed", str(settings.seed), "--backend", settings.backend]
    command += ["--quick"] if settings.is_quick else []
    log = args.out / f"{stage.name.replace(' ', '-')}.log"

    def child(first: int, limit_s: float) -> str:
        return run_process([*command, "--first", str(first)], log, limit_s, ROOT)

    limit_s = min(stage.limit_s, deadline - time.monotonic())
    run_stage(stage.name, names, child, trail, limit_s)
    for finding in trail.findings():
        if finding.stage == stage.name:
            print(f"    {finding.part}: {finding.state} {finding.problem}".rstrip(), flush=True)


def _keep(trail: Trail, settings: Settings) -> None:
    """Bring kernels/verified.json up to date with what is known so far."""
    findings = trail.findings()
    device = str(figures_of(findings).get("device", "an unnamed GPU"))
    keep = partial(record.merged, record.read(), findings, device=device, seed=settings.seed)
    record.write(keep(day=datetime.now(UTC).date().isoformat()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("cuda", "shim"), default="cuda")
    parser.add_argument("--seed", type=int, default=None, help="of all inputs; drawn if not given")
    parser.add_argument("--quick", action="store_true", help="few, small inputs; nothing is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check", metavar="DIR")
    parser.add_argument("--readme", action="store_true", help="only write the README's table")
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
